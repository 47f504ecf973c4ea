"""CSA2 attention: a causal window of raw positions and selected entries of a shared compressed stream, under one
softmax.

One latent KV vector per position serves all heads and is both key and value. A learned sink per head enters the
denominator only.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from dsv41_jax.linear import Linear, stored_leaf, weight_matrix
from dsv41_jax.norms import RMSNorm
from dsv41_jax.numerics import Numerics, einsum_f32
from dsv41_jax.rope import rotate_tail
from pallas_kernels import quantized_linear
from pallas_kernels.sparse_attention import attend_values as attend


class Attention(nn.Module):
    """The projections of an attention layer.

    Parameters: wq_a [q_lora, D], q_norm [q_lora], wq_b [H * d, q_lora], wkv [d, D], kv_norm [d], attn_sink [H], wo_a [G
    * o_lora, H * d / G], wo_b [D, G * o_lora]. Queries are normed in the low rank only, never per head.
    """

    hidden: int
    heads: int
    head_dim: int
    q_lora: int
    o_lora: int
    o_groups: int
    eps: float
    numerics: Numerics

    def setup(self):
        self.wq_a = Linear(self.q_lora, self.numerics)
        self.q_norm = RMSNorm(self.eps, self.numerics)
        parallel = self.numerics.parallel
        self.wq_b = Linear(parallel.share(self.heads * self.head_dim), self.numerics)
        self.wkv = Linear(self.head_dim, self.numerics)
        self.kv_norm = RMSNorm(self.eps, self.numerics)
        self.attn_sink = self.param("attn_sink", nn.initializers.zeros, (self.heads,))
        self.wo_a = GroupedLinear(self.o_groups // parallel.tensor, self.o_lora, self.numerics)
        self.wo_b = Linear(parallel.share(self.hidden), self.numerics)

    def queries(self, y: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        """y [B, t, D], angles [B, t, rope/2] -> low-rank qr [B, t, q_lora] and rotated q [B, t, H, d]."""
        qr = self.q_norm(self.wq_a(y))
        q = self.numerics.parallel.by_columns(self.wq_b, qr, self.heads * self.head_dim)
        q = q.reshape(*q.shape[:-1], self.heads, self.head_dim)
        return qr, rotate_tail(q, cos[..., None, :], sin[..., None, :], self.numerics)

    def window_rows(self, y: Array, cos: Array, sin: Array) -> Array:
        """Window KV of tokens [B, t, d]: normed and rotated; whoever keeps it quantises (`quant.q8`)."""
        return rotate_tail(self.kv_norm(self.window_projection(y)), cos, sin, self.numerics)

    def window_projection(self, y: Array) -> Array:
        """y [B, t, D] -> window KV before its norm [B, t, d]."""
        return self.wkv(y)

    def attend(self, q: Array, window_kv: Array, window_mask: Array, selected_kv, selected_mask) -> Array:
        """See `attend`."""
        return attend(q, window_kv, window_mask, selected_kv, selected_mask, self.attn_sink, self.numerics)

    def output(self, o: Array, cos: Array, sin: Array) -> Array:
        """o [B, t, H, d] -> [B, t, D]: rotated back, grouped low-rank map, output projection."""
        o = rotate_tail(o, cos[..., None, :], sin[..., None, :], self.numerics, inverse=True)
        o = o.reshape(*o.shape[:-2], self.heads * self.head_dim)
        parallel = self.numerics.parallel
        low_rank = self.wo_a(parallel.rows_to_columns(o))  # a device's groups, of the rows of its tensor group
        return parallel.from_columns(self.wo_b, low_rank, self.hidden)


class GroupedLinear(nn.Module):
    """Block-diagonal map: group g of the input times rows g * features .. of the weight. The input is not quantised."""

    groups: int
    features: int
    numerics: Numerics

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[..., G * k] -> [..., G * features]."""
        k = x.shape[-1] // self.groups
        leaf = stored_leaf(self, (self.groups * self.features, k))
        if self.numerics.kernels and "scale" in leaf:
            layer = leaf.pop("layer", None)
            implementation = self.numerics.implementation
            return quantized_linear.grouped_linear(x, leaf, layer, groups=self.groups, implementation=implementation)
        matrix = weight_matrix(leaf, self.numerics, "fp8").reshape(self.groups, self.features, k)
        grouped = x.reshape(-1, self.groups, k)
        rows = jnp.concatenate([grouped, grouped]) if grouped.shape[0] == 1 else grouped  # see numerics.project_rows
        y = einsum_f32("tgk,grk->tgr", rows, matrix)[: grouped.shape[0]]
        return self.numerics.round(y).reshape(*x.shape[:-1], self.groups * self.features)
