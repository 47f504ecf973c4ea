"""Choosing the next token from logits: temperature, top-k, top-p, argmax at temperature 0."""

import dataclasses
import numbers

import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen.

    Attributes:
        temperature: 0 takes the most likely token; larger values flatten the distribution.
        top_k: only the k most likely tokens; None for all.
        top_p: only the most likely tokens that together reach this probability (after temperature and top_k); 1 for
            all.
        seed: seed of the run. Row i draws from a stream of its own, made from the seed and i.

    Raises:
        ValueError: naming the option, its value and what is allowed.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self):
        if not (is_real(self.temperature) and 0 <= self.temperature <= 1e6):
            raise ValueError(f"temperature={self.temperature!r}: a number from 0 to 1e6 is needed")
        if self.top_k is not None and not (is_whole(self.top_k) and self.top_k >= 1):
            raise ValueError(f"top_k={self.top_k!r}: a whole number of at least 1 is needed, or None for all tokens")
        if self.top_p is not None and not (is_real(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p={self.top_p!r}: a number above 0 and at most 1 is needed, or None for all tokens")
        if not (is_whole(self.seed) and 0 <= self.seed < 2**32):
            raise ValueError(f"seed={self.seed!r}: a whole number from 0 to 2^32 - 1 is needed")


def is_whole(value: object) -> bool:
    """Whether a value is a whole number of Python or numpy; True and False are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Whether a value is a real number of Python or numpy; True and False are not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def filtered_logits(logits: Array, temperature: Array, top_k: Array, top_p: Array) -> Array:
    """logits [B, V] / temperature, with -inf outside top-k and top-p. Ties at the border are kept.

    temperature is float32 > 0, top_k int32 (V for all), top_p float32 (1 for all), all scalars.
    """
    warm = logits.astype(jnp.float32) / temperature
    ordered = -jnp.sort(-warm, axis=-1)
    v = logits.shape[-1]
    kth = jnp.take_along_axis(ordered, jnp.broadcast_to(jnp.minimum(top_k, v) - 1, (logits.shape[0], 1)), axis=-1)
    p = jax.nn.softmax(jnp.where(ordered >= kth, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    inside = ((before < top_p) | (jnp.arange(v) == 0)) & (ordered >= kth)  # the likeliest always stays
    lowest = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where((warm >= lowest) | (top_p >= 1.0) & (warm >= kth), warm, -jnp.inf)


@jax.jit
def sample(logits: Array, temperature: Array, top_k: Array, top_p: Array, seed: Array, step: Array) -> Array:
    """Next token of each row: logits float32 [B, V] -> int32 [B]. Scalars as in `filtered_logits`; temperature 0 is
    argmax.
    """
    rows = jnp.arange(logits.shape[0])
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), step))(rows)
    filtered = filtered_logits(logits, jnp.maximum(temperature, 1e-6), top_k, top_p)
    drawn = jax.vmap(jax.random.categorical)(keys, filtered)
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)
