"""Loss and gradients of the cacheless forward."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import model
from dsv41_jax.blocks import Params
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import Numerics
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
) -> Array:
    """Mean next-token cross-entropy in nats."""
    hidden, _ = model.forward(config, numerics, params, token_ids, memory, segment_ids)
    total, count = next_token_loss(model.head(config, numerics, params, hidden), token_ids, segment_ids)
    return total / count


loss = functools.partial(jax.jit, static_argnames=("config", "numerics"))(counted(mean_loss))
loss_and_grads = functools.partial(jax.jit, static_argnames=("config", "numerics"))(
    counted(jax.value_and_grad(mean_loss))
)
