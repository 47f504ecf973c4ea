"""A released-format folder, checked as a whole before any tensor is read.

`ReleasedFolder.open` reads `config.json`, the index and the headers of the safetensors files, and compares them with
the manifest that the configuration implies. Only a folder in which every tensor is accounted for gets any further.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from dsv41_jax.checkpoint.census import take_census
from dsv41_jax.checkpoint.safetensors_file import (
    CheckpointError,
    TensorEntry,
    read,
    read_header,
    read_rows,
    unique_keys,
)
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_tables import FileTable, FileTensor, HostTable, StoredTable

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_SHOWN = 10  # offenders spelled out in one message


def complain(folder: Path, problems: list[str], advice: str) -> None:
    """Raise CheckpointError if there are problems: the first ten, how many there are, and what to do."""
    if not problems:
        return
    more = f"\n  ... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    noun = "problem" if len(problems) == 1 else "problems"
    raise CheckpointError(
        f"{folder}: {len(problems)} {noun}:\n  " + "\n  ".join(problems[:_SHOWN]) + more + f"\n{advice}"
    )


def read_config(folder: Path) -> ModelConfig:
    """The configuration in a folder. CheckpointError if it is absent or not legal."""
    path = folder / "config.json"
    try:
        return ModelConfig.from_json(path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); a model's folder holds config.json"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """{tensor name: file name} and metadata.total_size of an index, with every file name a plain name."""
    try:
        index = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=unique_keys)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: bad index: {error}; fetch the file again") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: bad index: it holds no weight_map; fetch the file again")
    for name, file in weight_map.items():
        # Nothing outside the folder may be named: no separators, no "..", no drive letters.
        if not isinstance(file, str) or not file.endswith(".safetensors") or any(c in file for c in "/\\:\0"):
            raise CheckpointError(
                f"{path}: bad index: tensor {name!r} lies in {file!r}, not a safetensors file of this folder"
            )
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is not None and (isinstance(total, bool) or not isinstance(total, int | float)):
        raise CheckpointError(f"{path}: bad index: metadata.total_size is {total!r}, not a number")
    return weight_map, total


def _indexed_entries(folder: Path) -> list[TensorEntry]:
    path = folder / INDEX_FILE
    weight_map, total = _read_index(path)
    files = sorted(set(weight_map.values()))
    absent = [f"{file}: named in {INDEX_FILE} but not in the folder" for file in files if not (folder / file).is_file()]
    stray = sorted(p.name for p in folder.glob("*.safetensors") if p.name not in files)
    absent += [f"{file}: in the folder but not named in {INDEX_FILE}" for file in stray]
    complain(folder, absent, "Fetch the missing files, or remove those that belong to another checkpoint.")
    entries, problems = [], []
    for file in files:
        header, _ = read_header(folder / file)
        entries += header.values()
        problems += [
            f"{name}: in {file}, but the index "
            + (f"puts it in {weight_map[name]}" if name in weight_map else "does not name it")
            for name in header
            if weight_map.get(name) != file
        ]
        listed = (name for name, where in weight_map.items() if where == file and name not in header)
        problems += [f"{name}: not in {file}, where the index puts it" for name in listed]
    complain(folder, problems, f"{INDEX_FILE} and the files do not belong together; fetch both from one revision.")
    payload = sum(entry.nbytes for entry in entries)
    if total is not None and total != payload:
        raise CheckpointError(
            f"{path}: bad index: metadata.total_size is {total} but the files hold {payload} bytes of tensors; "
            "fetch index and files from one revision"
        )
    return entries


def all_entries(folder: Path) -> list[TensorEntry]:
    """Every tensor in the files of a folder. CheckpointError if the files are not whole, or contradict the index."""
    if (folder / INDEX_FILE).is_file():
        return _indexed_entries(folder)
    if not (folder / SINGLE_FILE).is_file():
        raise CheckpointError(
            f"{folder}: neither {INDEX_FILE} nor {SINGLE_FILE} is here; this is not a complete released-format folder"
        )
    stray = sorted(p.name for p in folder.glob("*.safetensors") if p.name != SINGLE_FILE)
    complain(
        folder,
        [f"{name}: beside {SINGLE_FILE}, without an index" for name in stray],
        f"Remove them, or fetch {INDEX_FILE}.",
    )
    return list(read_header(folder / SINGLE_FILE)[0].values())


@dataclass(frozen=True)
class ReleasedFolder:
    """A checked released-format folder.

    Attributes:
        path: the folder.
        config: its configuration.
        entries: {released name: where it lies}, exactly the manifest's tensors, in manifest order.
        ignored: names of tensors that are there and not used (draft copies of embed and head).
    """

    path: Path
    config: ModelConfig
    entries: dict[str, TensorEntry]
    ignored: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: str | Path) -> "ReleasedFolder":
        """Read config, index and headers, and check all of it; no tensor bytes are read.

        Raises:
            CheckpointError: anything wrong with the folder, naming files and tensors (the first ten and their number).
        """
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder")
        config = read_config(folder)
        census = take_census(config, all_entries(folder))
        advice = "Use the config.json and tensor files of one released-format checkpoint."
        complain(folder, [problem.text for problem in census.problems], advice)
        return cls(folder, config, census.entries, census.ignored)

    def read(self, name: str) -> np.ndarray:
        """One tensor in its released form."""
        return read(self.entries[name])

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor in its released form."""
        return read_rows(self.entries[name], start, stop)

    def reading_order(self, names: Iterable[str]) -> list[str]:
        """`names` in file order."""
        return sorted(names, key=lambda name: (self.entries[name].file, self.entries[name].offset))

    def where(self, name: str) -> str:
        """The file that holds a tensor."""
        return str(self.entries[name].file)

    def engram_table(
        self, layer: int, place: str, dtype: np.dtype = ml_dtypes.bfloat16, rows: tuple[int, int] | None = None
    ) -> StoredTable:
        """The table of an Engram layer off the device: read into host memory ("host") or left in the file ("mmap").

        `rows`: first row and the one after the last, where only these are wanted; they are counted from 0 then.
        """
        return engram_table(self.entries, layer, place, dtype, rows)


def engram_table(
    entries: Mapping[str, TensorEntry],
    layer: int,
    place: str,
    dtype: np.dtype,
    rows: tuple[int, int] | None = None,
) -> StoredTable:
    """The table of an Engram layer, or `rows` of it, from its two tensors in safetensors files, {released name: entry}.

    Nothing but the wanted rows is read.
    """
    weight, scale = (entries[f"layers.{layer}.engram.embed.{part}"] for part in ("weight", "scale"))
    first, stop = (0, weight.shape[0]) if rows is None else rows
    if not 0 <= first <= stop <= weight.shape[0]:
        raise IndexError(f"{weight.name}: rows [{first}, {stop}) are outside its {weight.shape[0]} rows")
    if place == "host":
        return HostTable(read_rows(weight, first, stop), read_rows(scale, first, stop), dtype)
    if place == "mmap":
        return FileTable(*(_file_rows(entry, first, stop) for entry in (weight, scale)), dtype)
    raise ValueError(f"an Engram table off the device is 'host' or 'mmap', not {place!r}")


def _file_rows(entry: TensorEntry, first: int, stop: int) -> FileTensor:
    row_bytes = entry.nbytes // entry.shape[0]
    return FileTensor(
        str(entry.file), entry.offset + first * row_bytes, stop - first, entry.shape[1], entry.numpy_dtype
    )
