"""Steps that are left out: their loss or gradient norm is not finite, or far above what it was lately."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.training.optimizer_settings import OptimizerSettings


@flax.struct.dataclass
class SpikeState:
    """Running means over the steps taken: mean and variance of the loss, mean gradient norm (float32). Counts (int32):
    taken since the means were begun, skipped in all, and in a row.
    """

    mean: Array
    variance: Array
    norm: Array
    taken: Array
    skipped: Array
    in_a_row: Array


def new_spike_state() -> SpikeState:
    """Before the first step."""
    number, count = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    return SpikeState(number, number, number, count, count, count)


def judge(state: SpikeState, loss: Array, norm: Array, settings: OptimizerSettings) -> tuple[Array, SpikeState]:
    """Whether to take a step (bool), and the state after it.

    Nothing finite is left out while the means are younger than `spike_window` steps. After `spike_limit` steps left out
    in a row the next finite one is taken and the means begin anew: the loss has moved for good.
    """
    if not settings.skip_spikes:
        return jnp.asarray(True), state
    loss, norm = loss.astype(jnp.float32), norm.astype(jnp.float32)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    high = loss > state.mean + settings.spike_deviations * jnp.sqrt(state.variance)
    high |= norm > settings.spike_norm_ratio * state.norm
    known = state.taken >= settings.spike_window
    again = state.in_a_row >= settings.spike_limit
    taken = finite & (~known | ~high | again)

    count = jnp.where(again, 0, state.taken)
    weight = 1 / (1 + jnp.minimum(count, settings.spike_window - 1).astype(jnp.float32))  # a plain mean at first
    above = loss - state.mean
    after = SpikeState(
        mean=state.mean + weight * above,
        variance=jnp.where(count == 0, 0.0, (1 - weight) * (state.variance + weight * above * above)),
        norm=state.norm + weight * (norm - state.norm),
        taken=count + 1,
        skipped=state.skipped,
        in_a_row=jnp.zeros_like(state.in_a_row),
    )
    left_out = state.replace(skipped=state.skipped + 1, in_a_row=state.in_a_row + 1)
    return taken, keep(taken, after, left_out)


def keep(taken: Array, after: Any, before: Any) -> Any:
    """The tree after the step if it is taken, else the one before; what is not finite on the other side is not seen."""
    return jax.tree.map(lambda a, b: jnp.where(taken, a, b), after, before)
