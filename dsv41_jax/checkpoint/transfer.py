"""Moves pieces of tensors from a source to a writer: a few at a time, in order, with account kept of what is done."""

import time
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from dsv41_jax.checkpoint.checksum import crc32
from dsv41_jax.checkpoint.pieces import Piece, total_bytes
from dsv41_jax.checkpoint.tensor_source import TensorSource
from dsv41_jax.checkpoint.workers import each

COMMIT_BYTES = 256 << 20  # moved between two entries in the journal, or
COMMIT_SECONDS = 1.0  # this long: what a kill costs

Account = Callable[[list[tuple[Piece, int]]], None]  # pieces that are on the disk, with their checksums


class TensorWriter(Protocol):
    """A folder that is filled piece by piece: `orbax_writer.OrbaxWriter` or `released_writer.ReleasedWriter`."""

    def write(self, name: str, start: int, rows: np.ndarray) -> None:
        """Write rows of a released tensor from row `start` on; called from several threads."""

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""

    def complete(self) -> None:
        """Write what the format needs besides tensors. CheckpointError: not all of them are there."""

    def close(self) -> None:
        """Close all files."""


def transfer(
    source: TensorSource,
    writer: TensorWriter,
    pieces: Iterable[Piece],
    record: Account,
    progress: Callable[[int], None],
) -> None:
    """Read, write and record the pieces; `progress` is called with the bytes of each.

    After an error in one piece those that are finished are recorded before it is raised.
    """

    def move(piece: Piece) -> int:
        rows = source.rows(piece.name, piece.start, piece.stop)
        writer.write(piece.name, piece.start, rows)
        return crc32(rows)

    finished: list[tuple[Piece, int]] = []

    def commit() -> None:
        writer.sync()
        record(finished)
        finished.clear()

    due = time.monotonic() + COMMIT_SECONDS
    try:
        for piece, checksum in each(move, pieces):
            finished.append((piece, checksum))
            progress(piece.nbytes)
            if time.monotonic() >= due or total_bytes(p for p, _ in finished) >= COMMIT_BYTES:
                commit()
                due = time.monotonic() + COMMIT_SECONDS
    finally:
        if finished:
            commit()
