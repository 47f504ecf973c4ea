"""Tiles that keep temporary arrays of the reference code inside a byte budget."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

TEMPORARY_BYTES = 256 << 20  # of a step, beside its inputs, outputs and the residual streams


def largest_tile(count: int, limit: float) -> int:
    """The largest divisor of `count` that is at most `limit`, at least 1."""
    return max((n for n in range(1, count + 1) if count % n == 0 and n <= limit), default=1)


def split_queries(x: Array | None, size: int) -> Array | None:
    """[B, T, ...] -> [tiles, B, size, ...]; the last tile is filled up with zeros. None stays None."""
    if x is None:
        return None
    b, t = x.shape[:2]
    padded = jnp.pad(x, [(0, 0), (0, -t % size)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(padded.reshape(b, -1, size, *x.shape[2:]), 1, 0)


def join_queries(x: Array, t: int) -> Array:
    """The inverse of `split_queries`: [tiles, B, size, ...] -> [B, t, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :t]


def by_query_tiles(run: Callable, size: int, *inputs: Array | None) -> Any:
    """`run(tile number, *parts)` on tiles of `size` queries, one after the other; results joined again.

    Args:
        run: of int32 [] and the tile's part [B, size, ...] of every input; returns a tree of [B, size, ...].
        inputs: [B, T, ...], or None.
    """
    t = next(x.shape[1] for x in inputs if x is not None)
    parts = tuple(split_queries(x, size) for x in inputs)
    out = jax.lax.map(lambda part: run(*part), (jnp.arange(-(-t // size)), *parts))
    return jax.tree.map(lambda x: join_queries(x, t), out)
