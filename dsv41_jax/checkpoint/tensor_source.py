"""What the reader asks of a folder, whatever its format: rows of released tensors."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_tables import StoredTable


class TensorSource(Protocol):
    """A checked folder: `released_folder.ReleasedFolder` or `orbax.OrbaxFolder`.

    Attributes:
        path: the folder. config: its configuration.
        entries: keyed by the released names of the tensors it holds.
    """

    path: Path
    config: ModelConfig
    entries: Mapping[str, Any]

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor in its released form (FP4 as int8). The array is not changed later."""

    def reading_order(self, names: Iterable[str]) -> list[str]:
        """`names` in the order in which reading them is cheapest."""

    def where(self, name: str) -> str:
        """The file that holds a tensor, for messages."""

    def engram_table(self, layer: int, place: str, dtype: np.dtype, rows: tuple[int, int] | None = None) -> StoredTable:
        """The table of an Engram layer off the device: in host memory ("host") or left in the file ("mmap").

        `rows`: first row and the one after the last, where only these are wanted; they are counted from 0 then.
        """
