"""Engram rows read ahead in the background, and the hot ones kept.

A chunk's row ids depend on its token ids only, so while one chunk of a prompt is computed the rows of the next are
read. In decode a row depends on the token that was just sampled: there is nothing to read ahead, and only the hot rows
and the parallel reads help.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from dsv41_jax.engram_hot_rows import HotRows
from dsv41_jax.engram_tables import StoredTable

_READERS = 8  # a row is one small read: a disk needs several under way
_PIECE = 8  # fewest rows worth a thread
_STAGED = 2  # announced blocks that may wait to be asked for


@dataclasses.dataclass(frozen=True)
class EngramStats:
    """What a table was asked for and what it cost; rows are counted once for each call that asks for them.

    Attributes:
        asked: distinct rows, summed over the calls of `rows`.
        hot: of these, found among the hot rows.
        prefetched: of these, read in the background because `prefetch` had announced them. The rest was read while the
            caller waited.
        read_rows, read_bytes: everything read from the table, announced rows that nobody asked for included.
        kept_rows, kept_bytes: hot rows held now, and the bytes allocated for them and their bookkeeping.
        lookups: rows asked for, each as often as a call asks for it (a position asks for one in each column).
        seconds: what `rows` took, summed over the calls: reading, waiting for what was announced, dequantising.
    """

    asked: int
    hot: int
    prefetched: int
    read_rows: int
    read_bytes: int
    kept_rows: int
    kept_bytes: int
    lookups: int
    seconds: float

    @property
    def lookups_per_second(self) -> float:
        """Lookups for each second that callers waited for them; 0 before the first."""
        return self.lookups / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the asked rows that were hot; 0 before the first."""
        return self.hot / self.asked if self.asked else 0.0


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Distinct rows on their way: ids [n], which of them were hot [n], the rows as stored and dequantised."""

    ids: np.ndarray
    hot: np.ndarray
    stored: np.ndarray
    values: np.ndarray
    pieces: list[Future]

    def wait(self) -> None:
        """Until the last piece is there. Raises what a reader raised."""
        for piece in self.pieces:
            piece.result()


class PrefetchingTable:
    """An `EngramTable` around a stored one. Threads may share it.

    Args:
        table: `HostTable` or `FileTable`.
        hot_bytes: memory for hot rows, allocated at once, at most what the whole table needs; 0 keeps none. Rows are
            kept as stored (264 bytes in the release, 16 more to find them).
    """

    def __init__(self, table: StoredTable, hot_bytes: int = 0) -> None:
        if hot_bytes < 0:
            raise ValueError(f"hot_bytes={hot_bytes}: a number of bytes is needed, or 0 to keep no rows")
        self._table = table
        self._hot = HotRows(table.row_bytes, hot_bytes, table.shape[0])
        self._lock = threading.Lock()  # of the hot rows, the staged batches and the counters; never held over a read
        self._staged: list[_Batch] = []
        self._asked = self._found_hot = self._found_staged = self._read_rows = self._lookups = 0
        self._seconds = 0.0
        # Its threads end with `close`, with this object, or with the process, whichever comes first.
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="engram")

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, row width)."""
        return self._table.shape

    @property
    def stats(self) -> EngramStats:
        """Counters since the table was made."""
        with self._lock:
            return EngramStats(
                asked=self._asked,
                hot=self._found_hot,
                prefetched=self._found_staged,
                read_rows=self._read_rows,
                read_bytes=self._read_rows * self._table.row_bytes,
                kept_rows=self._hot.kept,
                kept_bytes=self._hot.nbytes,
                lookups=self._lookups,
                seconds=self._seconds,
            )

    def prefetch(self, ids: np.ndarray) -> None:
        """Announce a later `rows(ids)`: reading starts in the background, and this returns at once.

        Args:
            ids: integers [...]. Two announced blocks may wait; a third makes the oldest be forgotten.

        Raises:
            IndexError: an id outside the table. What goes wrong in reading is raised by the `rows` that asks for it.
        """
        distinct, _ = self._table.distinct(ids)
        batch = self._start(distinct)
        with self._lock:
            self._staged = [*self._staged, batch][-_STAGED:]

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Integer ids [...] -> rows [..., width], from the oldest announced block that has any of them, the hot rows,
        and the table.

        Raises:
            IndexError: an id outside the table. EOFError, OSError: of reading the file, in the background or now.
        """
        start = time.perf_counter()
        distinct, place = self._table.distinct(ids)
        values = np.empty((len(distinct), self.shape[1]), self._table.dtype)
        announced, missing = self._take(distinct), np.ones(len(distinct), bool)
        if announced is not None:
            announced.wait()
            mine = np.isin(distinct, announced.ids)
            at = np.searchsorted(announced.ids, distinct[mine])
            values[mine], missing = announced.values[at], ~mine
            self._finish(announced, asked=int(mine.sum()), hot=int(announced.hot[at].sum()), ahead=True)
        if missing.any():
            batch = self._start(distinct[missing], wanted_now=True)
            batch.wait()
            values[missing] = batch.values
            self._finish(batch, asked=len(batch.ids), hot=int(batch.hot.sum()), ahead=False)
        result = values[place].reshape(*np.shape(ids), self.shape[1])
        with self._lock:
            self._lookups += len(place)
            self._seconds += time.perf_counter() - start
        return result

    def close(self) -> None:
        """End the readers and close the table's files; the table cannot be read afterwards."""
        self._pool.shutdown(cancel_futures=True)
        self._staged = []
        if hasattr(self._table, "close"):
            self._table.close()

    def _start(self, distinct: np.ndarray, wanted_now: bool = False) -> _Batch:
        """Look the rows up among the hot ones, and let the pool read the others and dequantise all. Rows in memory that
        are wanted now are not worth handing over to other threads.
        """
        n = len(distinct)
        stored = np.empty((n, self._table.row_bytes), np.uint8)
        values = np.empty((n, self.shape[1]), self._table.dtype)
        with self._lock:
            hot = self._hot.find(distinct, stored)
            self._read_rows += int(n - hot.sum())
        table = self._table

        def load(piece: slice) -> None:
            cold = ~hot[piece]
            if cold.any():
                stored[piece][cold] = table.read(distinct[piece][cold])
            values[piece] = table.dequantize(stored[piece])

        if wanted_now and table.in_memory:
            load(slice(None))
            return _Batch(distinct, hot, stored, values, [])
        step = max(_PIECE, -(-n // _READERS))
        pieces = [self._pool.submit(load, slice(at, at + step)) for at in range(0, n, step)]
        return _Batch(distinct, hot, stored, values, pieces)

    def _take(self, distinct: np.ndarray) -> _Batch | None:
        """The oldest announced batch with any of these rows, no longer staged; those before it are forgotten."""
        with self._lock:
            for i, batch in enumerate(self._staged):
                if np.isin(distinct, batch.ids).any():
                    self._staged = self._staged[i + 1 :]
                    return batch
        return None

    def _finish(self, batch: _Batch, asked: int, hot: int, ahead: bool) -> None:
        with self._lock:
            self._asked += asked
            self._found_hot += hot
            self._found_staged += asked - hot if ahead else 0
            self._hot.put(batch.ids[~batch.hot], batch.stored[~batch.hot])
