"""Losses: next token and the drafter's. The indexer's own is in `index_loss`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array


def token_nats(logits: Array, targets: Array) -> Array:
    """Cross entropy of each token, float32 [...], from logits float32 [..., V] and target ids int [...]."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def weighted_mean(values: Array, weights: Array, total: Callable[[Array], Array] = lambda x: x) -> Array:
    """Mean of values [...] by weights [...], of the devices that `total` sums over; 0 where no weight is."""
    return total(jnp.sum(values * weights)) / jnp.maximum(total(jnp.sum(weights)), 1e-9)


def draft_loss(
    draft_logits: Array,
    target_logits: Array,
    tokens: Array,
    confidence: Array,
    weights: Array,
    total: Callable[[Array], Array] = lambda x: x,
) -> tuple[Array, dict[str, Array]]:
    """DSpark's loss on anchors: 0.1 CE + 0.9 L1 on probabilities + 1.0 BCE of the confidence (report 3.8).

    Args:
        draft_logits: float32 [..., block, V], Markov bias of the true previous token included.
        target_logits: float32 [..., block, V] of the frozen target at the same positions.
        tokens: int32 [..., block], the true next tokens.
        confidence: raw float32 [..., block].
        weights: float32 [..., block], 0 where the position lies outside its sample.
        total: adds up what devices with other rows have.

    Returns:
        the loss, and its three parts plus `agree`, the mean chance that a draft is accepted. Position k
        counts exp(-(k-1)/block).
    """
    size = tokens.shape[-1]
    decay = jnp.exp(-jnp.arange(size) / size)
    p = jax.nn.softmax(draft_logits, axis=-1)
    q = jax.lax.stop_gradient(jax.nn.softmax(target_logits, axis=-1))
    distance = jnp.sum(jnp.abs(p - q), axis=-1)
    accept = jax.lax.stop_gradient(1.0 - 0.5 * distance)
    bce = -(accept * jax.nn.log_sigmoid(confidence) + (1.0 - accept) * jax.nn.log_sigmoid(-confidence))
    weighed = weights * decay
    parts = {
        "ce": weighted_mean(token_nats(draft_logits, tokens), weighed, total),
        "l1": weighted_mean(distance, weighed, total),
        "confidence": weighted_mean(bce, weights, total),
        "agree": weighted_mean(accept, weights, total),
    }
    return 0.1 * parts["ce"] + 0.9 * parts["l1"] + parts["confidence"], parts
