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

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.indexer import index_scores
from dsv41_jax.numerics import Numerics, einsum_f32
from dsv41_jax.tiles import join_queries, split_queries
from pallas_kernels.sparse_attention.training import gather, pad_window, tile_window

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


class Followed(NamedTuple):
    """What the loss only follows.

    Attributes:
        q: [B, T, H, d]. window: [B, T, d]. window_first: int32 [B, T], see `sparse_attention.training.attend`.
        entries: [B, N, d]. sink: float32 [H].
        counted: float32 [B, T], 0 for a query that does not count.
        chosen: the entries of each query: a range (first, stop) int32 [B, T] each, a mask (bool [B, T, N],), or
            numbers (int32 [B, T, K],), -1 for none, which are gathered.
    """

    q: Array
    window: Array
    window_first: Array
    entries: Array
    sink: Array
    counted: Array
    chosen: tuple[Array, ...]


class Taught(NamedTuple):
    """What it trains: index queries [B, T, heads, di], head weights [B, T, heads], index keys [B, N, di]."""

    queries: Array
    weights: Array
    keys: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def summed_kl(taught: Taught, followed: Followed, width: int, numerics: Numerics, size: int) -> tuple[Array, Array]:
    """Sum of the KL over the counted queries that see an entry, and their number: float32 [] each.

    In tiles of `size` queries; the gradient is made tile by tile together with the value, so that nothing of the size
    of queries times entries is kept. width: of the window.
    """
    return _tiles(taught, followed, width, numerics, size, False)[0]


def _tiles(taught: Taught, followed: Followed, width: int, numerics: Numerics, size: int, with_gradient: bool):
    """The two sums, and the gradient of the first as `Taught` if it is asked for."""
    t, n = followed.q.shape[1], followed.entries.shape[1]
    gathered = len(followed.chosen) == 1 and followed.chosen[0].dtype != bool
    padded = pad_window(followed.window, size, width)

    def tile(carry: tuple, parts: Any) -> tuple[tuple, Any]:
        kl, queries_seen, d_keys = carry
        number, q, first, counted, chosen, queries, weights = parts
        if gathered:
            mask, entries, keys = chosen[0] >= 0, gather(followed.entries, chosen[0]), gather(taught.keys, chosen[0])
        else:
            mask = chosen[0]
            if len(chosen) == 2:
                mask = (jnp.arange(n) >= chosen[0][..., None]) & (jnp.arange(n) < chosen[1][..., None])
            entries, keys = followed.entries, taught.keys
        counted = counted * jnp.any(mask, axis=-1)
        p = entry_attention(q, *tile_window(padded, number, first, size, width), entries, mask, followed.sink)

        def loss(queries: Array, weights: Array, keys: Array) -> Array:
            scores = (gathered_scores if gathered else index_scores)(queries, weights, keys, numerics)
            return jnp.sum(index_kl(p, scores, mask) * counted)

        slopes = None
        if with_gradient:
            value, (d_queries, d_weights, d) = jax.value_and_grad(loss, (0, 1, 2))(queries, weights, keys)
            if gathered:
                place = jnp.where(mask, chosen[0], n)
                add = jax.vmap(lambda total, at, d: total.at[at].add(d.astype(jnp.float32), mode="drop"))
                d_keys = add(d_keys, place, d)
            else:
                d_keys = d_keys + d.astype(jnp.float32)
            slopes = d_queries, d_weights
        else:
            value = loss(queries, weights, keys)
        return (kl + value, queries_seen + jnp.sum(counted), d_keys), slopes

    split = functools.partial(split_queries, size=size)
    queries = (followed.q, followed.window_first, followed.counted, followed.chosen, taught.queries, taught.weights)
    zero = jnp.zeros((), jnp.float32)
    carry = (zero, zero, jnp.zeros(taught.keys.shape, jnp.float32) if with_gradient else None)
    numbers = jnp.arange(-(-t // size))
    (kl, queries_seen, d_keys), slopes = jax.lax.scan(tile, carry, (numbers, *jax.tree.map(split, queries)))
    if not with_gradient:
        return (kl, queries_seen), None
    d_queries, d_weights = (join_queries(x, t) for x in slopes)
    return (kl, queries_seen), Taught(d_queries, d_weights, d_keys.astype(taught.keys.dtype))


def _forward_rule(taught: Taught, followed: Followed, width: int, numerics: Numerics, size: int):
    return _tiles(taught, followed, width, numerics, size, True)


def _backward_rule(width: int, numerics: Numerics, size: int, slopes: Taught, cotangents: tuple[Array, Array]):
    return jax.tree.map(lambda slope: (slope * cotangents[0]).astype(slope.dtype), slopes), None


summed_kl.defvjp(_forward_rule, _backward_rule)
