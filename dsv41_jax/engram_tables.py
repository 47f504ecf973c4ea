"""Engram tables off the device: rows by id from host memory, or straight from the checkpoint file.

The third place, on the device, is `engram.gather_rows`. An `EngramTable` belongs to one Engram layer; the step gets its
rows as an input. Reading ahead and keeping hot rows are wrappers around this protocol.
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


class _StoredTable:
    """What both sources share: each distinct row is read and dequantised once, in ascending order."""

    def __init__(self, weight_shape: tuple[int, int], scale_shape: tuple[int, int] | None, dtype: np.dtype) -> None:
        rows, width = weight_shape
        if scale_shape is not None and scale_shape != (rows, width // SCALE_BLOCK):
            raise ValueError(f"Engram scale {scale_shape} does not fit a table of {weight_shape}")
        self.shape = (rows, width)
        self.dtype = np.dtype(dtype)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Integer ids [...] -> rows [..., width] in `dtype`. Raises IndexError for an id outside the table."""
        ids = np.asarray(ids)
        distinct, place = np.unique(ids, return_inverse=True)
        if len(distinct) and not (distinct[0] >= 0 and distinct[-1] < self.shape[0]):
            raise IndexError(f"Engram rows {distinct[0]}..{distinct[-1]} requested of a table of {self.shape[0]}")
        weight, scale = self._read(distinct)
        return dequantize_rows(weight, scale, self.dtype)[place].reshape(*ids.shape, self.shape[1])

    def _read(self, distinct: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        raise NotImplementedError


class HostTable(_StoredTable):
    """A table held in host memory.

    Args:
        weight: float8_e4m3fn [rows, width], or a float type.
        scale: float8_e8m0fnu [rows, width/32], or None.
        dtype: what `rows` gives: bfloat16 or float32.
    """

    def __init__(self, weight: np.ndarray, scale: np.ndarray | None, dtype: np.dtype = ml_dtypes.bfloat16) -> None:
        super().__init__(weight.shape, None if scale is None else scale.shape, dtype)
        self._weight, self._scale = weight, scale

    def _read(self, distinct: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        return self._weight[distinct], None if self._scale is None else self._scale[distinct]


class FileTable(_StoredTable):
    """A table left in its file. Nothing is mapped or loaded: a released row is one read of 256 bytes and one of 8.

    Args:
        weight, scale: where the two matrices lie (scale may be None); they may be in different files.
        dtype: what `rows` gives: bfloat16 or float32.

    Reading raises EOFError where the file ends before a row does. The files stay open as long as the table lives.
    """

    def __init__(self, weight: FileTensor, scale: FileTensor | None, dtype: np.dtype = ml_dtypes.bfloat16) -> None:
        scale_shape = None if scale is None else (scale.num_rows, scale.columns)
        super().__init__((weight.num_rows, weight.columns), scale_shape, dtype)
        parts = [part for part in (weight, scale) if part is not None]
        self._parts = [(part, open(part.path, "rb", buffering=0)) for part in parts]

    def close(self) -> None:
        """Close the files; the table cannot be read afterwards."""
        for _, file in self._parts:
            file.close()

    def _read(self, distinct: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        # Python integers from here on: row times row_bytes passes 2^31.
        read = [_read_rows(part, file.fileno(), distinct.tolist()) for part, file in self._parts]
        return read[0], read[1] if len(read) > 1 else None


def _read_rows(part: FileTensor, descriptor: int, ids: list[int]) -> np.ndarray:
    """[len(ids), columns] of the stored type. `pread` keeps no position, so threads may share the descriptor."""
    size = part.row_bytes
    data = b"".join([os.pread(descriptor, size, part.offset + i * size) for i in ids])
    if len(data) != size * len(ids):
        raise EOFError(f"{part.path} ends before Engram row {ids[-1]} does")
    return np.frombuffer(data, np.dtype(part.dtype)).reshape(len(ids), part.columns)
