"""The indexer's own loss: its scores are to follow the main attention.

KL(p || softmax(index scores)) of each query over entries of the compressed stream. p is what the main attention gives
these entries, summed over heads and divided by its sum; the window and the sink take part in the attention's softmax,
so that a head counts as much as it looks at entries at all. Two choices of entries:

    selected   those that the query attends to: the practice of the family in sparse training
    dense      all that it may see, as if it attended to all of them: for short rows; it also teaches what the selection
               leaves out

Everything but index queries, head weights and index keys is constant here, so this trains the indexers and the index
keys alone, and the language loss trains everything else (the selection has no gradient).
Source: training spec 3.11, the practice of the family (DeepSeek-V3.2-Exp). The V4.1 report says only that sparse
attention is trained from the start: it leaves open this loss, its weight (here 1), whether it is taken over selected or
all entries, and how window and sink enter p.
"""

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.numerics import Numerics, einsum_f32

_MASKED = -1e30


def entry_attention(q: Array, window_kv: Array, window_mask: Array, entries: Array, mask: Array, sink: Array) -> Array:
    """p of the module's head, float32 [B, t, N]: sums to 1 over a query's entries, zeros where it has none.

    Args:
        q: [B, t, H, d]. sink: float32 [H].
        window_kv: [B, n, d], window_mask: bool [B, t, n].
        entries: [B, N, d], or gathered for each query [B, t, N, d]; mask: bool [B, t, N].
    """
    scale = jnp.float32(q.shape[-1] ** -0.5)
    spec = "bthd,bnd->bthn" if entries.ndim == 3 else "bthd,btnd->bthn"
    near = jnp.where(window_mask[:, :, None], einsum_f32("bthd,bnd->bthn", q, window_kv) * scale, -jnp.inf)
    far = jnp.where(mask[:, :, None], einsum_f32(spec, q, entries) * scale, -jnp.inf)
    rest = jnp.logaddexp(jax.nn.logsumexp(near, axis=-1), sink.astype(jnp.float32))
    total = jnp.logaddexp(jax.nn.logsumexp(far, axis=-1), rest)  # finite: the sink is
    p = jnp.sum(jnp.exp(far - total[..., None]), axis=2)
    return p / jnp.maximum(jnp.sum(p, axis=-1, keepdims=True), 1e-30)


def index_kl(p: Array, scores: Array, mask: Array) -> Array:
    """KL(p || softmax(scores)) of each query over the entries in `mask`, float32 [B, t]; 0 where there are none.

    Args:
        p: float32 [B, t, N] of `entry_attention`, a constant here. scores: float32 [B, t, N]. mask: bool [B, t, N].
    """
    p = jax.lax.stop_gradient(p)
    log_q = jax.nn.log_softmax(jnp.where(mask, scores, _MASKED), axis=-1)
    return jnp.sum(jnp.where(mask, p * (jnp.log(p + 1e-20) - log_q), 0.0), axis=-1)


def gathered_scores(queries: Array, weights: Array, keys: Array, numerics: Numerics) -> Array:
    """`indexer.index_scores` of keys gathered for each query [B, t, N, dim]: float32 [B, t, N]."""
    e = numerics.round_f32(einsum_f32("bthd,btnd->bthn", queries, keys))
    e = numerics.round_f32(jax.nn.relu(e) * weights.astype(jnp.float32)[..., None])
    return numerics.round_f32(jnp.sum(e, axis=2))
