"""Loss and gradients of the cacheless forward."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from dsv41_jax import model, sharded_step, sharding
from dsv41_jax.blocks import Params
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import Numerics
from dsv41_jax.parallel import ROW_AXES
from dsv41_jax.runner import counted


def next_token_loss(logits: Array, token_ids: Array, segment_ids: Array | None) -> tuple[Array, Array]:
    """Summed cross-entropy of every next token inside a sample, and how many there are.

    Args:
        logits: float32 [B, T, V]. token_ids: int32 [B, T].
        segment_ids: int32 [B, T], or None when every row is one sample.
    """
    targets = token_ids[:, 1:]
    chosen = jnp.take_along_axis(logits[:, :-1], targets[..., None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(logits[:, :-1], axis=-1) - chosen
    counts = jnp.ones(targets.shape, bool) if segment_ids is None else segment_ids[:, 1:] == segment_ids[:, :-1]
    return jnp.sum(jnp.where(counts, nats, 0.0)), jnp.sum(counts)


def mean_loss(
    params: Params,
    token_ids: Array,
    memory: dict[str, Array],
    segment_ids: Array | None,
    config: ModelConfig,
    numerics: Numerics,
    mesh: Mesh | None = None,
) -> Array:
    """Mean next-token cross-entropy in nats. On a mesh, rows are split over the devices that share rows."""
    if mesh is None:
        total, count = _sums(config, numerics, params, token_ids, memory, segment_ids)
        return total / count
    # Experts are reached by all-gather: the rounds of the all-to-all have no gradient.
    spread = numerics.spread(sharded_step.parallel_of(mesh, dispatch="gather"))

    def local(params: Params, token_ids: Array, memory: dict[str, Array], segment_ids: Array | None) -> Array:
        memory = sharded_step.whole_rows(config, spread, memory)
        total, count = _sums(config, spread, params, token_ids, memory, segment_ids)
        return jax.lax.psum(total, ROW_AXES) / jax.lax.psum(count, ROW_AXES)

    layout, rows = sharding.layout_of(mesh), sharded_step.ROWS
    specs = (sharding.param_specs(params, layout), rows, sharded_step.memory_specs(memory, rows), rows)
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    return step(params, token_ids, memory, segment_ids)


def _sums(config, numerics, params, token_ids, memory, segment_ids) -> tuple[Array, Array]:
    hidden, _ = model.forward(config, numerics, params, token_ids, memory, segment_ids)
    return next_token_loss(model.head(config, numerics, params, hidden), token_ids, segment_ids)


_STATIC = ("config", "numerics", "mesh")
loss = functools.partial(jax.jit, static_argnames=_STATIC)(counted(mean_loss))
loss_and_grads = functools.partial(jax.jit, static_argnames=_STATIC)(counted(jax.value_and_grad(mean_loss)))
