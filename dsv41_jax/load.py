"""`load`: from a name or a folder to a `Model`."""

import dataclasses
import functools
import hashlib
import logging
import os
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from dsv41_jax import distributed, sharding
from dsv41_jax import numerics as numerics_module
from dsv41_jax.checkpoint.open_folder import open_folder
from dsv41_jax.checkpoint.released import check_choices, load_params
from dsv41_jax.checkpoint.save_released import TOKEN_MAP_FILE
from dsv41_jax.checkpoint.tensor_source import TensorSource
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_hash import EngramHasher
from dsv41_jax.engram_layout import engram_layout
from dsv41_jax.engram_prefetch import PrefetchingTable
from dsv41_jax.engram_share import EngramShare, own_range
from dsv41_jax.expert_parallel import check_dispatch
from dsv41_jax.generate import Model
from dsv41_jax.kernel_params import check_config, pack_params
from dsv41_jax.model_folder import find_folder
from dsv41_jax.runner import Runner
from dsv41_jax.token_map import compressed_token_map
from dsv41_jax.tokenizer import Tokenizer
from pallas_kernels.implementation import require_device, resolve

_log = logging.getLogger(__name__)
_LARGE = 1 << 30
_HOT_BYTES = {"host": 0, "mmap": 256 << 20}


def load(
    path: str | os.PathLike,
    mesh: Mesh | None = None,
    numerics: str = "released",
    engram: str = "device",
    expert_storage: str = "fp4",
    token_map: np.ndarray | None = None,
    implementation: str = "auto",
    revision: str | None = None,
    engram_hot_bytes: int | None = None,
    dispatch: str | None = None,
) -> Model:
    """Load a model.

    Args:
        path: "demo" (the model inside this package), a folder in the released format, an Orbax folder (see
            `checkpoint/orbax.py`), or a hub id "owner/name" where no such path, nor a folder "owner", exists here.
        mesh: None: everything is on the default device. A mesh of `sharding.Layout(data, context, tensor).mesh()`
            spreads parameters and caches over its devices, docs/pods.md says how; parameters are read straight into
            their shards. In a run of several processes every process makes the same calls.
        numerics: "released" (bf16, FP8 and FP4 activations and caches), "noquant" (bf16, those unquantised) or
            "float32".
        engram: where the Engram tables are: "device", "host" (memory) or "mmap" (rows are read from the file).
        expert_storage: "fp4", "fp8" (only where exact) or "bf16".
        token_map: int array [vocab], raw id -> Engram id, for folders with neither tokenizer.json nor token_map.npy.
        implementation: who computes what has kernels: "auto" (the kernels of a TPU or a CUDA GPU if it is the default
            device and the numerics are "released", else the reference; the choice is logged and stands in
            `Model.implementation`), "reference" (plain jax.numpy), "tpu", "gpu", or "interpret" (the TPU kernels
            interpreted on any machine: slow, for tests).
        revision: of a hub id: a branch, tag or commit.
        engram_hot_bytes: memory for the hot rows of each Engram table that is read from the file; default 256 MiB, and
            0 for tables in host memory, which need none.
        dispatch: on a mesh, how tokens reach experts: "gather", "all_to_all" or "ragged" (see `expert_parallel`)
            while prompts are read and tokens decoded; None: "gather" for few tokens, "all_to_all" for many. Drafts and
            losses gather.

    Returns:
        the `Model`.

    Raises:
        ValueError: an unknown choice, kernels that this process or these numerics do not have, a revision of a local
            folder, or a model with Engram layers and neither tokenizer nor token map. ShardingError (a ValueError): a
            mesh that the model cannot be spread over. CheckpointError (a ValueError): anything wrong with the folder.
            FileNotFoundError: no such folder and not a hub id, or the hub has no such model for you. ConnectionError:
            the hub did not answer. In a run of several processes also ValueError where their configurations or token
            maps differ.
    """
    chosen = numerics_module.named(numerics)
    chosen = chosen.computed_by(implementation_of(implementation, chosen))
    if mesh is not None:
        sharding.layout_of(mesh)
        if not isinstance(mesh, Mesh):
            raise ValueError(f"mesh: {type(mesh).__name__} has no devices; make one with sharding.Layout(...).mesh()")
        distributed.connect(mesh)
        check_dispatch(dispatch, mesh.devices.flat[0].platform, mesh.devices.flat[0].device_kind)
    elif dispatch is not None:
        raise ValueError(f"dispatch={dispatch!r}: experts are exchanged on a mesh only; give one, or leave it out")
    check_choices(engram, expert_storage)  # before anything is downloaded or read
    folder = find_folder(path, revision)
    source = open_folder(folder)
    config = source.config
    distributed.check_same(_facts(folder.name, config))
    if chosen.kernels:
        check_config(config, chosen.implementation)
    if mesh is not None:
        sharding.check_layout(config, sharding.layout_of(mesh))
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    hasher, tables = None, {}
    if config.engram_layer_ids:
        if token_map is None:
            token_map = token_map_of(folder, tokenizer)
        distributed.check_same(
            {f"{folder.name}: the token map": hashlib.sha256(np.asarray(token_map)).hexdigest()[:16]}
        )
        hasher = EngramHasher(config, token_map)
        if engram != "device":
            hot = _HOT_BYTES[engram] if engram_hot_bytes is None else engram_hot_bytes
            tables = {layer: _table(source, layer, engram, chosen, hot, mesh) for layer in config.engram_layer_ids}
    total = sum(entry.nbytes for entry in source.entries.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"loading {folder.name}", disable=total < _LARGE) as bar:
        read = load_params if mesh is None else functools.partial(sharding.restore, mesh=mesh)
        params = read(
            source,
            chosen,
            engram=engram,
            expert_storage=expert_storage,
            progress=lambda done, _: bar.update(done - bar.n),
        )
    if chosen.kernels:
        params = pack_params(params, mesh)
    return Model(Runner(config, chosen, params, hasher, tables, mesh, dispatch), tokenizer)


def _table(
    source: TensorSource, layer: int, place: str, numerics: numerics_module.Numerics, hot: int, mesh: Mesh | None
) -> PrefetchingTable | EngramShare:
    """An Engram table off the device; in a run of several processes, the rows that this one owns."""
    if mesh is None or jax.process_count() == 1:
        return PrefetchingTable(source.engram_table(layer, place, numerics.dtype), hot)
    layout = engram_layout(source.config)
    rows = layout.table_rows[layout.layer_ids.index(layer)]
    own = own_range(rows, jax.process_count(), jax.process_index())
    return EngramShare(source.engram_table(layer, place, numerics.dtype, own), own[0], rows, hot)


def implementation_of(asked: str, numerics: numerics_module.Numerics) -> str:
    """Who computes what has kernels, as `load` decides; ValueError for kernels that this process does not have."""
    if asked == "auto" and numerics.name != numerics_module.RELEASED.name:
        _log.info("implementation auto: reference, because numerics %s has no kernels", numerics.name)
        return "reference"
    found = resolve("load", asked)
    require_device(found)
    return found


def _facts(name: str, config: ModelConfig) -> dict[str, object]:
    """What processes that load a folder of this name must agree on."""
    values = dataclasses.asdict(config)
    del values["source"]
    return {f"{name}/config.json: {key}": value for key, value in values.items()}


def token_map_of(folder: Path, tokenizer: Tokenizer | None = None) -> np.ndarray:
    """int [vocab], raw id -> Engram id: from the folder's tokenizer (read here if not given) or its token_map.npy.

    Raises:
        ValueError: the folder has neither.
    """
    if tokenizer is None and (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is not None:
        return compressed_token_map(tokenizer.backend)
    if (folder / TOKEN_MAP_FILE).is_file():
        return np.load(folder / TOKEN_MAP_FILE, allow_pickle=False)
    raise ValueError(f"{folder} has Engram layers and no tokenizer.json: pass token_map (raw id -> Engram id)")
