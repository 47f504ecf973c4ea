"""How tokens reach experts that other devices hold, and their outputs come back. Nothing is dropped, however unevenly
experts are chosen.

    gather      every device sees all tokens, computes its experts' part of them, and the parts are summed where the
                tokens live (all-gather, reduce-scatter): for few tokens. Differentiable
    all_to_all  each (token, slot) travels to the device of its expert and back, in rounds of a fixed capacity for each
                pair of devices. The first round takes about twice the mean load; more rounds follow until nothing is
                left anywhere, none where the load is even: for many tokens
    ragged      the same rounds, in which only real rows travel; TPUs and GPUs have it (not TPU v5e, not CPUs)

Device number i of the flattened mesh (data, context, tensor) holds experts i * share .. (i + 1) * share - 1, where
`share` is the number of experts over devices, rounded up: experts past the last one pad the last shares, and no token
chooses them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.parallel import AXES, CONTEXT, ROW_AXES, Parallel

DISPATCHES = ("gather", "all_to_all", "ragged")
ROOM = 2  # capacity of a round over the mean load of a pair of devices
_LEAST_CAPACITY = 8

# rows [n, D], experts of this device int32 [n, k] (their number: none of them), weights [n, k], expected part of the
# (token, slot) pairs that are for this device (one in so many) -> outputs [n, k, D], zeros for none.
Compute = Callable[[Array, Array, Array, int], Array]


def check_dispatch(dispatch: str | None, platform: str, device_kind: str) -> None:
    """Refuse a dispatch that devices of a kind do not have: ValueError saying which they have."""
    if dispatch is None:
        return
    if dispatch not in DISPATCHES:
        raise ValueError(f"dispatch={dispatch!r} is unknown; choose one of {', '.join(DISPATCHES)}")
    if dispatch == "ragged" and (platform == "cpu" or "v5 lite" in device_kind or "v5e" in device_kind):
        raise ValueError(
            f'dispatch="ragged": {device_kind} has no ragged all-to-all; use "all_to_all", or leave it out'
        )


def expert_share(n_experts: int, devices: int) -> int:
    """Experts of a device, padding included."""
    return -(-n_experts // devices)


def routed_sum(
    parallel: Parallel, n_experts: int, rows: Array, experts: Array, weights: Array, compute: Compute
) -> Array:
    """Sum of the chosen experts' outputs, in ascending expert order: float32 [n, D].

    Args:
        rows: [n, D] of this device. experts: int32 [n, k], ascending. weights: float32 [n, k].
        compute: this device's experts.
    """
    if parallel.devices == 1:
        return _sum(compute(rows, experts, weights, 1))
    share = expert_share(n_experts, parallel.devices)
    if parallel.dispatch == "gather":
        return _gathered(parallel, share, rows, experts, weights, compute)
    return _sum(_in_rounds(parallel, share, rows, experts, weights, compute))


def _sum(outputs: Array) -> Array:
    """[n, k, D] -> float32 [n, D]."""
    return sum(outputs[:, slot].astype(jnp.float32) for slot in range(outputs.shape[1]))


def _gathered(parallel: Parallel, share: int, rows: Array, experts: Array, weights: Array, compute: Compute) -> Array:
    axes = parallel.token_axes
    rows, experts, weights = (jax.lax.all_gather(x, axes, axis=0, tiled=True) for x in (rows, experts, weights))
    own = experts - jax.lax.axis_index(AXES) * share
    own = jnp.where((own >= 0) & (own < share), own, share)
    # Foreign slots are zeros between a row's own ones: sorting is not needed, and the sum's order stays.
    part = _sum(compute(rows, own, weights, parallel.devices))
    if parallel.context > 1 and axes == ROW_AXES:  # the same tokens along `context`, other experts
        part = jax.lax.psum(part, CONTEXT)
    return jax.lax.psum_scatter(part, axes, scatter_dimension=0, tiled=True)


def round_capacity(pairs: int, devices: int) -> int:
    """(token, slot) pairs that one device sends to another in a round, when it has so many in all."""
    return max(_LEAST_CAPACITY, -(-ROOM * pairs // devices // _LEAST_CAPACITY) * _LEAST_CAPACITY)


def _in_rounds(parallel: Parallel, share: int, rows: Array, experts: Array, weights: Array, compute: Compute) -> Array:
    """[n, k, D]."""
    (n, k), devices = experts.shape, parallel.devices
    pairs, capacity = n * k, round_capacity(n * k, devices)
    flat = experts.reshape(-1)
    owner = flat // share
    count = jnp.zeros(devices, jnp.int32).at[owner].add(1)
    order = jnp.argsort(owner, stable=True)
    before = jnp.cumsum(count) - count
    rank = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    rank = rank - before[owner]  # among the pairs for the same device

    def one_round(number: Array | int, out: Array) -> Array:
        place = rank - number * capacity
        now = (place >= 0) & (place < capacity)
        slot = jnp.where(now, owner * capacity + place, devices * capacity)
        pair = jnp.full(devices * capacity, pairs, jnp.int32).at[slot].set(jnp.arange(pairs), mode="drop")
        real = pair < pairs
        pair = jnp.minimum(pair, pairs - 1)
        sent = (
            jnp.where(real[:, None], rows[pair // k], jnp.zeros((), rows.dtype)),
            jnp.where(real, flat[pair] % share, share),
            jnp.where(real, weights.reshape(-1)[pair], 0.0),
        )
        sizes = jnp.clip(count - number * capacity, 0, capacity)
        fills = (0, share, 0)  # stand for no pair
        x, expert, weight = (_exchange(parallel, *part, sizes) for part in zip(sent, fills, strict=True))
        y = compute(x, expert[:, None], weight[:, None], ROOM)[:, 0]
        if parallel.dispatch == "ragged":
            sizes = jax.lax.all_to_all(sizes, AXES, 0, 0, tiled=True)
        y = _exchange(parallel, y, 0, sizes)
        return jnp.where(now[:, None], y.at[slot].get(mode="fill", fill_value=0), out)

    out = one_round(0, jnp.zeros((pairs, rows.shape[1]), rows.dtype))
    rounds = jax.lax.pmax(jnp.max(-(-count // capacity)), AXES)
    _, out = jax.lax.while_loop(
        lambda state: state[0] < rounds,
        lambda state: (state[0] + 1, one_round(*state)),
        (jnp.ones((), jnp.int32), out),
    )
    return out.reshape(n, k, -1)


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
