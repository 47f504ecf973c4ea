"""Writes a released-format folder tensor by tensor, in any order, by several threads and processes."""

from pathlib import Path

import numpy as np

from dsv41_jax.checkpoint.names import NameMap
from dsv41_jax.checkpoint.save_released import FILE_METADATA, plan_files, write_index
from dsv41_jax.checkpoint.slot_file import SlotFile


class ReleasedWriter:
    """Fills `folder`, which has no name that readers look for yet; what another writer has filled stays."""

    def __init__(self, folder: Path, names: NameMap, shard_bytes: int):
        self._folder, self._plan = folder, plan_files(names, shard_bytes)
        self._files: dict[str, SlotFile] = {}  # by tensor
        for file, specs in self._plan.items():
            slots = SlotFile(folder / file, [(s.name, s.dtype, s.shape) for s in specs], FILE_METADATA)
            self._files.update(dict.fromkeys((s.name for s in specs), slots))

    def write(self, name: str, start: int, rows: np.ndarray) -> None:
        """Write rows of a released tensor from row `start` on."""
        self._files[name].write(name, start, rows)

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        for file in set(self._files.values()):
            file.sync()

    def complete(self) -> None:
        """Make a released-format folder of what was written."""
        for file in set(self._files.values()):
            file.complete()
        write_index(self._folder, self._plan)

    def close(self) -> None:
        """Close all files."""
        for file in set(self._files.values()):
            file.close()
