"""A safetensors file written in any order, by several threads and processes, and again after a kill.

Where every tensor lies follows from the list of them, so the file gets its full length and its header at once, and each
piece of a tensor is written into its slot. Writing a piece twice changes nothing. Which slots are filled the file does
not tell: whoever writes it keeps account of that.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dsv41_jax.checkpoint.safetensors_file import DTYPES, file_head, tensor_bytes

Tensor = tuple[str, str, tuple[int, ...]]  # name, safetensors dtype, shape


class SlotFile:
    """A file of `tensors`, which lie in it in that order; it is made when the first piece is written."""

    def __init__(self, path: Path, tensors: Sequence[Tensor], metadata: dict[str, str] | None = None):
        self.path, self._head = path, file_head(tensors, metadata)
        self._slots: dict[str, tuple[int, Tensor]] = {}
        self._size = len(self._head)
        for tensor in tensors:
            self._slots[tensor[0]] = (self._size, tensor)
            self._size += tensor_bytes(tensor[1], tensor[2])
        self._lock, self._descriptor, self._dirty = threading.Lock(), None, False

    def _open(self) -> int:
        with self._lock:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
                os.ftruncate(self._descriptor, self._size)  # sparse, and nothing where another process did it already
                _write_at(self._descriptor, self._head, 0)
            return self._descriptor

    def write(self, name: str, start: int, rows: np.ndarray) -> None:
        """Write rows of a tensor from row `start` on. ValueError: they are not of it."""
        offset, (_, dtype, shape) = self._slots[name]
        if rows.dtype != DTYPES[dtype] or rows.shape[1:] != shape[1:] or not 0 <= start <= shape[0] - len(rows):
            raise ValueError(f"{self.path}: {name}: rows {rows.dtype} {rows.shape} do not fit into {dtype} {shape}")
        descriptor, row_bytes = self._open(), tensor_bytes(dtype, shape[1:])
        _write_at(descriptor, np.ascontiguousarray(rows).reshape(-1).view(np.uint8), offset + start * row_bytes)
        self._dirty = True

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        if self._dirty:
            self._dirty = False
            os.fsync(self._descriptor)

    def complete(self) -> None:
        """Make the file if no piece was written here, and sync it."""
        self._open()
        self.sync()

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _write_at(descriptor: int, data: bytes | np.ndarray, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
