"""Measures lookups a second of Engram tables off the device, on a table of released rows filled with random bytes.

    host        the table in memory, rows dequantised (a single process)
    host stored the same, rows as they are stored (a process's share of a table that several hold)
    mmap cold   the table in a file, nothing of it in the system's page cache
    mmap warm   the same, its pages in the page cache
    mmap hot    the same, the rows that are asked for among the hot rows kept in memory

Rows are drawn evenly, as hashes are. A call asks for the rows of one step: 24 for each token in the release.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from pathlib import Path

import ml_dtypes
import numpy as np

from dsv41_jax.engram_prefetch import PrefetchingTable
from dsv41_jax.engram_share import EngramShare
from dsv41_jax.engram_tables import SCALE_BLOCK, FileTable, FileTensor, HostTable

WIDTH = 256
ROW_BYTES = WIDTH + WIDTH // SCALE_BLOCK
COLUMNS = 24  # rows of a token in a layer
PLACES = ("host", "host stored", "mmap cold", "mmap warm", "mmap hot")
_E4M3, _E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
_PIECE = 1 << 20  # rows written at a time


@dataclasses.dataclass(frozen=True)
class Lookups:
    """Measured: tokens of a call, and the median, slowest and fastest rows a second over the repeats."""

    place: str
    tokens: int
    median: float
    slowest: float
    fastest: float


def table(found: list[Lookups]) -> str:
    """Results in Markdown."""
    lines = ["| table | tokens a call | rows/s (slowest to fastest) | ms a call |", "|---|---|---|---|"]
    for one in found:
        speed = f"{one.median:,.0f} ({one.slowest:,.0f} to {one.fastest:,.0f})"
        lines.append(f"| {one.place} | {one.tokens} | {speed} | {1e3 * one.tokens * COLUMNS / one.median:.2f} |")
    return "\n".join(lines)


def write_table(path: Path, rows: int, seed: int = 0) -> tuple[FileTensor, FileTensor]:
    """A file of `rows` released rows: where the numbers and the scales lie."""
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        for at in range(0, rows, _PIECE):
            file.write(rng.integers(0, 0x7F, (min(_PIECE, rows - at), WIDTH), np.uint8).tobytes())
        for at in range(0, rows, _PIECE):
            file.write(rng.integers(120, 130, (min(_PIECE, rows - at), WIDTH // SCALE_BLOCK), np.uint8).tobytes())
        file.flush()
        os.fsync(file.fileno())  # what is not on the disk cannot be dropped from the page cache
    weight = FileTensor(str(path), 0, rows, WIDTH, _E4M3)
    return weight, FileTensor(str(path), rows * WIDTH, rows, WIDTH // SCALE_BLOCK, _E8M0)


def _forget_pages(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_pages(path: Path) -> None:
    with path.open("rb") as file:
        while file.read(1 << 26):
            pass


def _loaded(part: FileTensor) -> np.ndarray:
    flat = np.fromfile(part.path, part.dtype, part.num_rows * part.columns, offset=part.offset)
    return flat.reshape(-1, part.columns)


def measure(path: Path, rows: int, tokens: list[int], calls: int, repeats: int) -> list[Lookups]:
    """Lookups a second in each place and for each number of tokens in a call.

    Args:
        path: a file to write the table to; it is left there.
        rows: of the table. calls: measured in a repeat; every repeat draws other rows.
    """
    parts = write_table(path, rows)
    loaded = [_loaded(part) for part in parts]
    found, rng = [], np.random.default_rng(1)
    for place in PLACES:
        for count in tokens:
            speeds = []
            for _ in range(repeats):
                blocks = rng.integers(0, rows, (calls, count, COLUMNS))
                if place == "mmap cold":
                    _forget_pages(path)
                if place == "mmap warm":
                    _read_pages(path)
                room = 4 * blocks.size * (ROW_BYTES + 16) if place == "mmap hot" else 0  # sets fill unevenly
                if place == "host stored":
                    reader = EngramShare(HostTable(*loaded), 0, rows)
                else:
                    table = HostTable(*loaded) if place == "host" else FileTable(*parts)
                    reader = PrefetchingTable(table, room)
                speeds.append(_speed(reader, blocks, warm=room > 0))
            found.append(Lookups(place, count, statistics.median(speeds), min(speeds), max(speeds)))
    return found


def _speed(reader: PrefetchingTable | EngramShare, blocks: np.ndarray, warm: bool) -> float:
    """Lookups a second of the calls `blocks` [calls, tokens, columns]; `warm`: when they were made before."""
    if warm:
        for block in blocks:
            reader.rows(block)
    before = reader.stats
    for block in blocks:
        reader.rows(block)
    after = reader.stats
    reader.close()
    return (after.lookups - before.lookups) / (after.seconds - before.seconds)
