"""How tokens reach experts that other devices hold, and their outputs come back. Nothing is dropped, however unevenly
experts are chosen.

    gather      every device sees all tokens, computes its experts' part of them, and the parts are summed where the
                tokens live (all-gather, reduce-scatter): for few tokens. Differentiable
    all_to_all  each (token, slot) travels to the device of its expert and back, in rounds of a fixed capacity for each
                pair of devices. The first round takes about twice the mean load; more rounds follow until nothing is
                left anywhere, none where the load is even: for many tokens
    ragged      the same rounds, in which only real rows travel; TPUs and GPUs have it (not TPU v5e, not CPUs)

All are differentiable by `trained_sum`, whose rounds run again backward (`expert_rounds`).

Device number i of the flattened mesh (data, context, tensor) holds experts i * share .. (i + 1) * share - 1, where
`share` is the number of experts over devices, rounded up: experts past the last one pad the last shares, and no token
chooses them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.expert_rounds import Compute, TrainedCompute, in_rounds, trained_rounds
from dsv41_jax.parallel import AXES, CONTEXT, ROW_AXES, Parallel

DISPATCHES = ("gather", "all_to_all", "ragged")


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
    return _sum(in_rounds(parallel, share, rows, experts, weights, compute))


def _sum(outputs: Array) -> Array:
    """[n, k, D] -> float32 [n, D]."""
    return sum(outputs[:, slot].astype(jnp.float32) for slot in range(outputs.shape[1]))


def trained_sum(
    parallel: Parallel,
    n_experts: int,
    rows: Array,
    experts: Array,
    weights: Array,
    matrices: Any,
    compute: TrainedCompute,
) -> tuple[Array, Array]:
    """As `routed_sum`, with gradients to rows, weights and matrices whatever the dispatch and the load.

    Where a token's pairs for one device take several rounds, its sum over experts is in the order of the rounds.

    Returns:
        float32 [n, D], and how many of a token's (token, slot) pairs were computed: int32 [n].
    """
    if parallel.devices == 1:
        return compute(rows, experts, weights, matrices, 1)
    share = expert_share(n_experts, parallel.devices)
    if parallel.dispatch != "gather":
        return trained_rounds(parallel, share, compute, rows, experts, weights, matrices)
    rows, experts, weights = _all_tokens(parallel, rows, experts, weights)
    part, computed = compute(rows, _own(experts, share), weights, matrices, parallel.devices)
    return _to_owners(parallel, part), _to_owners(parallel, computed)


def _gathered(parallel: Parallel, share: int, rows: Array, experts: Array, weights: Array, compute: Compute) -> Array:
    rows, experts, weights = _all_tokens(parallel, rows, experts, weights)
    # Foreign slots are zeros between a row's own ones: sorting is not needed, and the sum's order stays.
    return _to_owners(parallel, _sum(compute(rows, _own(experts, share), weights, parallel.devices)))


def _all_tokens(parallel: Parallel, *arrays: Array) -> tuple[Array, ...]:
    """The tokens of all devices: [n, ...] -> [all, ...]."""
    return tuple(jax.lax.all_gather(x, parallel.token_axes, axis=0, tiled=True) for x in arrays)


def _own(experts: Array, share: int) -> Array:
    """Numbers of experts among this device's; `share` for another's."""
    own = experts - jax.lax.axis_index(AXES) * share
    return jnp.where((own >= 0) & (own < share), own, share)


def _to_owners(parallel: Parallel, part: Array) -> Array:
    """The devices' parts of all tokens, summed where the tokens live: [all, ...] -> [n, ...]."""
    axes = parallel.token_axes
    if parallel.context > 1 and axes == ROW_AXES:  # the same tokens along `context`, other experts
        part = jax.lax.psum(part, CONTEXT)
    return jax.lax.psum_scatter(part, axes, scatter_dimension=0, tiled=True)
