"""The keys of CSA2 attention as they are stored: an FP8 window and FP4 entries of the shared compressed stream."""

import dataclasses
import functools
from typing import NamedTuple

import jax
from jax import Array

from dsv41_jax import quant

LANES = 128


class WindowKeys(NamedTuple):
    """Window rows of one layer, inside the stacked array of all layers.

    Attributes:
        codes: uint8 [L, B, R, d], E4M3 bits.
        scales: uint8 [L, B, d/32, R], UE8M0.
        layer: which of the L, an int or an int32 scalar.
        position: int32 [B, R], the absolute position that each row holds; negative: no such key.
    """

    codes: Array
    scales: Array
    layer: Array | int
    position: Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["words", "slot", "row", "lane"], meta_fields=["padded"]
)
@dataclasses.dataclass(frozen=True)
class Entries:
    """Selected FP4 entries, inside the pool of all KV sources.

    Attributes:
        words: int32 [S, rows, 128]. An entry is `entry_words(d)` consecutive words: d/8 words of E2M1 codes (nibble k
            of word w is channel k * d/8 + w), then E4M3 scales, one per 16 channels (byte b of word w is scale
            b * scale_words + w).
        slot: which of the S, an int or an int32 scalar.
        row, lane: int32 [B, t, K]; an entry begins at word `lane` of `row` and may run into the next row. row < 0: no
            entry.
        padded: static; every entry begins at lane 0, so that it is read with one row.
    """

    words: Array
    slot: Array | int
    row: Array
    lane: Array
    padded: bool = False


def scale_words(dim: int) -> int:
    """int32 words of the scales of an entry."""
    return -(-dim // (4 * quant.MAIN_KV_BLOCK))


def entry_words(dim: int) -> int:
    """int32 words of an entry."""
    return dim // 8 + scale_words(dim)


def query_tile(t: int, limit: float) -> int:
    """The largest divisor of t that is at most `limit`, at least 1."""
    return max((n for n in range(1, t + 1) if t % n == 0 and n <= limit), default=1)
