"""Next-token cross entropy of long rows: logits of a part of the tokens at a time, made again in the backward pass."""

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import model
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import Numerics
from dsv41_jax.training.loss import token_nats

LOGIT_BYTES = 256 << 20  # of the logits that exist at once


def summed_nats(
    config: ModelConfig,
    numerics: Numerics,
    params: dict,
    hidden: Array,
    targets: Array,
    weights: Array,
    logit_bytes: int = LOGIT_BYTES,
) -> Array:
    """Sum of the weighted cross entropies, float32 [].

    Args:
        hidden: [B, T, D] of `model.forward`. targets: int32 [B, T]. weights: float32 [B, T].
    """
    rows = (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), weights.reshape(-1))
    n = len(rows[0])
    together = max(1, logit_bytes // (4 * config.vocab_size))
    if together >= n:
        return _part(config, numerics, params, *rows)
    parts = -(-n // together)
    padded = [jnp.pad(x, [(0, parts * together - n)] + [(0, 0)] * (x.ndim - 1)) for x in rows]

    @jax.checkpoint
    def part(total: Array, rows: tuple[Array, Array, Array]) -> tuple[Array, None]:
        return total + _part(config, numerics, params, *rows), None

    split = tuple(x.reshape(parts, together, *x.shape[1:]) for x in padded)
    return jax.lax.scan(part, jnp.zeros((), jnp.float32), split)[0]


def _part(
    config: ModelConfig, numerics: Numerics, params: dict, hidden: Array, targets: Array, weights: Array
) -> Array:
    logits = model.head(config, numerics, params, hidden[None])[0]
    return jnp.sum(token_nats(logits, targets) * weights)
