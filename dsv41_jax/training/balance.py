"""Keeping experts evenly loaded: the bias rule of each modality (the loss term is `router_notes.sequence_balance`)."""

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.router_notes import IMAGE, TEXT, TokenFacts

BIAS_SPEED = 0.001  # of the report, for a long run; a short one must balance sooner


def token_facts(segment_ids: Array, weights: Array) -> TokenFacts:
    """The facts of a packed batch: a segment [B, T] without any token that the loss weighs is padding."""
    length = segment_ids.shape[1]
    trained = jax.vmap(lambda weight, segment: jax.ops.segment_sum(weight, segment, length)[segment])(
        weights, segment_ids
    )
    return TokenFacts(samples=segment_ids, weights=(trained > 0).astype(jnp.float32))


def balanced_bias(gate: dict[str, Array], loads: Array, speed: float = BIAS_SPEED) -> dict[str, Array]:
    """Router parameters after a step: a bias goes up where an expert had less than the mean load of its modality, down
    where it had more. A modality without tokens keeps its bias.

    Args:
        gate: {"bias", "bias_vl" float32 [layers, E], ...}. loads: float32 [layers, 2, E], see `RouterNotes`.
    """
    change = speed * jnp.sign(jnp.mean(loads, axis=-1, keepdims=True) - loads)
    return {**gate, "bias": gate["bias"] + change[..., TEXT, :], "bias_vl": gate["bias_vl"] + change[..., IMAGE, :]}


def load_peaks(loads: Array) -> Array:
    """Largest over mean load of all tokens, float32 [layers]: 1 when the load is even."""
    both = jnp.sum(loads, axis=-2)
    return jnp.max(both, axis=-1) / jnp.maximum(jnp.mean(both, axis=-1), 1e-9)
