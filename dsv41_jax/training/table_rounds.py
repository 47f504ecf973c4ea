"""Engram rows of a training step on a mesh: fetched from the devices that hold them, and their gradients brought there,
in rounds of a fixed size (see `expert_rounds`), however uneven the rows are asked for.

Inside `shard_map`. Where devices along `context` have the same tokens, the first of them speaks for all.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.expert_rounds import Rounds, trained_capacity
from dsv41_jax.parallel import CONTEXT, Parallel


def _rounds(parallel: Parallel, share: int, ids: Array, width: int) -> Rounds:
    capacity = trained_capacity(ids.size, parallel.devices, width)
    return Rounds(parallel, share, ids[:, None], capacity)


def fetch_rows(parallel: Parallel, table: Array, ids: Array) -> Array:
    """Rows of a table that is split over all devices.

    Args:
        table: this device's rows [share, width]. ids: int32 [...] of this device's tokens, counted in the whole table.

    Returns:
        [..., width].
    """
    flat, (share, width) = ids.reshape(-1), table.shape
    rounds = _rounds(parallel, share, flat, width)
    nothing = jnp.zeros((len(flat), 1), jnp.float32)

    def one_round(number: Array, rows: Array) -> Array:
        trips = rounds.trips(number)
        _, own, _ = rounds.send(trips, nothing, nothing)
        found = table.at[own[:, 0]].get(mode="fill", fill_value=0)
        found = rounds.send_back(rounds.arriving(trips), found)
        return rows + found.at[trips.slot].get(mode="fill", fill_value=0)

    rows = jax.lax.fori_loop(0, rounds.needed(), one_round, jnp.zeros((len(flat), width), table.dtype))
    return rows.reshape(*ids.shape, width)


def visit_rows(
    parallel: Parallel, share: int, ids: Array, gradients: Array, body: Callable[[Any, Array, Array], Any], carry: Any
) -> Any:
    """Bring row gradients to the devices of their rows: carry = body(carry, own row ids [m], gradients [m, width]),
    round after round. An id of `share` stands for no row.

    Args:
        share: rows of a device. ids: int32 [n], counted in the whole table. gradients: [n, width].
    """
    speaks = jax.lax.axis_index(CONTEXT) == 0
    ids = jnp.where(speaks, ids, share * parallel.devices)  # of no device
    rounds = _rounds(parallel, share, ids, gradients.shape[1])
    one = jnp.ones((len(ids), 1), jnp.float32)

    def one_round(number: Array, carry: Any) -> Any:
        trips = rounds.trips(number)
        rows, own, _ = rounds.send(trips, gradients, one)
        return body(carry, own[:, 0], rows)

    return jax.lax.fori_loop(0, rounds.needed(), one_round, carry)
