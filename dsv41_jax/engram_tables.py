"""Engram tables off the device: rows by id from host memory, or straight from the checkpoint file.

The third place, on the device, is `engram.gather_rows`. An `EngramTable` belongs to one Engram layer; the step gets its
rows as an input. `engram_prefetch` reads ahead and keeps hot rows for the two tables here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np

SCALE_BLOCK = 32  # columns that share one scale


class EngramTable(Protocol):
    """Dequantised rows by id."""

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, row width)."""

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Integer ids [...] -> rows [..., width]. Raises IndexError for an id outside the table."""

    def prefetch(self, ids: np.ndarray) -> None:
        """Announce a later `rows(ids)`; returns at once. Raises IndexError for an id outside the table."""


@dataclass(frozen=True)
class FileTensor:
    """A row-major matrix inside a file: where a row lies, nothing read yet.

    Attributes:
        path: the file, e.g. a safetensors shard.
        offset: byte of the matrix's first row, from the start of the file.
        num_rows: its rows.
        columns: numbers in a row.
        dtype: stored type of a number; `row_bytes` follows from it.
    """

    path: str
    offset: int
    num_rows: int
    columns: int
    dtype: np.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes in a row."""
        return self.columns * np.dtype(self.dtype).itemsize


def dequantize_rows(weight: np.ndarray, scale: np.ndarray | None, dtype: np.dtype) -> np.ndarray:
    """Rows [n, width] (float8_e4m3fn with float8_e8m0fnu scales [n, width/32], or any float type without) in `dtype`.

    Exact in bfloat16 and float32: a code times a power of two.
    """
    values = weight.astype(np.float32)
    if scale is not None:
        blocks = values.reshape(len(values), scale.shape[1], SCALE_BLOCK)
        values = (blocks * scale.astype(np.float32)[..., None]).reshape(values.shape)
    return values.astype(dtype)


class StoredTable:
    """What both sources share: each distinct row is read and dequantised once, in ascending order.

    Attributes:
        shape: (rows, row width). dtype: what `rows` gives.
        row_bytes: stored bytes of a row with its scales (264 in the release).
        in_memory: reading waits for no disk.
        weight_dtype, scaled: stored type of a number, and whether one UE8M0 scale for 32 of them follows.
    """

    in_memory = False

    def __init__(
        self,
        weight: tuple[tuple[int, int], np.dtype],
        scale: tuple[tuple[int, int], np.dtype] | None,
        dtype: np.dtype,
    ) -> None:
        (rows, width), weight_dtype = weight
        if scale is not None and scale[0] != (rows, width // SCALE_BLOCK):
            raise ValueError(f"Engram scale {scale[0]} does not fit a table of {weight[0]}")
        self.shape = (rows, width)
        self.dtype = np.dtype(dtype)
        self.weight_dtype, self.scaled = np.dtype(weight_dtype), scale is not None
        self._scale_dtype = None if scale is None else np.dtype(scale[1])
        self._weight_bytes = width * self.weight_dtype.itemsize
        self.row_bytes = self._weight_bytes + (0 if scale is None else scale[0][1] * self._scale_dtype.itemsize)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Integer ids [...] -> rows [..., width] in `dtype`. Raises IndexError for an id outside the table."""
        distinct, place = self.distinct(ids)
        return self.dequantize(self.read(distinct))[place].reshape(*np.shape(ids), self.shape[1])

    def prefetch(self, ids: np.ndarray) -> None:
        """Nothing is read ahead without `engram_prefetch.PrefetchingTable`."""

    def distinct(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ascending distinct ids [n], and where in them each of ids [...] is [ids.size].

        Raises IndexError for an id outside the table.
        """
        distinct, place = np.unique(np.asarray(ids).reshape(-1), return_inverse=True)
        if len(distinct) and not (distinct[0] >= 0 and distinct[-1] < self.shape[0]):
            raise IndexError(f"Engram rows {distinct[0]}..{distinct[-1]} requested of a table of {self.shape[0]}")
        return distinct, place

    def read(self, distinct: np.ndarray) -> np.ndarray:
        """Ids [n] inside the table -> rows as stored, uint8 [n, row_bytes]: numbers, then scales. Threads may read."""
        raise NotImplementedError

    def dequantize(self, stored: np.ndarray) -> np.ndarray:
        """What `read` gives [n, row_bytes] -> rows [n, width] in `dtype`."""
        weight = np.ascontiguousarray(stored[:, : self._weight_bytes]).view(self.weight_dtype)
        scale = None
        if self._scale_dtype is not None:
            scale = np.ascontiguousarray(stored[:, self._weight_bytes :]).view(self._scale_dtype)
        return dequantize_rows(weight, scale, self.dtype)


class HostTable(StoredTable):
    """A table held in host memory.

    Args:
        weight: float8_e4m3fn [rows, width], or a float type.
        scale: float8_e8m0fnu [rows, width/32], or None.
        dtype: what `rows` gives: bfloat16 or float32.
    """

    in_memory = True

    def __init__(self, weight: np.ndarray, scale: np.ndarray | None, dtype: np.dtype = ml_dtypes.bfloat16) -> None:
        super().__init__((weight.shape, weight.dtype), None if scale is None else (scale.shape, scale.dtype), dtype)
        self._parts = [weight] if scale is None else [weight, scale]

    def read(self, distinct: np.ndarray) -> np.ndarray:
        return np.concatenate([part[distinct].view(np.uint8) for part in self._parts], axis=1)


class FileTable(StoredTable):
    """A table left in its file. Nothing is mapped or loaded: a released row is one read of 256 bytes and one of 8.

    Args:
        weight, scale: where the two matrices lie (scale may be None); they may be in different files.
        dtype: what `rows` gives: bfloat16 or float32.

    Reading raises EOFError where the file ends before a row does. The files stay open as long as the table lives.
    """

    def __init__(self, weight: FileTensor, scale: FileTensor | None, dtype: np.dtype = ml_dtypes.bfloat16) -> None:
        parts = [part for part in (weight, scale) if part is not None]
        forms = [((part.num_rows, part.columns), part.dtype) for part in parts]
        super().__init__(forms[0], forms[1] if scale is not None else None, dtype)
        self._parts = [(part, open(part.path, "rb", buffering=0)) for part in parts]

    def close(self) -> None:
        """Close the files; the table cannot be read afterwards."""
        for _, file in self._parts:
            file.close()

    def read(self, distinct: np.ndarray) -> np.ndarray:
        # Python integers from here on: row times row_bytes passes 2^31.
        ids = distinct.tolist()
        return np.concatenate([_read_rows(part, file.fileno(), ids) for part, file in self._parts], axis=1)


def _read_rows(part: FileTensor, descriptor: int, ids: list[int]) -> np.ndarray:
    """uint8 [len(ids), row_bytes]. `pread` keeps no position, so threads may share the descriptor."""
    size = part.row_bytes
    data = b"".join([os.pread(descriptor, size, part.offset + i * size) for i in ids])
    if len(data) != size * len(ids):
        raise EOFError(f"{part.path} ends before Engram row {ids[-1]} does")
    return np.frombuffer(data, np.uint8).reshape(len(ids), size)
