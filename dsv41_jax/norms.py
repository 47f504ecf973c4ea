"""RMSNorm: float32 statistics over the last axis, one rounding."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.numerics import Numerics, row_sum


def rms_scale(x: Array, eps: float) -> Array:
    """rsqrt(mean(x^2) + eps) over the last axis of float32 x, kept as an axis of one."""
    mean = row_sum(jnp.square(x))[..., None] / x.shape[-1]
    return jax.lax.rsqrt(mean + jnp.float32(eps))


class RMSNorm(nn.Module):
    """x [..., D] -> [..., D] in the activation dtype. Parameter `weight` [D]."""

    eps: float
    numerics: Numerics

    @nn.compact
    def __call__(self, x: Array) -> Array:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],))
        x = x.astype(jnp.float32)
        return self.numerics.round(x * rms_scale(x, self.eps) * weight.astype(jnp.float32))
