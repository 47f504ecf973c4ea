"""Lightning indexer: which entries of the compressed stream a query attends to. Scoring and selecting by kernels are in
`pallas_kernels.indexer`; here are the projections, and the forms that masks of packed samples need.

Scores are rounded to the activation dtype in three places (per-head dot, weighted head, head sum), as the release does:
they decide ties. Everywhere the lowest index wins a tie.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from dsv41_jax.linear import Linear
from dsv41_jax.numerics import Numerics
from dsv41_jax.rope import rotate_tail
from pallas_kernels.indexer import index_scores, reference

__all__ = ["Indexer", "candidate_blocks", "index_scores", "pool_mask", "select"]


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
        if self.numerics.quantizes("index"):
            q = quant.fake_q4_index(q)
        constant = jnp.float32(
            self.dim**-0.5 * self.heads**-0.5
        )  # a float32 scalar: rounding it to bf16 first would differ
        weights = self.numerics.round(self.weights_proj(y).astype(jnp.float32) * constant)
        return q, weights


def select(scores: Array, allowed: Array, k: int) -> Array:
    """The k best allowed entries of each query, ascending, padded with -1 at the end.

    Args:
        scores: float32 [B, t, N]. allowed: bool [B, t, N]. k: index_topk.

    Returns:
        int32 [B, t, k].
    """
    return reference.select(jnp.where(allowed, scores, -jnp.inf), k)


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
    masked = jnp.where(visible, reference.one_zero(scores), -jnp.inf)
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
