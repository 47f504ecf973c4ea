"""Compressor of the global stream: one latent per group of `ratio` tokens, and what is cached of it.

Ratio 1 is a projection and a norm. A larger ratio pools each channel of a group with a softmax over its tokens; the
projections of an incomplete group wait (float32) until its last token arrives.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.linear import Linear, LinearF32
from dsv41_jax.norms import RMSNorm
from dsv41_jax.numerics import Numerics
from dsv41_jax.rope import rotate_tail


class Compressor(nn.Module):
    """Latents of one KV source and the two entries cached for each.

    Parameters: wkv [head_dim, D], wgate [head_dim, D] (ratio > 1), norm [head_dim], wk [index_head_dim, head_dim],
    k_norm [index_head_dim].
    """

    ratio: int
    head_dim: int
    index_head_dim: int
    eps: float
    numerics: Numerics

    def setup(self):
        if self.ratio == 1:
            self.wkv = Linear(self.head_dim, self.numerics, quantized=False)
        else:
            self.wkv = LinearF32(self.head_dim)
            self.wgate = LinearF32(self.head_dim)
        self.norm = RMSNorm(self.eps, self.numerics)
        self.wk = Linear(self.index_head_dim, self.numerics, quantized=False)
        self.k_norm = RMSNorm(self.eps, self.numerics)

    def project(self, y: Array) -> tuple[Array, Array]:
        """Values and gates of tokens, ratio > 1: y [..., D] -> two float32 [..., head_dim]."""
        return self.wkv(y), self.wgate(y)

    def pooled(self, values: Array, gates: Array) -> Array:
        """Latents of complete groups before their norm: two [..., ratio, head_dim] float32 -> [..., head_dim]."""
        return self.numerics.round(jnp.sum(jax.nn.softmax(gates, axis=-2) * values, axis=-2))

    def unpooled(self, y: Array) -> Array:
        """Ratio 1: y [..., D] -> latents before their norm [..., head_dim]."""
        return self.wkv(y)

    def normed(self, raw: Array) -> Array:
        """The norm of latents [..., head_dim]."""
        return self.norm(raw)

    def pool(self, values: Array, gates: Array) -> Array:
        """Latents of complete groups: two [..., ratio, head_dim] float32 -> [..., head_dim]."""
        return self.normed(self.pooled(values, gates))

    def latents(self, y: Array) -> Array:
        """Ratio 1: y [..., D] -> [..., head_dim]."""
        return self.normed(self.unpooled(y))

    def index_projection(self, latent: Array) -> Array:
        """Index key of latents [..., head_dim] before its norm: [..., index_head_dim]."""
        return self.wk(latent)

    def entries(self, latent: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        """What is cached of latents [..., head_dim], at the angles of their group's first position.

        Returns main KV [..., head_dim] and index key [..., index_head_dim], rotated; whoever stores them quantises
        (`quant.q4_main`, `quant.q4_index`).
        """
        return self.main_kv(latent, cos, sin), self.index_key(latent, cos, sin)

    def main_kv(self, latent: Array, cos: Array, sin: Array) -> Array:
        """The first of `entries`."""
        return rotate_tail(latent, cos, sin, self.numerics)

    def index_key(self, latent: Array, cos: Array, sin: Array) -> Array:
        """The second of `entries`."""
        return rotate_tail(self.k_norm(self.index_projection(latent)), cos, sin, self.numerics)
