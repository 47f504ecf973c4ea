"""The rounds in which (token, slot) pairs travel to the devices of their experts and back, forward and in training
backward: any load, nothing dropped.

A round has a fixed capacity for each pair of devices. Pairs for one device are numbered; a round takes the next
`capacity` of them. Rounds go on until no device has a pair left.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax.parallel import AXES, Parallel

ROOM = 2  # capacity of a round over the mean load of a pair of devices
TRAINED_ROUND_BYTES = 512 << 20  # of the rows, as float32, that a device receives in a round of training
_LEAST_CAPACITY = 8

# rows [n, D], experts of this device int32 [n, k] (their number: none of them), weights [n, k], expected part of the
# (token, slot) pairs that are for this device (one in so many) -> outputs [n, k, D], zeros for none.
Compute = Callable[[Array, Array, Array, int], Array]
# rows, experts, weights, float32 matrices of this device (any pytree), expected part -> sum over slots float32 [n, D],
# how many of a row's pairs were computed int32 [n]. Differentiable in rows, weights and matrices.
TrainedCompute = Callable[[Array, Array, Array, Any, int], tuple[Array, Array]]


def round_capacity(pairs: int, devices: int) -> int:
    """(token, slot) pairs that one device sends to another in a round, when it has so many in all."""
    return max(_LEAST_CAPACITY, -(-ROOM * pairs // devices // _LEAST_CAPACITY) * _LEAST_CAPACITY)


def trained_capacity(pairs: int, devices: int, width: int) -> int:
    """As `round_capacity`, with the rows of a round inside `TRAINED_ROUND_BYTES`."""
    most = TRAINED_ROUND_BYTES // (4 * width * devices) // _LEAST_CAPACITY * _LEAST_CAPACITY
    return min(round_capacity(pairs, devices), max(_LEAST_CAPACITY, most))


class Trips(NamedTuple):
    """Which pairs travel in a round.

    Attributes:
        slot: int32 [pairs], place of a pair among the buckets [devices * capacity]; past them when not in this round.
        pair: int32 [devices * capacity], the pair of a place. real: bool, whether there is one.
        sizes: int32 [devices], real places of each bucket.
    """

    slot: Array
    pair: Array
    real: Array
    sizes: Array


class Rounds:
    """The pairs of this device, by the device of their expert."""

    def __init__(self, parallel: Parallel, share: int, experts: Array, capacity: int):
        self.parallel, self.share, self.capacity = parallel, share, capacity
        self.k = experts.shape[1]
        self.flat = experts.reshape(-1)
        pairs, devices = self.flat.shape[0], parallel.devices
        self.owner = self.flat // share
        self.count = jnp.zeros(devices, jnp.int32).at[self.owner].add(1)
        order = jnp.argsort(self.owner, stable=True)
        before = jnp.cumsum(self.count) - self.count
        rank = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
        self.rank = rank - before[self.owner]  # among the pairs for the same device

    def needed(self) -> Array:
        """Rounds until nothing is left on any device: int32 []."""
        return jax.lax.pmax(jnp.max(-(-self.count // self.capacity)), AXES)

    def trips(self, number: Array | int) -> Trips:
        pairs, places = self.flat.shape[0], self.parallel.devices * self.capacity
        place = self.rank - number * self.capacity
        now = (place >= 0) & (place < self.capacity)
        slot = jnp.where(now, self.owner * self.capacity + place, places)
        pair = jnp.full(places, pairs, jnp.int32).at[slot].set(jnp.arange(pairs), mode="drop")
        sizes = jnp.clip(self.count - number * self.capacity, 0, self.capacity)
        return Trips(slot, jnp.minimum(pair, pairs - 1), pair < pairs, sizes)

    def send(self, trips: Trips, rows: Array, weights: Array) -> tuple[Array, Array, Array]:
        """Rows [n, D] and weights [n, k] of the round's pairs, to the devices of their experts.

        Returns:
            of the pairs received: rows [places, D], experts of this device int32 [places, 1], weights [places, 1].
        """
        expert = jnp.where(trips.real, self.flat[trips.pair] % self.share, self.share)
        weight = jnp.where(trips.real, weights.reshape(-1)[trips.pair], 0.0)
        x = self.send_rows(trips, rows)
        expert = _exchange(self.parallel, expert, self.share, trips.sizes)  # the fill stands for no pair
        weight = _exchange(self.parallel, weight, 0, trips.sizes)
        return x, expert[:, None], weight[:, None]

    def send_rows(self, trips: Trips, rows: Array) -> Array:
        """Rows [n, D] of the round's pairs -> [places, D] of the pairs received."""
        sent = jnp.where(trips.real[:, None], rows[trips.pair // self.k], jnp.zeros((), rows.dtype))
        return _exchange(self.parallel, sent, 0, trips.sizes)

    def arriving(self, trips: Trips) -> Array:
        """How many of each bucket received are real, where the exchange asks: int32 [devices]."""
        if self.parallel.dispatch == "ragged":
            return jax.lax.all_to_all(trips.sizes, AXES, 0, 0, tiled=True)
        return trips.sizes

    def send_back(self, sizes: Array, x: Array) -> Array:
        """Something of the pairs received [places, ...], to where the pairs came from."""
        return _exchange(self.parallel, x, 0, sizes)

    def sum_slots(self, trips: Trips, x: Array, dtype: jnp.dtype) -> Array:
        """Of pairs' x [places, ...], the sum over each token's pairs in this round: [n, ...]."""
        slots = trips.slot.reshape(-1, self.k)
        return sum(x.at[slots[:, i]].get(mode="fill", fill_value=0).astype(dtype) for i in range(self.k))


def in_rounds(parallel: Parallel, share: int, rows: Array, experts: Array, weights: Array, compute: Compute) -> Array:
    """Outputs [n, k, D] of the chosen experts of rows [n, D]."""
    n, k = experts.shape
    rounds = Rounds(parallel, share, experts, round_capacity(n * k, parallel.devices))

    def one_round(number: Array | int, out: Array) -> Array:
        trips = rounds.trips(number)
        x, expert, weight = rounds.send(trips, rows, weights)
        y = compute(x, expert, weight, ROOM)[:, 0]
        y = rounds.send_back(rounds.arriving(trips), y)
        now = trips.slot < parallel.devices * rounds.capacity
        return jnp.where(now[:, None], y.at[trips.slot].get(mode="fill", fill_value=0), out)

    out = one_round(0, jnp.zeros((n * k, rows.shape[1]), rows.dtype))
    needed = rounds.needed()
    _, out = jax.lax.while_loop(
        lambda state: state[0] < needed,
        lambda state: (state[0] + 1, one_round(*state)),
        (jnp.ones((), jnp.int32), out),
    )
    return out.reshape(n, k, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def trained_rounds(
    parallel: Parallel,
    share: int,
    compute: TrainedCompute,
    rows: Array,
    experts: Array,
    weights: Array,
    matrices: Any,
) -> tuple[Array, Array]:
    """See `expert_parallel.trained_sum`.

    `compute` must be hashable. The gradient keeps the arguments only: each round travels and is computed again, and
    the gradients of the matrices add up over the rounds. Beside what is proportional to the tokens and the matrices,
    memory is that of one round.
    """
    rounds = _trained(parallel, share, rows, experts)

    def one_round(number: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        trips = rounds.trips(number)
        x, expert, weight = rounds.send(trips, rows, weights)
        y, computed = compute(x, expert, weight, matrices, ROOM)
        back = functools.partial(rounds.send_back, rounds.arriving(trips))
        y = rounds.sum_slots(trips, back(y.astype(rows.dtype)), jnp.float32)  # one expert's output: exact
        return state[0] + y, state[1] + rounds.sum_slots(trips, back(computed), jnp.int32)

    state = jnp.zeros(rows.shape, jnp.float32), jnp.zeros(rows.shape[0], jnp.int32)
    return jax.lax.fori_loop(0, rounds.needed(), one_round, state)


def _trained(parallel: Parallel, share: int, rows: Array, experts: Array) -> Rounds:
    capacity = trained_capacity(experts.size, parallel.devices, rows.shape[1])
    return Rounds(parallel, share, experts, capacity)


def _rounds_forward(parallel, share, compute, rows, experts, weights, matrices):
    return trained_rounds(parallel, share, compute, rows, experts, weights, matrices), (
        rows,
        experts,
        weights,
        matrices,
    )


def _rounds_backward(parallel: Parallel, share: int, compute: TrainedCompute, saved: tuple, cotangents: tuple):
    rows, experts, weights, matrices = saved
    rounds = _trained(parallel, share, rows, experts)
    d_total = cotangents[0].astype(rows.dtype)

    def one_round(number: Array, state: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
        d_rows, d_weights, d_matrices = state
        trips = rounds.trips(number)
        x, expert, weight = rounds.send(trips, rows, weights)
        dy = rounds.send_rows(trips, d_total).astype(jnp.float32)
        _, pull = jax.vjp(
            lambda x, weight, matrices: compute(x, expert, weight, matrices, ROOM)[0], x, weight, matrices
        )
        dx, d_weight, more = pull(dy)
        back = functools.partial(rounds.send_back, rounds.arriving(trips))
        d_rows = d_rows + rounds.sum_slots(trips, back(dx), jnp.float32)
        d_weights = d_weights + back(d_weight[:, 0]).at[trips.slot].get(mode="fill", fill_value=0)
        return d_rows, d_weights, jax.tree.map(jnp.add, d_matrices, more)

    state = (
        jnp.zeros(rows.shape, jnp.float32),
        jnp.zeros(weights.size, jnp.float32),
        jax.tree.map(jnp.zeros_like, matrices),
    )
    d_rows, d_weights, d_matrices = jax.lax.fori_loop(0, rounds.needed(), one_round, state)
    no_gradient = np.zeros(experts.shape, jax.dtypes.float0)
    return d_rows.astype(rows.dtype), no_gradient, d_weights.reshape(weights.shape), d_matrices


trained_rounds.defvjp(_rounds_forward, _rounds_backward)


def _exchange(parallel: Parallel, x: Array, fill: int, sizes: Array) -> Array:
    """x [devices * capacity, ...]: bucket i goes to device i, which keeps it as bucket `me`. `sizes` int32 [devices]:
    how many of each bucket are real; `fill` stands in the others' place where they do not travel.
    """
    if parallel.dispatch == "all_to_all":
        return jax.lax.all_to_all(x, AXES, 0, 0, tiled=True)
    devices = parallel.devices
    capacity = x.shape[0] // devices
    start = jnp.arange(devices, dtype=jnp.int32) * capacity
    mine = jnp.full(devices, jax.lax.axis_index(AXES) * capacity, jnp.int32)
    arriving = jax.lax.all_to_all(sizes, AXES, 0, 0, tiled=True)
    return jax.lax.ragged_all_to_all(x, jnp.full_like(x, fill), start, sizes, mine, arriving, axis_name=AXES)
