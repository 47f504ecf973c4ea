"""Where the Engram n-gram tables put their rows: bucket primes, offsets and hash multipliers, from the config alone.

Python integers and numpy int64 only: the products of the hash reach 2^63 (spec: Engram, Layout and Multipliers).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dsv41_jax.config import ModelConfig

# Deterministic Miller-Rabin: these bases decide every n < 3.18e23, which covers all 64-bit numbers.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
_SEED_PER_LAYER = 10007
_INT64_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class EngramLayout:
    """Row layout of every Engram layer. Columns run n-gram size major (2..N), head minor.

    layer_ids: tuple [layers]; primes, offsets: tuple [layers][columns] of int; table_rows: tuple [layers], each the sum
    of that layer's primes; multipliers: tuple [layers][max_ngram_size] of odd int below 2^63, one per look-back.
    """

    layer_ids: tuple[int, ...]
    max_ngram_size: int
    n_heads: int
    primes: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    table_rows: tuple[int, ...]
    multipliers: tuple[tuple[int, ...], ...]

    @property
    def columns(self) -> int:
        """Table rows read per position: (N - 1) n-gram sizes times heads."""
        return (self.max_ngram_size - 1) * self.n_heads


def is_prime(n: int) -> bool:
    """Exact for every n below 3.18e23 (Miller-Rabin with fixed witnesses)."""
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    d, twos = n - 1, 0
    while d % 2 == 0:
        d, twos = d // 2, twos + 1
    for a in _WITNESSES:
        x = pow(a, d, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def multipliers_for(layer_id: int, max_ngram_size: int, compressed_vocab_size: int) -> tuple[int, ...]:
    """The odd hash multipliers of one layer, one per look-back 0..max_ngram_size-1."""
    bound = max(1, _INT64_MAX // compressed_vocab_size // 2)
    draws = np.random.default_rng(_SEED_PER_LAYER * layer_id).integers(0, bound, size=max_ngram_size, dtype=np.int64)
    return tuple(2 * int(x) + 1 for x in draws)


@lru_cache(maxsize=256)
def derive_layout(
    layer_ids: tuple[int, ...], max_ngram_size: int, vocab_size: int, n_heads: int, compressed_vocab_size: int
) -> EngramLayout:
    """Layout for `layer_ids` in the order given. `vocab_size` is the smallest bucket size, `engram_vocab_size`.

    The search for a prime restarts at `vocab_size` for every (layer, size), but no prime is used twice, so it always
    passes over the ones already taken: the sequence is simply all primes >= vocab_size in ascending order.
    """
    columns = (max_ngram_size - 1) * n_heads
    candidate = vocab_size
    primes, offsets = [], []
    for _ in layer_ids:
        row: list[int] = []
        while len(row) < columns:
            if is_prime(candidate):
                row.append(candidate)
            candidate += 1
        primes.append(tuple(row))
        offsets.append(tuple(sum(row[:i]) for i in range(columns)))
    return EngramLayout(
        layer_ids=layer_ids,
        max_ngram_size=max_ngram_size,
        n_heads=n_heads,
        primes=tuple(primes),
        offsets=tuple(offsets),
        table_rows=tuple(sum(row) for row in primes),
        multipliers=tuple(multipliers_for(i, max_ngram_size, compressed_vocab_size) for i in layer_ids),
    )


def engram_layout(config: ModelConfig) -> EngramLayout:
    """Layout of a validated configuration (no layers: empty tuples)."""
    return derive_layout(
        config.engram_layer_ids,
        config.engram_max_ngram_size,
        config.engram_vocab_size,
        config.engram_n_heads,
        config.engram_compressed_vocab_size,
    )
