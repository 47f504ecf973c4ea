"""Hot Engram rows in memory: a bounded cache that forgets the rows not asked for longest.

Row r belongs to set r mod S; a set holds 8 rows and forgets its least recently used one. Row ids are hash values, so
the sets fill evenly. Every operation is a few numpy calls on a batch, whatever the cache holds: a dictionary of ten
million rows would cost a hundred bytes for each row of 264.
"""

from __future__ import annotations

import numpy as np

WAYS = 8  # rows of a set
_BOOKKEEPING = 16  # bytes beside each row: its id and when it was last used


class HotRows:
    """Rows as stored, by id. Not safe to share between threads: the owner locks.

    Args:
        row_bytes: stored bytes of a row. limit: bytes for rows and their bookkeeping; allocated at once, and nothing
            more. A limit below one row keeps none.
        table_rows: rows of the table: there is never room for more.
    """

    def __init__(self, row_bytes: int, limit: int, table_rows: int) -> None:
        rows = min(max(0, limit) // (row_bytes + _BOOKKEEPING), -(-table_rows // WAYS) * WAYS)
        ways = min(WAYS, rows)
        self._sets = rows // ways if ways else 0
        self._ids = np.full((self._sets, ways), -1, np.int64)
        self._used = np.zeros((self._sets, ways), np.int64)
        self._rows = np.empty((self._sets, ways, row_bytes), np.uint8)
        self._clock = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._ids.nbytes + self._used.nbytes + self._rows.nbytes

    @property
    def kept(self) -> int:
        """Rows held now."""
        return int((self._ids >= 0).sum())

    def find(self, ids: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy the rows that are held into out [n, row_bytes], and count them as used.

        Args:
            ids: distinct, [n].

        Returns:
            bool [n], True where the row was held.
        """
        if not self._sets or not len(ids):
            return np.zeros(len(ids), bool)
        at = ids % self._sets
        same = self._ids[at] == ids[:, None]
        held, way = same.any(axis=1), same.argmax(axis=1)
        self._clock += 1
        self._used[at[held], way[held]] = self._clock
        out[held] = self._rows[at[held], way[held]]
        return held

    def put(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Hold rows uint8 [n, row_bytes] of distinct ids [n]; of more new rows in a set than it has room for, some."""
        if not self._sets or not len(ids):
            return
        at = ids % self._sets
        new = ~(self._ids[at] == ids[:, None]).any(axis=1)  # another thread may have read the same row
        ids, rows, at = ids[new], rows[new], at[new]
        order = np.argsort(at, kind="stable")
        ids, rows, at = ids[order], rows[order], at[order]
        rank = np.arange(len(at)) - np.searchsorted(at, at)  # 0, 1, .. among the new rows of a set
        fits = rank < self._ids.shape[1]
        oldest = np.argsort(self._used[at[fits]], axis=1, kind="stable")
        way = oldest[np.arange(len(oldest)), rank[fits]]
        self._clock += 1
        self._ids[at[fits], way] = ids[fits]
        self._used[at[fits], way] = self._clock
        self._rows[at[fits], way] = rows[fits]
