"""Rows of (token, slot) grouped into tiles of one expert: no row is dropped, an expert without rows has no tile."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Groups(NamedTuple):
    """Where rows go.

    Attributes:
        position: int32 [n, k], the place of each (token, slot) among the tiled rows [tiles * height]; past them for
            experts of other devices.
        source: int32 [tiles * height], the token of each tiled row; n where there is none.
        expert: int32 [tiles], ascending. Tiles from `used` on repeat the last expert that has rows.
        used: int32 [1], number of tiles that have rows; they come first.
        height: rows of a tile (static).
    """

    position: Array
    source: Array
    expert: Array
    used: Array
    height: int


def group_rows(chosen: Array, n_experts: int, height: int) -> Groups:
    """Tiles of `height` rows for chosen experts int32 [n, k], 0 .. n_experts; the last is any of another device.

    The number of tiles is static: enough for any routing.
    """
    n, k = chosen.shape
    flat = chosen.reshape(-1)
    rows = n * k
    tiles = (rows + min(n_experts, rows) * (height - 1)) // height  # every expert with rows wastes at most height - 1
    count = jnp.zeros(n_experts, jnp.int32).at[flat].add(1, mode="drop")
    last_tile = jnp.cumsum(-(-count // height))
    first_tile = last_tile - -(-count // height)
    order = jnp.argsort(flat, stable=True)
    before = jnp.cumsum(count) - count  # rows of smaller experts
    rank = jnp.zeros(rows, jnp.int32).at[order].set(jnp.arange(rows, dtype=jnp.int32), unique_indices=True)
    position = jnp.where(flat < n_experts, first_tile[flat] * height + rank - before[flat], tiles * height)
    position = position.reshape(n, k).astype(jnp.int32)
    token = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[:, None], (n, k))
    source = jnp.full(tiles * height, n, jnp.int32).at[position].set(token, mode="drop")
    used = last_tile[-1:].astype(jnp.int32)
    tile = jnp.minimum(jnp.arange(tiles), used - 1)
    expert = jnp.searchsorted(last_tile, tile, side="right", method="compare_all").astype(jnp.int32)
    return Groups(position, source, expert, used, height)


def take_rows(x: Array, source: Array, height: int) -> Array:
    """x [n, ...] -> [tiles, height, ...] by `Groups.source`; zeros where there is no token."""
    padded = jnp.concatenate([x, jnp.zeros((1, *x.shape[1:]), x.dtype)])
    return padded[source].reshape(-1, height, *x.shape[1:])


def place_weights(weights: Array, groups: Groups) -> Array:
    """Routing weights float32 [n, k] -> [tiles, height, 1]; zeros where there is no token."""
    slots = jnp.zeros(groups.source.shape, jnp.float32)
    return slots.at[groups.position].set(weights, mode="drop").reshape(-1, groups.height, 1)
