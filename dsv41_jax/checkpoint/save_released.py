"""Writer of the released format: parameters in any form, streamed tensor by tensor into a new folder.

Stored forms are written byte for byte. Float weights are quantised as the release stores them: FP8 with one
power-of-two scale per 32x32 block, FP4 and Engram rows with one per row and 32 columns, each the smallest that holds
the block's largest value. Quantising values that came from a quantised weight gives those values again.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dsv41_jax.checkpoint.manifest import TensorSpec
from dsv41_jax.checkpoint.names import LeafPath, NameMap, flatten, name_map
from dsv41_jax.checkpoint.new_folder import new_folder
from dsv41_jax.checkpoint.released_folder import INDEX_FILE, SINGLE_FILE
from dsv41_jax.checkpoint.safetensors_file import CheckpointError, write_file
from dsv41_jax.checkpoint.storage import EXPERT_STORAGES, Storage, param_leaves, row_blocks, to_released
from dsv41_jax.checkpoint.tensor_source import TensorSource
from dsv41_jax.config import ModelConfig

TOKEN_MAP_FILE = "token_map.npy"  # int [vocab], raw id -> Engram id; for folders without a tokenizer
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", TOKEN_MAP_FILE)
SHARD_BYTES = 5_000_000_000
FILE_METADATA = {"format": "pt"}  # of a file's header, as readers of the format expect it

_slice = jax.jit(jax.lax.dynamic_slice, static_argnums=2)


def save_released(
    params: dict,
    config: ModelConfig,
    folder: str | Path,
    *,
    source: TensorSource | None = None,
    tokenizer: str | Path | None = None,
    token_map: np.ndarray | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write `params` as a released-format folder: tensors, an index if there are several files, config, text files.

    Args:
        params: the pytree of `load_params`, in any numerics and expert storage, or float master weights. Every leaf
            must be whole within this process.
        config: its configuration.
        folder: must not exist, or be empty. It appears under this name only when complete.
        source: where tensors come from that `params` lacks (Engram tables kept off the device), and the text files:
            tokenizer, or the token map of a folder without one.
        tokenizer: folder to copy the text files from, instead of `source`.
        token_map: int [vocab], raw id -> Engram id, kept in the folder when it gets no tokenizer.
        shard_bytes: limit of one file's payload; a larger checkpoint is split, but never a weight from its scale.
        progress: called with (bytes done, bytes in all) after each tensor.

    Raises:
        CheckpointError: the folder is occupied; a leaf is missing, unknown, not finite, or of a wrong shape or dtype.
    """
    folder = Path(folder)
    names = name_map(config)
    leaves = dict(flatten(params))
    check_leaves(names, leaves, source)
    files = plan_files(names, shard_bytes)
    total = sum(spec.nbytes for spec in names.specs.values())
    reader = TensorReader(names, leaves, source, (lambda done: progress(done, total)) if progress else None)
    with new_folder(folder) as partial:
        for file, tensors in files.items():
            write_file(partial / file, [(s.name, s.dtype, s.shape) for s in tensors], reader.blocks, FILE_METADATA)
        write_index(partial, files)
        config.write(partial)
        copy_text_files(partial, source, tokenizer)
        write_token_map(partial, config, token_map)


def copy_text_files(folder: Path, source: TensorSource | None, tokenizer: str | Path | None) -> None:
    """Copy tokenizer and token map into `folder` from the folder `tokenizer`, or else from `source`."""
    origin = Path(tokenizer) if tokenizer is not None else source.path if source is not None else None
    for name in TEXT_FILES if origin is not None else ():
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)


def write_token_map(folder: Path, config: ModelConfig, token_map: np.ndarray | None) -> None:
    """Keep a token map in a folder that has no tokenizer to make it from; None leaves the folder as it is.

    Raises CheckpointError if it is not a list of integers, one for each id.
    """
    if token_map is None or (folder / "tokenizer.json").is_file():
        return
    token_map = np.asarray(token_map)
    if token_map.shape != (config.vocab_size,) or not np.issubdtype(token_map.dtype, np.integer):
        raise CheckpointError(
            f"token_map is {token_map.dtype} {list(token_map.shape)}; it must hold one integer for each of the "
            f"{config.vocab_size} ids"
        )
    np.save(folder / TOKEN_MAP_FILE, token_map, allow_pickle=False)


def check_leaves(names: NameMap, leaves: dict[LeafPath, jax.Array], source: TensorSource | None) -> None:
    """Every leaf is known and in a form that can be written; every tensor comes from a leaf, or whole from `source`."""
    forms = [param_leaves(names, Storage(experts=experts)) for experts in EXPERT_STORAGES]
    forms.append(param_leaves(names, Storage(float32=True)))
    for path, leaf in leaves.items():
        dotted = ".".join(path)
        wanted = {form[path] for form in forms if path in form}
        if not wanted and path[-1] in ("words", "scales"):
            raise CheckpointError(
                f"params.{dotted}: packed for kernels, which is no form to write; load the model with "
                'implementation="reference"'
            )
        if not wanted:
            raise CheckpointError(f"params.{dotted}: the configuration has no such tensor")
        wanted |= {(shape, np.dtype(jnp.bfloat16)) for shape, dtype in wanted if dtype == np.float32}
        if (leaf.shape, leaf.dtype) not in wanted:
            allowed = " or ".join(sorted(f"{dtype} {list(shape)}" for shape, dtype in wanted))
            raise CheckpointError(f"params.{dotted}: {leaf.dtype} {list(leaf.shape)} cannot be written, only {allowed}")
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise CheckpointError(f"params.{dotted}: is spread over several processes; gather it first")
    for name, place in names.places.items():
        in_source = source is not None and name in source.entries
        if names.specs[name].kind.endswith("_scale"):
            weight = leaves.get((*place.path[:-1], "weight"))
            quantised = weight is not None and weight.dtype.itemsize == 1
            if quantised != (place.path in leaves):
                raise CheckpointError(f"{name}: params must hold a quantised weight and its scale together")
            in_source |= weight is not None  # a float weight: its scale is made here
        if place.path not in leaves and not in_source:
            raise CheckpointError(
                f"{name}: params has no leaf {'.'.join(place.path)}; give the folder it was loaded from as source"
            )


def plan_files(names: NameMap, limit: int) -> dict[str, list[TensorSpec]]:
    """{file: its tensors}: all in manifest order, up to `limit` bytes a file, and never a weight apart from its scale.

    In a file wide dtypes come first, for alignment.
    """
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    scales = {names.scale_of(name) for name in names.specs}
    for name, spec in names.specs.items():
        if name in scales:
            continue
        scale = names.scale_of(name)
        unit = [spec] if scale is None else [spec, names.specs[scale]]
        nbytes = sum(s.nbytes for s in unit)
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1] += unit
        size += nbytes
    if len(shards) == 1:
        files = [SINGLE_FILE]
    else:
        files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    width = {"F32": 4, "BF16": 2}
    return {
        file: sorted(shard, key=lambda s: -width.get(s.dtype, 1)) for file, shard in zip(files, shards, strict=True)
    }


def write_index(folder: Path, files: dict[str, list[TensorSpec]]) -> None:
    """Write the index of a folder with several files; one with a single file has none."""
    if len(files) == 1:
        return
    total = sum(spec.nbytes for tensors in files.values() for spec in tensors)
    weight_map = {spec.name: file for file, tensors in files.items() for spec in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class TensorReader:
    """Released tensors as blocks of rows, taken from parameter leaves or copied from a folder."""

    def __init__(
        self,
        names: NameMap,
        leaves: dict[LeafPath, jax.Array],
        source: TensorSource | None,
        report: Callable[[int], None] | None,
    ):
        self._names, self._source, self._report = names, source, report
        self._leaves = {path: _host_view(leaf) for path, leaf in leaves.items()}
        self._scales: dict[str, list[np.ndarray]] = {}  # of weights quantised and written, until the scale's turn comes
        self._done = 0

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """Blocks of the released tensor `name`. A scale comes after its weight."""
        spec, place = self._names.specs[name], self._names.places[name]
        if name in self._scales:
            yield from self._scales.pop(name)
        elif place.path not in self._leaves:
            yield from (self._source.rows(name, start, stop) for start, stop in row_blocks(spec.shape))
        else:
            yield from self._from_leaf(name)
        self._done += spec.nbytes
        if self._report:
            self._report(self._done)

    def _from_leaf(self, name: str) -> Iterator[np.ndarray]:
        spec, place = self._names.specs[name], self._names.places[name]
        scale_leaf = self._leaves.get((*place.path[:-1], "scale")) if spec.kind == "fp4" else None
        for start, stop in row_blocks(spec.shape):
            rows = _rows(self._leaves[place.path], place.index, start, stop)
            row_scale = None
            if rows.dtype == ml_dtypes.float8_e4m3fn and scale_leaf is not None:
                row_scale = _rows(scale_leaf, place.index, start, stop)
            block, scale = to_released(rows, row_scale, spec)
            if scale is not None:
                self._scales.setdefault(self._names.scale_of(name), []).append(scale)
            yield block


def _host_view(leaf: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """A leaf on a CPU device as numpy, without a copy; other arrays as they are."""
    if isinstance(leaf, jax.Array) and len(leaf.devices()) == 1 and next(iter(leaf.devices())).platform == "cpu":
        return np.asarray(leaf)
    return leaf


def _rows(leaf: jax.Array | np.ndarray, index: tuple[int, ...], start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of the tensor at stack index `index`; only these leave the device."""
    if isinstance(leaf, np.ndarray):
        return leaf[index][start:stop]
    tail = leaf.shape[len(index) + 1 :]
    corner = tuple(np.int32(i) for i in (*index, start, *(0 for _ in tail)))
    part = np.asarray(_slice(leaf, corner, (*(1 for _ in index), stop - start, *tail)))
    return part.reshape(part.shape[len(index) :])
