"""A model as an Orbax folder: saved in the forms the release stores, read like a released-format folder.

    config.json           as read
    tokenizer.json, tokenizer_config.json, or token_map.npy
    params/               Orbax PyTree checkpoint: the parameter pytree, stacked leaves, without Engram tables
    engram.safetensors    the Engram tables under their released names
    checksums.json        of every released tensor

FP8 weights are float8_e4m3fn, FP4 weights uint8 (two a byte), scales float8_e8m0fnu. `orbax_layout` says how `params`
lies on the disk; each released tensor can be written and read alone. Engram tables stay in a safetensors file, because
a row must be readable at its byte offset: that is what `engram="mmap"` needs.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from dsv41_jax.checkpoint.checksum import Checksums, crc32
from dsv41_jax.checkpoint.manifest import TensorSpec
from dsv41_jax.checkpoint.names import LeafPath, NameMap, flatten, name_map
from dsv41_jax.checkpoint.new_folder import check_free, new_folder
from dsv41_jax.checkpoint.open_folder import PARAMS_FOLDER
from dsv41_jax.checkpoint.orbax_layout import ArrayReader, Form, stored_leaves
from dsv41_jax.checkpoint.orbax_writer import ENGRAM_FILE, OrbaxWriter, first_line
from dsv41_jax.checkpoint.released import is_table
from dsv41_jax.checkpoint.released_folder import complain, engram_table, read_config
from dsv41_jax.checkpoint.safetensors_file import CheckpointError, TensorEntry, read_header, read_rows
from dsv41_jax.checkpoint.save_released import TensorReader, check_leaves, copy_text_files, write_token_map
from dsv41_jax.checkpoint.tensor_source import TensorSource
from dsv41_jax.checkpoint.workers import each
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_tables import StoredTable


def save_orbax(
    params: dict,
    config: ModelConfig,
    folder: str | Path,
    *,
    source: TensorSource | None = None,
    tokenizer: str | Path | None = None,
    token_map: np.ndarray | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write `params` as an Orbax folder, in storage form (FP8 and FP4 with scales) whatever form they come in.

    Memory: a few blocks of rows, whatever the size of the leaves.

    Args:
        params: the pytree of `load_params`, in any numerics and expert storage, or float master weights. Every leaf
            must be whole within this process.
        config: its configuration.
        folder: must not exist, or be empty. It appears under this name only when complete.
        source: where tensors come from that `params` lacks (Engram tables kept off the device), and the text files.
        tokenizer: folder to copy the text files from, instead of `source`.
        token_map: int [vocab], raw id -> Engram id, kept in the folder when it gets no tokenizer.
        progress: called with (bytes done, bytes in all) after each tensor.

    Raises:
        CheckpointError: the folder is occupied; a leaf is missing, unknown, not finite, or of a wrong shape or dtype.
    """
    folder = Path(folder).absolute()
    check_free(folder)
    names = name_map(config)
    leaves = dict(flatten(params))
    check_leaves(names, leaves, source)
    total, checksums = sum(spec.nbytes for spec in names.specs.values()), {}
    reader = TensorReader(names, leaves, source, (lambda done: progress(done, total)) if progress else None)
    with new_folder(folder) as partial:
        writer = OrbaxWriter(partial, names)
        try:
            for (name, _, block), _ in each(lambda item: writer.write(*item), _blocks(names, reader)):
                checksums[name] = crc32(block, checksums.get(name, 0))
            writer.complete()
        finally:
            writer.close()
        config.write(partial)
        copy_text_files(partial, source, tokenizer)
        write_token_map(partial, config, token_map)
        Checksums(checksums).write(partial)


def _blocks(names: NameMap, reader: TensorReader) -> Iterator[tuple[str, int, np.ndarray]]:
    """(tensor, first row, rows) of the whole model."""
    for name in names.specs:
        start = 0
        for block in reader.blocks(name):
            yield name, start, block
            start += len(block)


@dataclass(frozen=True)
class OrbaxFolder:
    """A checked Orbax folder, as a `TensorSource`.

    Attributes:
        path: the folder. config: its configuration. entries: {released name: TensorSpec} of the whole model.
    """

    path: Path
    config: ModelConfig
    entries: dict[str, TensorSpec]
    _names: NameMap = field(repr=False)
    _tables: dict[str, TensorEntry] = field(repr=False)
    _arrays: ArrayReader = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> "OrbaxFolder":
        """Compare the folder's metadata with what its config.json implies; no arrays are read.

        Raises:
            CheckpointError: something is missing or left over, or of another shape or dtype.
        """
        folder = Path(path).absolute()
        if not (folder / PARAMS_FOLDER).is_dir():
            raise CheckpointError(
                f"{folder}: holds no folder {PARAMS_FOLDER}: this is an Orbax checkpoint of something else, or "
                "incomplete; a model's folder is written by launch/convert.py --to=orbax"
            )
        config = read_config(folder)
        names = name_map(config)
        _check_metadata(folder / PARAMS_FOLDER, stored_leaves(names))
        return cls(folder, config, names.specs, names, _open_tables(folder, names), ArrayReader(folder / PARAMS_FOLDER))

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor in its released form. Nothing but the chunks they lie in is read.

        Raises CheckpointError if they cannot be read, IndexError if the range leaves the tensor.
        """
        if name in self._tables:
            return read_rows(self._tables[name], start, stop)
        place, shape = self._names.places[name], self.entries[name].shape
        if not 0 <= start <= stop <= shape[0]:
            raise IndexError(f"{name}: rows [{start}, {stop}) are outside shape {shape}")
        try:
            rows = self._arrays.rows(place.path, place.index, start, stop)
        except ValueError as error:  # what TensorStore raises, whatever is wrong
            raise CheckpointError(
                f"{self.where(name)}: {name} cannot be read ({first_line(error)}); "
                "the folder is incomplete or damaged: convert the model again"
            ) from error
        return rows.view(np.int8) if rows.dtype == np.uint8 else rows

    def reading_order(self, names: Iterable[str]) -> list[str]:
        """`names` leaf by leaf, Engram tables last."""
        number = {path: i for i, path in enumerate(self._names.leaves)}
        places = self._names.places
        return sorted(names, key=lambda n: (n in self._tables, number[places[n].path], places[n].index))

    def where(self, name: str) -> str:
        """The file or folder that holds a tensor."""
        if name in self._tables:
            return str(self.path / ENGRAM_FILE)
        return str(self.path / PARAMS_FOLDER / ".".join(self._names.places[name].path))

    def engram_table(
        self, layer: int, place: str, dtype: np.dtype = ml_dtypes.bfloat16, rows: tuple[int, int] | None = None
    ) -> StoredTable:
        """The table of an Engram layer, or `rows` of it, in host memory ("host") or left in the file ("mmap")."""
        return engram_table(self._tables, layer, place, dtype, rows)


def _check_metadata(folder: Path, forms: dict[LeafPath, Form]) -> None:
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(folder).item_metadata
        if metadata is None:
            raise ValueError("its metadata cannot be read")
        found = {path: (tuple(leaf.shape), np.dtype(leaf.dtype)) for path, leaf in flatten(metadata.tree)}
    except Exception as error:  # whatever is wrong with the metadata, the folder cannot be used
        raise CheckpointError(
            f"{folder}: is not a complete Orbax checkpoint ({first_line(error)}); convert the model again"
        ) from error
    problems = []
    for path, form in forms.items():
        if path not in found:
            problems.append(f"{'.'.join(path)}: missing; config.json implies {_spell(form)}")
        elif found[path] != form:
            problems.append(f"{'.'.join(path)}: {_spell(found[path])}, but config.json implies {_spell(form)}")
    problems += [f"{'.'.join(path)}: unexpected; config.json implies no such leaf" for path in found.keys() - forms]
    complain(folder, problems, "The folder holds something else than its config.json says; convert the model again.")


def _spell(form: Form) -> str:
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
