"""Lightning indexer: which entries of the compressed stream a query attends to.

Scores are rounded to the activation dtype in three places (per-head dot, weighted head, head sum), as the release does:
they decide ties. Everywhere the lowest index wins a tie.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from dsv41_jax.linear import Linear
from dsv41_jax.numerics import Numerics, einsum_f32
from dsv41_jax.rope import rotate_tail


class Indexer(nn.Module):
    """Index queries and head weights. Parameters: wq_b [heads * dim, q_lora_rank], weights_proj [heads, D]."""

    heads: int
    dim: int
    numerics: Numerics

    def setup(self):
        self.wq_b = Linear(self.heads * self.dim, self.numerics)
        self.weights_proj = Linear(self.heads, self.numerics, quantized=False)

    def __call__(self, qr: Array, y: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        """qr [B, t, q_lora], y [B, t, D], angles [B, t, rope/2] -> queries [B, t, heads, dim], weights [B, t,
        heads].
        """
        q = self.wq_b(qr)
        q = q.reshape(*q.shape[:-1], self.heads, self.dim)
        q = rotate_tail(q, cos[..., None, :], sin[..., None, :], self.numerics)
        if self.numerics.quantize_activations:
            q = quant.fake_q4_index(q)
        constant = jnp.float32(
            self.dim**-0.5 * self.heads**-0.5
        )  # a float32 scalar: rounding it to bf16 first would differ
        weights = self.numerics.round(self.weights_proj(y).astype(jnp.float32) * constant)
        return q, weights


def index_scores(queries: Array, weights: Array, keys: Array, numerics: Numerics) -> Array:
    """Scores float32 [B, t, N] (rounded to the activation dtype) of keys [B, N, dim]."""
    e = numerics.round_f32(einsum_f32("bthd,bnd->bthn", queries, keys))
    e = numerics.round_f32(jax.nn.relu(e) * weights.astype(jnp.float32)[..., None])
    return numerics.round_f32(jnp.sum(e, axis=2))


def _one_zero(scores: Array) -> Array:
    """-0 becomes +0, so that the two tie: top_k ranks -0 lower. XLA would drop an addition of 0.0."""
    return jnp.where(scores == 0.0, 0.0, scores)


def select(scores: Array, allowed: Array, k: int) -> Array:
    """The k best allowed entries of each query, ascending, padded with -1 at the end.

    Args:
        scores: float32 [B, t, N]. allowed: bool [B, t, N]. k: index_topk.

    Returns:
        int32 [B, t, k].
    """
    n = scores.shape[-1]
    masked = jnp.where(allowed, _one_zero(scores), -jnp.inf)
    values, rows = jax.lax.top_k(masked, min(k, n))
    rows = jnp.sort(jnp.where(values > -jnp.inf, rows, n), axis=-1)
    rows = jnp.where(rows < n, rows, -1).astype(jnp.int32)
    return jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, k - rows.shape[-1])], constant_values=-1)


def candidate_blocks(
    scores: Array, visible: Array, newest_block: Array, entry_block: Array | None, block: int, topk: int
) -> Array:
    """The pool of the two-level selection: the best blocks of each query, as block numbers.

    Args:
        scores: float32 [B, t, N] of the candidate source. visible: bool [B, t, N].
        newest_block: int32 [B, t], the block that holds the query's newest visible entry (always kept); negative if
            there is none.
        entry_block: int32 [B, N], the block of each entry, or None when entry n is in block n // `block`.
        block: candidate_block_size. topk: candidate_topk_blocks.

    Returns:
        int32 [B, t, min(topk, blocks)] block numbers, -1 for none.
    """
    masked = jnp.where(visible, _one_zero(scores), -jnp.inf)
    b, t, n = masked.shape
    if entry_block is None:
        blocks = -(-n // block)
        padded = jnp.pad(masked, ((0, 0), (0, 0), (0, blocks * block - n)), constant_values=-jnp.inf)
        best = jnp.max(padded.reshape(b, t, blocks, block), axis=-1)
    else:
        blocks = n
        best = (
            jnp.full((b, t, blocks), -jnp.inf)
            .at[jnp.arange(b)[:, None, None], jnp.arange(t)[:, None], entry_block[:, None]]
            .max(masked)
        )
    best = jnp.where(jnp.arange(blocks) == newest_block[..., None], jnp.inf, best)
    values, numbers = jax.lax.top_k(best, min(topk, blocks))
    return jnp.where(values > -jnp.inf, numbers, -1).astype(jnp.int32)


def pool_mask(pool: Array, n: int, entry_block: Array | None, block: int) -> Array:
    """bool [B, t, n]: entries inside the pool of block numbers [B, t, P]."""
    b, t, _ = pool.shape
    blocks = -(-n // block) if entry_block is None else n
    kept = (
        jnp.zeros((b, t, blocks + 1), bool)
        .at[jnp.arange(b)[:, None, None], jnp.arange(t)[:, None], jnp.where(pool < 0, blocks, pool)]
        .set(True)
    )
    if entry_block is None:
        return jnp.repeat(kept[..., :blocks], block, axis=-1)[..., :n]
    return jnp.take_along_axis(kept, jnp.broadcast_to(entry_block[:, None], (b, t, n)), axis=-1)
