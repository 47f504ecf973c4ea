"""An Engram table off the device, split by rows over the processes of a run.

Each process holds, or leaves in its file, a range of the rows. For a step every process reads what it owns of the rows
that any token of the batch wants, and fills in zeros for the rest; its devices sum the parts of all processes as
integers. Only one part of a row is not zero, so the sum is the row, bit for bit. Rows travel as they are stored, which
is a quarter of what they are in float32, and are dequantised where they arrive.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41_jax import quant
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram import sum_parts
from dsv41_jax.engram_prefetch import EngramStats, PrefetchingTable
from dsv41_jax.engram_tables import SCALE_BLOCK, StoredTable
from dsv41_jax.parallel import Parallel

_WORD = 4  # bytes


def own_range(rows: int, processes: int, process: int) -> tuple[int, int]:
    """First row and the one after the last that a process owns of a table: ranges of nearly equal size, in order."""
    return rows * process // processes, rows * (process + 1) // processes


@dataclasses.dataclass(frozen=True)
class RowForm:
    """How a stored row lies in uint32 words: its numbers, its scales, zeros up to a whole word.

    Attributes:
        width: numbers in a row. dtype: their type. scaled: one UE8M0 scale for 32 numbers follows them.
    """

    width: int
    dtype: np.dtype
    scaled: bool

    @property
    def weight_bytes(self) -> int:
        """Bytes of the numbers."""
        return self.width * np.dtype(self.dtype).itemsize

    @property
    def words(self) -> int:
        """Words of a row."""
        return -(-(self.weight_bytes + (self.width // SCALE_BLOCK if self.scaled else 0)) // _WORD)

    def dequantize(self, words: Array, dtype: jnp.dtype) -> Array:
        """uint32 [..., words] -> rows [..., width] in `dtype`, the numbers of `engram_tables.dequantize_rows`."""
        stored = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], self.words * _WORD)
        weight, end = stored[..., : self.weight_bytes], self.weight_bytes
        size = np.dtype(self.dtype).itemsize
        if size > 1:
            weight = weight.reshape(*weight.shape[:-1], self.width, size)
        leaf = {"weight": jax.lax.bitcast_convert_type(weight, self.dtype)}
        if self.scaled:
            leaf["scale"] = stored[..., end : end + self.width // SCALE_BLOCK]
        return quant.dequantize_weight(leaf, dtype)


def released_form(config: ModelConfig) -> RowForm:
    """The form of the released tables: E4M3 with scales."""
    return RowForm(config.engram_head_dim, np.dtype(ml_dtypes.float8_e4m3fn), True)


class _StoredRows(StoredTable):
    """A table whose rows are not dequantised: uint32 words."""

    def __init__(self, table: StoredTable):
        self._table, self.row_bytes, self.in_memory = table, table.row_bytes, table.in_memory
        self._words = -(-table.row_bytes // _WORD)
        self.shape, self.dtype = (table.shape[0], self._words), np.dtype(np.uint32)

    def read(self, distinct: np.ndarray) -> np.ndarray:
        return self._table.read(distinct)

    def dequantize(self, stored: np.ndarray) -> np.ndarray:
        padded = np.zeros((len(stored), self._words * _WORD), np.uint8)
        padded[:, : self.row_bytes] = stored
        return padded.view(np.uint32)

    def close(self) -> None:
        if hasattr(self._table, "close"):
            self._table.close()


class EngramShare:
    """The rows of a table that one process owns, read ahead and kept hot as `PrefetchingTable` does.

    Args:
        table: the own rows alone. first: the first of them, counted in the whole table. rows: of the whole table.
        hot_bytes: memory for hot rows; see `PrefetchingTable`.
    """

    def __init__(self, table: StoredTable, first: int, rows: int, hot_bytes: int = 0) -> None:
        self.form = RowForm(table.shape[1], table.weight_dtype, table.scaled)
        self.range, self.shape = (first, first + table.shape[0]), (rows, table.shape[1])
        if not 0 <= first <= self.range[1] <= rows:
            raise ValueError(f"Engram rows {first} to {self.range[1]} are no part of a table of {rows}")
        self._table = PrefetchingTable(_StoredRows(table), hot_bytes)

    @property
    def stats(self) -> EngramStats:
        """Counters of the own rows."""
        return self._table.stats

    def prefetch(self, ids: np.ndarray) -> None:
        """Announce a later `rows(ids)`; returns at once. Raises IndexError for an id outside the whole table."""
        own = self._own(ids)
        if own.any():
            self._table.prefetch(np.asarray(ids)[own] - self.range[0])

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Integer ids [...] -> uint32 [..., words]: stored rows, zeros for those of other processes.

        Raises:
            IndexError: an id outside the whole table. EOFError, OSError: of reading the file.
        """
        own = self._own(ids)
        part = np.zeros((*own.shape, self.form.words), np.uint32)
        part[own] = self._table.rows(np.asarray(ids)[own] - self.range[0])
        return part

    def close(self) -> None:
        """End the readers and close the files; the share cannot be read afterwards."""
        self._table.close()

    def _own(self, ids: np.ndarray) -> np.ndarray:
        ids = np.asarray(ids)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.shape[0]):
            raise IndexError(f"Engram rows {ids.min()}..{ids.max()} requested of a table of {self.shape[0]}")
        return (ids >= self.range[0]) & (ids < self.range[1])


def arranged(part: np.ndarray, parallel: Parallel) -> np.ndarray:
    """A part [rows, t, ...] of all rows in the order in which the sum deals it out: [token shards * b, t / parts, ...],
    device by device of the mesh.
    """
    rows, t = part.shape[:2]
    own = (rows // parallel.row_shards, parallel.parts, t // parallel.parts)
    split = part.reshape(parallel.data, parallel.tensor, *own, *part.shape[2:])
    return np.moveaxis(split, 3, 1).reshape(-1, t // parallel.parts, *part.shape[2:])


def summed_rows(parallel: Parallel, part: Array, form: RowForm, dtype: jnp.dtype) -> Array:
    """On a device, inside `jax.shard_map`: its [1, token shards * b, t, ..., words] of what `PartSender` gave -> rows
    [b, t, ..., width] of its own tokens.
    """
    return form.dequantize(sum_parts(parallel, part[0]), dtype)


class PartSender:
    """Gives a process's part to the devices of a mesh, so that the sum over all devices counts it once.

    The first device of each process gets the part, its others zeros, which stay on them from step to step.

    Args:
        mesh: its devices are those of all processes of the run.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
        self._zeros: dict[tuple[int, ...], list[Array]] = {}

    def __call__(self, part: np.ndarray) -> Array:
        """uint32 [...] of this process -> uint32 [devices, ...], the first axis split over all devices."""
        shape = (1, *part.shape)
        if shape not in self._zeros:
            self._zeros[shape] = [jax.device_put(np.zeros(shape, np.uint32), d) for d in self._devices[1:]]
        own = jax.device_put(part[None], self._devices[0])
        whole = (self._sharding.mesh.size, *part.shape)
        return jax.make_array_from_single_device_arrays(whole, self._sharding, [own, *self._zeros[shape]])
