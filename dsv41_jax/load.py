"""`load`: from a name or a folder to a `Model`."""

import importlib.resources
import os
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dsv41_jax import numerics as numerics_module
from dsv41_jax.checkpoint.released import check_choices, load_params
from dsv41_jax.checkpoint.released_folder import ReleasedFolder
from dsv41_jax.engram_hash import EngramHasher
from dsv41_jax.generate import Model
from dsv41_jax.runner import Runner
from dsv41_jax.token_map import compressed_token_map
from dsv41_jax.tokenizer import Tokenizer

_LARGE = 1 << 30
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "tokenizer.json", "tokenizer_config.json"]


def load(
    path: str | os.PathLike,
    mesh: Any = None,
    numerics: str = "released",
    engram: str = "device",
    expert_storage: str = "fp4",
    token_map: np.ndarray | None = None,
    implementation: str = "auto",
    revision: str | None = None,
) -> Model:
    """Load a model.

    Args:
        path: "demo" (the model inside this package), a folder in the released format, or a hub id "owner/name".
        mesh: None: parameters go to the default device. Sharding over a mesh is not part of this version.
        numerics: "released" (bf16, FP8 and FP4 activations and caches), "noquant" (bf16, those unquantised) or
            "float32".
        engram: where the Engram tables are: "device", "host" (memory) or "mmap" (rows are read from the file).
        expert_storage: "fp4", "fp8" (only where exact) or "bf16".
        token_map: int array [vocab], raw id -> Engram id, for folders without a tokenizer.json.
        implementation: "auto" or "reference" (plain jax.numpy, which "auto" means in this version).
        revision: of a hub id.

    Returns:
        the `Model`.

    Raises:
        ValueError: an unknown choice, or a model with Engram layers and neither tokenizer nor token map.
            CheckpointError: anything wrong with the folder. FileNotFoundError: no such folder, and not a hub id.
    """
    chosen = numerics_module.named(numerics)
    if implementation not in ("auto", "reference"):
        raise ValueError(f"implementation={implementation!r} is unknown; this version has: auto, reference")
    if mesh is not None:
        raise ValueError(
            "mesh: sharding over a mesh is not part of this version; leave it out to use the default device"
        )
    check_choices(engram, expert_storage)  # before anything is downloaded or read
    folder = _find(path, revision)
    released = ReleasedFolder.open(folder)
    config = released.config
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    hasher, tables = None, {}
    if config.engram_layer_ids:
        if token_map is None:
            if tokenizer is None:
                raise ValueError(
                    f"{folder} has Engram layers and no tokenizer.json: pass token_map (raw id -> Engram id)"
                )
            token_map = compressed_token_map(tokenizer.backend)
        hasher = EngramHasher(config, token_map)
        if engram != "device":
            tables = {layer: released.engram_table(layer, engram, chosen.dtype) for layer in config.engram_layer_ids}
    total = sum(entry.nbytes for entry in released.entries.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"loading {folder.name}", disable=total < _LARGE) as bar:
        params = load_params(
            released,
            chosen,
            engram=engram,
            expert_storage=expert_storage,
            progress=lambda done, _: bar.update(done - bar.n),
        )
    return Model(Runner(config, chosen, params, hasher, tables), tokenizer)


def _find(path: str | os.PathLike, revision: str | None) -> Path:
    if path == "demo":
        return Path(str(importlib.resources.files("dsv41_jax") / "demo_model"))
    folder = Path(path)
    if folder.is_dir():
        return folder
    parts = path.split("/") if isinstance(path, str) else []
    if len(parts) != 2 or not all(parts) or str(path).startswith((".", "~")):
        raise FileNotFoundError(f'{path}: no such folder, and not a hub id of the form "owner/name"')
    from huggingface_hub import snapshot_download  # not needed for local folders

    return Path(snapshot_download(str(path), revision=revision, allow_patterns=_HUB_FILES))
