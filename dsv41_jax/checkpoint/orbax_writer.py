"""Writes an Orbax folder tensor by tensor, in any order, by several threads and processes.

`orbax` says what is in the folder, `orbax_layout` how the parameters lie in it.
"""

import threading
from pathlib import Path

import numpy as np
import tensorstore as ts

from dsv41_jax.checkpoint.names import LeafPath, NameMap
from dsv41_jax.checkpoint.open_folder import PARAMS_FOLDER
from dsv41_jax.checkpoint.orbax_layout import check_chunks, create_array, stored_leaves, write_metadata
from dsv41_jax.checkpoint.released import is_table
from dsv41_jax.checkpoint.released_folder import complain
from dsv41_jax.checkpoint.safetensors_file import CheckpointError
from dsv41_jax.checkpoint.slot_file import SlotFile

ENGRAM_FILE = "engram.safetensors"


class OrbaxWriter:
    """Fills `folder`, which has no name that readers look for yet; what another writer has filled stays."""

    def __init__(self, folder: Path, names: NameMap):
        self._params, self._names, self._forms = folder / PARAMS_FOLDER, names, stored_leaves(names)
        tables = [names.specs[name] for name, place in names.places.items() if is_table(place.path)]
        self._tables = {spec.name for spec in tables}
        self._engram = SlotFile(folder / ENGRAM_FILE, [(s.name, s.dtype, s.shape) for s in tables])
        self._arrays: dict[LeafPath, ts.TensorStore] = {}
        self._lock = threading.Lock()

    def write(self, name: str, start: int, rows: np.ndarray) -> None:
        """Write rows of a released tensor from row `start` on; those of `params/` are on the disk on return.

        Raises CheckpointError if TensorStore cannot write (a full disk, for one).
        """
        if name in self._tables:
            self._engram.write(name, start, rows)
            return
        place = self._names.places[name]
        if rows.dtype == np.int8:  # two FP4 codes a byte
            rows = rows.view(np.uint8)
        try:
            self._array(place.path)[(*place.index, slice(start, start + len(rows)))].write(rows).result()
        except ValueError as error:  # what TensorStore raises, whatever is wrong
            raise CheckpointError(f"{self._params}: {name} cannot be written: {first_line(error)}") from error

    def _array(self, path: LeafPath) -> ts.TensorStore:
        with self._lock:
            if path not in self._arrays:
                self._arrays[path] = create_array(self._params, self._names, path, self._forms[path])
            return self._arrays[path]

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        self._engram.sync()

    def complete(self) -> None:
        """Make an Orbax checkpoint of what was written. CheckpointError: a chunk is missing or of a wrong size."""
        problems = []
        for path, form in self._forms.items():
            problems += check_chunks(self._params, self._names, path, form)
        complain(self._params, problems, "Remove this folder and convert the model again.")
        if self._tables:
            self._engram.complete()
        write_metadata(self._params, self._forms)

    def close(self) -> None:
        """Close all files."""
        self._arrays.clear()
        self._engram.close()


def first_line(error: Exception) -> str:
    """The first line of an error's message, cut to a length that can be read."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]
