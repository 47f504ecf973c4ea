"""Rotary position embedding: two tables made on the host, and the rotation of adjacent pairs.

A layer with a compressed stream (ratio > 0) uses `compress_rope_theta` with YaRN for everything in it; a window-only
layer (draft blocks included) uses `rope_theta` without YaRN. The tables hold the frequencies only: the angle is a
float32 product, its sine and cosine are taken where the position is known.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import Numerics


def frequencies(dim: int, theta: float) -> np.ndarray:
    """float32 [dim/2] inverse frequencies 1 / theta^(2i/dim).

    The power is taken in float64 of the float32 exponent and rounded once: other float32 `pow` routines are off by an
    ulp, which is 0.06 rad at a position of one million.
    """
    exponent = (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)).astype(np.float64)
    power = np.power(np.float64(theta), exponent).astype(np.float32)
    return (np.float32(1.0) / power).astype(np.float32)


def yarn_range(dim: int, theta: float, original_length: int, beta_fast: float, beta_slow: float) -> tuple[int, int]:
    """First and last pair of the YaRN ramp (released: 15 and 25)."""

    def pair_at(rotations: float) -> float:
        return dim * math.log(original_length / (2 * math.pi * rotations)) / (2 * math.log(theta))

    return max(math.floor(pair_at(beta_fast)), 0), min(math.ceil(pair_at(beta_slow)), dim - 1)


def yarn_frequencies(
    dim: int, theta: float, original_length: int, factor: float, beta_fast: float, beta_slow: float
) -> np.ndarray:
    """float32 [dim/2] frequencies with YaRN interpolation (no attention temperature)."""
    base = frequencies(dim, theta)
    low, high = yarn_range(dim, theta, original_length, beta_fast, beta_slow)
    i = np.arange(dim // 2, dtype=np.float32)
    ramp = np.clip((i - np.float32(low)) / np.float32(max(high - low, 0.001)), 0, 1).astype(np.float32)
    return (base / np.float32(factor) * ramp + base * (np.float32(1) - ramp)).astype(np.float32)


@functools.lru_cache(maxsize=64)
def layer_frequencies(config: ModelConfig, compressed: bool) -> np.ndarray:
    """float32 [qk_rope_head_dim/2] of a layer: `compressed` layers have a compressed stream (ratio > 0)."""
    dim = config.qk_rope_head_dim
    if not compressed:
        return frequencies(dim, config.rope_theta)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies(dim, config.compress_rope_theta)
    return yarn_frequencies(
        dim,
        config.compress_rope_theta,
        scaling.original_max_position_embeddings,
        scaling.factor,
        scaling.beta_fast,
        scaling.beta_slow,
    )


def angles(positions: Array, inverse_frequencies: np.ndarray) -> tuple[Array, Array]:
    """cos and sin, float32 [..., dim/2], of integer positions [...]."""
    angle = positions.astype(jnp.float32)[..., None] * jnp.asarray(inverse_frequencies)
    return jnp.cos(angle), jnp.sin(angle)


def rotate_tail(x: Array, cos: Array, sin: Array, numerics: Numerics, inverse: bool = False) -> Array:
    """Rotate adjacent pairs of the last 2 * cos.shape[-1] channels of x [..., d]; one rounding.

    Args:
        x: [..., d]; cos and sin broadcast against x's leading axes.
        inverse: rotate by the negative angle.
    """
    still = x.shape[-1] - 2 * cos.shape[-1]
    if inverse:
        sin = -sin
    pad = [(0, 0)] * (cos.ndim - 1) + [(still, 0)]
    # The whole vector turns at once: the channels before the tail by the angle 0.
    cos = jnp.pad(jnp.repeat(cos, 2, axis=-1), pad, constant_values=1.0)
    sin = jnp.pad(jnp.stack([-sin, sin], axis=-1).reshape(*sin.shape[:-1], -1), pad)
    x = x.astype(jnp.float32)
    # The other one of each pair. Shifts, because a TPU turns rows of two about ten times slower.
    lead = [(0, 0)] * (x.ndim - 1)
    after, before = jnp.pad(x[..., 1:], [*lead, (0, 1)]), jnp.pad(x[..., :-1], [*lead, (1, 0)])
    partner = jnp.where(jnp.arange(x.shape[-1]) % 2 == 0, after, before)
    return numerics.round(x * cos + partner * sin)
