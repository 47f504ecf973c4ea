"""A model as an Orbax folder: saved in the forms the release stores, read like a released-format folder.

    config.json           as read
    tokenizer.json, tokenizer_config.json, or token_map.npy
    params/               Orbax PyTree checkpoint (OCDBT): the parameter pytree, stacked leaves, without Engram tables
    engram.safetensors    the Engram tables under their released names

FP8 weights are float8_e4m3fn, FP4 weights uint8 (two a byte), scales float8_e8m0fnu: TensorStore keeps the bytes of
all of them. Engram tables stay in a safetensors file, because a row must be readable at its byte offset (chunks of
`params` are compressed): that is what `engram="mmap"` needs.

The stacked axes of a leaf (layer, expert) are cut into chunks of one, so each chunk lies inside one released tensor.
A converter that streams, or processes that own different shards, can therefore write any released tensor alone: no
chunk is shared, and none is read before it is written.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from dsv41_jax.checkpoint.destination import Destination
from dsv41_jax.checkpoint.manifest import TensorSpec
from dsv41_jax.checkpoint.names import LeafPath, NameMap, flatten, name_map, nest
from dsv41_jax.checkpoint.new_folder import check_free, new_folder
from dsv41_jax.checkpoint.open_folder import PARAMS_FOLDER
from dsv41_jax.checkpoint.released import is_table
from dsv41_jax.checkpoint.released_folder import complain, engram_table, read_config
from dsv41_jax.checkpoint.safetensors_file import CheckpointError, TensorEntry, read_header, read_rows, write_file
from dsv41_jax.checkpoint.save_released import TensorReader, check_leaves, copy_text_files, write_token_map
from dsv41_jax.checkpoint.storage import Storage, param_leaves
from dsv41_jax.checkpoint.tensor_source import TensorSource
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_tables import EngramTable

ENGRAM_FILE = "engram.safetensors"
CHUNK_BYTES = 64 << 20  # limit of a chunk; a larger tensor has several
BATCH_BYTES = 1 << 30  # leaves restored at a time; a larger leaf is a batch of its own


def save_orbax(
    params: dict,
    config: ModelConfig,
    folder: str | Path,
    *,
    source: TensorSource | None = None,
    tokenizer: str | Path | None = None,
    token_map: np.ndarray | None = None,
    progress: Callable[[Path], None] | None = None,
) -> None:
    """Write `params` as an Orbax folder, in storage form (FP8 and FP4 with scales) whatever form they come in.

    Memory: params that are in storage form already are written from where they are, a few leaves at a time; others are
    converted first, which takes the stored size once more. Engram tables pass through in blocks.

    Args:
        params: the pytree of `load_params`, in any numerics and expert storage, or float master weights. Every leaf
            must be whole within this process.
        config: its configuration.
        folder: must not exist, or be empty. It appears under this name only when complete.
        source: where Engram tables come from that `params` lacks, and the text files.
        tokenizer: folder to copy the text files from, instead of `source`.
        token_map: int [vocab], raw id -> Engram id, kept in the folder when it gets no tokenizer.
        progress: called with the temporary folder once writing begins, e.g. to watch it grow.

    Raises:
        CheckpointError: the folder is occupied; a leaf is missing, unknown, not finite, or of a wrong shape or dtype.
    """
    folder = Path(folder).absolute()
    check_free(folder)
    names = name_map(config)
    leaves = dict(flatten(params))
    check_leaves(names, leaves, source)
    tables = [name for name, place in names.places.items() if is_table(place.path)]
    stored = _storage_form(names, leaves, source)
    with new_folder(folder) as partial:
        if progress:
            progress(partial)
        if tables:
            reader = TensorReader(names, leaves, source, None)
            specs = [names.specs[name] for name in tables]
            write_file(partial / ENGRAM_FILE, [(s.name, s.dtype, s.shape) for s in specs], reader.blocks)
        args = nest({path: _save_args(names, path) for path in stored})
        # Leaves are copied while they are written; without a limit that would be all of them at once.
        largest = max(leaf.nbytes for leaf in stored.values())
        handler = ocp.PyTreeCheckpointHandler(save_concurrent_gb=1 + largest // 10**9)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(partial / PARAMS_FOLDER, ocp.args.PyTreeSave(nest(stored), save_args=args))
        config.write(partial)
        copy_text_files(partial, source, tokenizer)
        write_token_map(partial, config, token_map)


def _save_args(names: NameMap, path: LeafPath) -> ocp.SaveArgs:
    axes = tuple(range(len(names.leaves[path].stack)))
    return ocp.SaveArgs(shard_axes=axes, chunk_byte_size=CHUNK_BYTES)


def _stored_leaves(names: NameMap) -> dict[LeafPath, tuple[tuple[int, ...], np.dtype]]:
    """(shape, dtype) of every leaf in `params/`."""
    return {path: form for path, form in param_leaves(names, Storage()).items() if not is_table(path)}


def _storage_form(names: NameMap, leaves: dict[LeafPath, Any], source: TensorSource | None) -> dict[LeafPath, Any]:
    """The leaves of `params/`: those given if all have the stored form, converted ones otherwise."""
    forms = _stored_leaves(names)
    if all(path in leaves and (leaves[path].shape, leaves[path].dtype) == form for path, form in forms.items()):
        return {path: leaves[path] for path in forms}
    reader, destination = TensorReader(names, leaves, source, None), Destination(forms)
    for name, place in names.places.items():
        if place.path not in forms:
            continue
        start = 0
        for block in reader.blocks(name):
            destination.put(place.path, place.index, start, block.view(np.uint8) if block.dtype == np.int8 else block)
            start += len(block)
    return destination.finish()


@dataclass
class OrbaxFolder:
    """A checked Orbax folder, as a `TensorSource`.

    Leaves are restored in batches of at most BATCH_BYTES (or one weight with its scale, if that is more) and handed out
    by rows; only one batch is in host memory.

    Attributes:
        path: the folder. config: its configuration. entries: {released name: TensorSpec} of the whole model.
    """

    path: Path
    config: ModelConfig
    entries: dict[str, TensorSpec]
    _names: NameMap = field(repr=False)
    _tables: dict[str, TensorEntry] = field(repr=False)
    _batch_of: dict[LeafPath, int] = field(repr=False)
    _batch: int | None = field(default=None, repr=False)
    _leaves: dict[LeafPath, np.ndarray] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: str | Path) -> "OrbaxFolder":
        """Compare the folder's metadata with what its config.json implies; no arrays are read.

        Raises:
            CheckpointError: something is missing or left over, of another shape or dtype, or not written by
                `save_orbax`.
        """
        folder = Path(path).absolute()
        if not (folder / PARAMS_FOLDER).is_dir():
            raise CheckpointError(
                f"{folder}: holds no folder {PARAMS_FOLDER}: this is an Orbax checkpoint of something else, or "
                "incomplete; a model's folder is written by launch/convert.py --to=orbax"
            )
        config = read_config(folder)
        names = name_map(config)
        _check_metadata(folder / PARAMS_FOLDER, _stored_leaves(names))
        return cls(folder, config, names.specs, names, _open_tables(folder, names), _plan_batches(names))

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor in its released form."""
        if name in self._tables:
            return read_rows(self._tables[name], start, stop)
        place = self._names.places[name]
        if self._batch_of[place.path] != self._batch:
            self._restore(self._batch_of[place.path])
        rows = self._leaves[place.path][place.index][start:stop]
        return rows.view(np.int8) if rows.dtype == np.uint8 else rows

    def reading_order(self, names: Iterable[str]) -> list[str]:
        """`names` batch by batch, Engram tables last."""
        last = len(self._batch_of)
        return sorted(names, key=lambda name: self._batch_of.get(self._names.places[name].path, last))

    def where(self, name: str) -> str:
        """The file or folder that holds a tensor."""
        return str(self.path / (ENGRAM_FILE if name in self._tables else PARAMS_FOLDER))

    def engram_table(self, layer: int, place: str, dtype: np.dtype = ml_dtypes.bfloat16) -> EngramTable:
        """The table of an Engram layer off the device, in host memory ("host") or left in the file ("mmap")."""
        return engram_table(self._tables, layer, place, dtype)

    def release(self) -> None:
        """Forget the batch in memory."""
        self._leaves, self._batch = {}, None

    def _restore(self, batch: int) -> None:
        self.release()
        forms = _stored_leaves(self._names)
        item = {path: jax.ShapeDtypeStruct(*forms[path]) for path, b in self._batch_of.items() if b == batch}
        args = {path: ocp.RestoreArgs(restore_type=np.ndarray) for path in item}
        try:
            with ocp.PyTreeCheckpointer() as checkpointer:
                tree = checkpointer.restore(
                    self.path / PARAMS_FOLDER,
                    args=ocp.args.PyTreeRestore(item=nest(item), restore_args=nest(args), partial_restore=True),
                )
        except Exception as error:  # Orbax and TensorStore raise many kinds for a file that is gone or damaged
            raise CheckpointError(
                f"{self.path / PARAMS_FOLDER}: cannot be read ({_first_line(error)}); "
                "the folder is incomplete or damaged: convert the model again"
            ) from error
        self._leaves, self._batch = dict(flatten(tree)), batch


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]


def _check_metadata(folder: Path, forms: dict[LeafPath, tuple[tuple[int, ...], np.dtype]]) -> None:
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(folder).item_metadata
        if metadata is None:
            raise ValueError("its metadata cannot be read")
        found = {path: (tuple(leaf.shape), np.dtype(leaf.dtype)) for path, leaf in flatten(metadata.tree)}
    except Exception as error:  # whatever is wrong with the metadata, the folder cannot be used
        raise CheckpointError(
            f"{folder}: is not a complete Orbax checkpoint ({_first_line(error)}); convert the model again"
        ) from error
    problems = []
    for path, form in forms.items():
        if path not in found:
            problems.append(f"{'.'.join(path)}: missing; config.json implies {_spell(form)}")
        elif found[path] != form:
            problems.append(f"{'.'.join(path)}: {_spell(found[path])}, but config.json implies {_spell(form)}")
    problems += [f"{'.'.join(path)}: unexpected; config.json implies no such leaf" for path in found.keys() - forms]
    complain(folder, problems, "The folder holds something else than its config.json says; convert the model again.")


def _spell(form: tuple[tuple[int, ...], np.dtype]) -> str:
    return f"{form[1]} {list(form[0])}"


def _open_tables(folder: Path, names: NameMap) -> dict[str, TensorEntry]:
    wanted = [name for name, place in names.places.items() if is_table(place.path)]
    if not wanted:
        return {}
    entries, _ = read_header(folder / ENGRAM_FILE)
    problems = [f"{name}: unexpected" for name in entries.keys() - set(wanted)]
    for name in wanted:
        spec, entry = names.specs[name], entries.get(name)
        if entry is None or (entry.shape, entry.dtype) != (spec.shape, spec.dtype):
            problems.append(f"{name}: config.json implies {spec.dtype} {list(spec.shape)}, which is not there")
    complain(folder / ENGRAM_FILE, problems, "The file does not belong to this folder; convert the model again.")
    return entries


def _plan_batches(names: NameMap) -> dict[LeafPath, int]:
    """{leaf path: number of the batch it is restored in}; a weight and its scale are never apart."""
    forms = _stored_leaves(names)
    groups: dict[LeafPath, list[LeafPath]] = {}
    for path in forms:
        groups.setdefault(path[:-1] if path[-1] in ("weight", "scale") else path, []).append(path)
    result, batch, size = {}, 0, 0
    for paths in groups.values():
        nbytes = sum(int(np.prod(forms[p][0], dtype=np.int64)) * forms[p][1].itemsize for p in paths)
        if size and size + nbytes > BATCH_BYTES:
            batch, size = batch + 1, 0
        size += nbytes
        result.update(dict.fromkeys(paths, batch))
    return result
