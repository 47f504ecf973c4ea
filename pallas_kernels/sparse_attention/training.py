"""The training form of sparse attention, for rows too long for masks over all keys: tiles of queries, each over its
own stretch of window keys and the entries it gathers, under one softmax with a sink.

The backward pass keeps the output and the logarithm of the softmax's sum, computes a tile's probabilities again, and
adds the gradients of gathered entries into one float32 array. This is plain XLA on every platform, in tiles of a few
dozen queries; there is no Mosaic or Triton kernel of it.

    logits   s_j = q . k_j / sqrt(d)        of window keys, entries; the sink is a logit without a value
    backward dp_j = do . k_j,  ds_j = p_j (dp_j - do . o),  dk_j = ds_j q + p_j do     (a key is its own value)
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from dsv41_jax.numerics import Numerics, einsum_f32
from dsv41_jax.tiles import by_query_tiles, join_queries, split_queries

KEPT = "attention"  # the name under which remat can keep what the backward pass reads
_LEAST_TILE, _LARGEST_TILE = 8, 64


def tile_size(tokens: int, query_bytes: float, temporary_bytes: int) -> int:
    """Queries of a tile whose temporary arrays take `query_bytes` a query."""
    most = int(temporary_bytes / 2 // query_bytes)
    return min(tokens, max(_LEAST_TILE, min(_LARGEST_TILE, most)))


def attention_bytes(q: Array, window_size: int, entries: int, gathered: bool) -> float:
    """Bytes of temporary arrays of a query of q [B, T, H, d] that attends to so many entries."""
    b, _, heads, dim = q.shape
    # Gathered values and their gradients; logits, probabilities, and their gradients.
    return 4.0 * b * (3 * entries * dim * gathered + 4 * heads * (entries + window_size + _LARGEST_TILE))


def pad_window(window_kv: Array, size: int, width: int) -> Array:
    """Window keys [B, T, d] with zeros before and after, so that every tile has width - 1 + size of them."""
    t = window_kv.shape[1]
    return jnp.pad(window_kv, ((0, 0), (width - 1, -t % size), (0, 0)))


def tile_window(padded: Array, number: Array, first: Array, size: int, width: int) -> tuple[Array, Array]:
    """Window keys [B, width - 1 + size, d] of a tile and bool [B, size, width - 1 + size], which a query may see.

    Args:
        padded: of `pad_window`. number: of the tile. first: int32 [B, size], place of the first key of each query.
    """
    rows = jax.lax.dynamic_slice_in_dim(padded, number * size, width - 1 + size, axis=1)
    place = number * size - (width - 1) + jnp.arange(width - 1 + size)
    own = number * size + jnp.arange(size)
    return rows, (place >= jnp.maximum(first, 0)[..., None]) & (place <= own[:, None])


def gather(rows: Array, selection: Array) -> Array:
    """rows [B, N, d] at selection int32 [B, t, K] -> [B, t, K, d]; row 0 where it is negative."""
    return jax.vmap(lambda own, chosen: own.at[chosen].get(mode="promise_in_bounds"))(rows, jnp.maximum(selection, 0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def attend(
    q: Array,
    window_kv: Array,
    window_first: Array,
    entries: Array | None,
    chosen: Array | None,
    sink: Array,
    width: int,
    numerics: Numerics,
    temporary_bytes: int,
) -> Array:
    """What `reference.attend_values` gives with masks over all keys.

    Args:
        q: [B, T, H, d]. sink: float32 [H].
        window_kv: [B, T, d], the key of each token; window_first: int32 [B, T], place of the first one that a query
            sees, more than `width` before its own never. The last one is its own.
        entries: [B, N, d] with chosen, or None, None. chosen: numbers int32 [B, T, K], -1 for none, whose entries are
            gathered; or a mask bool [B, T, N] over all: faster where N is small, and its gradient needs no scatter.
        width: of the window. temporary_bytes: budget of a tile's temporary arrays.

    Returns:
        [B, T, H, d] in the activation dtype.
    """
    return _forward(q, window_kv, window_first, entries, chosen, sink, width, numerics, temporary_bytes)[0]


# Einsums of logits, values and key gradients, for keys shared by the queries of a tile and for gathered ones.
_SHARED = ("bthd,bnd->bthn", "bthn,bnd->bthd", "bthn,bthd->bnd")
_GATHERED = ("bthd,btnd->bthn", "bthn,btnd->bthd", "bthn,bthd->btnd")


def _parts(near: tuple[Array, Array], entries: Array | None, chosen: Array | None) -> list[tuple]:
    """Einsums, keys and mask bool [B, t, n] of a tile's window and of its entries."""
    parts = [(_SHARED, *near)]
    if chosen is not None and chosen.dtype == bool:
        parts.append((_SHARED, entries, chosen))
    elif chosen is not None:
        parts.append((_GATHERED, gather(entries, chosen), chosen >= 0))
    return parts


def _logits(q: Array, part: tuple) -> Array:
    """Masked float32 [B, t, H, n]."""
    (scores, _, _), keys, mask = part
    scale = jnp.float32(q.shape[-1] ** -0.5)
    return jnp.where(mask[:, :, None], einsum_f32(scores, q, keys) * scale, -jnp.inf)


def _tile(q: Array, chosen: Array | None, width: int, temporary_bytes: int) -> int:
    masked = chosen is not None and chosen.dtype == bool
    query_bytes = attention_bytes(q, width, 0 if chosen is None else chosen.shape[-1], not masked)
    return tile_size(q.shape[1], query_bytes, temporary_bytes)


def _forward(q, window_kv, window_first, entries, chosen, sink, width, numerics, temporary_bytes):
    size = _tile(q, chosen, width, temporary_bytes)
    padded = pad_window(window_kv, size, width)

    def tile(number: Array, q: Array, first: Array, chosen: Array | None) -> tuple[Array, Array]:
        parts = _parts(tile_window(padded, number, first, size, width), entries, chosen)
        logits = [_logits(q, part) for part in parts]
        peak = jnp.stack([jnp.max(part, axis=-1) for part in logits]).max(axis=0)
        peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
        total = jnp.exp(sink.astype(jnp.float32) - peak)
        out = jnp.zeros(q.shape, jnp.float32)
        for part, ((_, values, _), keys, _) in zip(logits, parts, strict=True):
            p = jnp.exp(part - peak[..., None])
            total = total + jnp.sum(p, axis=-1)
            out = out + einsum_f32(values, numerics.round(p), keys)
        return numerics.round(out / total[..., None]), peak + jnp.log(total)

    return by_query_tiles(tile, size, q, window_first, chosen)


def _forward_rule(q, window_kv, window_first, entries, chosen, sink, width, numerics, temporary_bytes):
    out, log_sum = _forward(q, window_kv, window_first, entries, chosen, sink, width, numerics, temporary_bytes)
    out, log_sum = checkpoint_name(out, KEPT), checkpoint_name(log_sum, KEPT)
    return out, (q, window_kv, window_first, entries, chosen, sink, out, log_sum)


def _backward_rule(width: int, numerics: Numerics, temporary_bytes: int, kept: tuple, d_out: Array) -> tuple:
    q, window_kv, window_first, entries, chosen, sink, out, log_sum = kept
    size = _tile(q, chosen, width, temporary_bytes)
    padded = pad_window(window_kv, size, width)
    scale = jnp.float32(q.shape[-1] ** -0.5)
    t = q.shape[1]

    def tile(sums: Any, parts: tuple) -> tuple[Any, Array]:
        d_window, d_entries, d_sink = sums
        number, q, first, chosen, out, log_sum, d_out = parts
        inner = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)  # do . o, [B, t, H]
        d_q, d_keys = jnp.zeros(q.shape, jnp.float32), []
        for part in _parts(tile_window(padded, number, first, size, width), entries, chosen):
            (scores, values, back), keys, _ = part
            p = jnp.exp(_logits(q, part) - log_sum[..., None])
            d_logits = p * (einsum_f32(scores, d_out, keys) - inner[..., None]) * scale
            p, d_logits = numerics.round(p), numerics.round(d_logits)
            d_q = d_q + einsum_f32(values, d_logits, keys)
            d_keys.append(einsum_f32(back, d_logits, q) + einsum_f32(back, p, d_out))
        begin = (0, number * size, 0)
        own = jax.lax.dynamic_slice(d_window, begin, d_keys[0].shape) + d_keys[0]
        d_window = jax.lax.dynamic_update_slice(d_window, own, begin)
        if chosen is not None and chosen.dtype == bool:
            d_entries = d_entries + d_keys[1]
        elif chosen is not None:
            place = jnp.where(chosen < 0, d_entries.shape[1], chosen)
            d_entries = jax.vmap(lambda total, at, d: total.at[at].add(d, mode="drop"))(d_entries, place, d_keys[1])
        d_sink = d_sink - jnp.sum(jnp.exp(sink.astype(jnp.float32) - log_sum) * inner, axis=(0, 1))
        return (d_window, d_entries, d_sink), d_q.astype(q.dtype)

    parts = [split_queries(x, size) for x in (q, window_first, chosen, out, log_sum, d_out)]
    zeros = (
        jnp.zeros(padded.shape, jnp.float32),
        None if entries is None else jnp.zeros(entries.shape, jnp.float32),
        jnp.zeros(sink.shape, jnp.float32),
    )
    (d_window, d_entries, d_sink), d_q = jax.lax.scan(tile, zeros, (jnp.arange(len(parts[0])), *parts))
    d_q = join_queries(d_q, t)
    d_window = d_window[:, width - 1 : width - 1 + t].astype(window_kv.dtype)
    d_entries = None if entries is None else d_entries.astype(entries.dtype)
    return d_q, d_window, None, d_entries, None, d_sink.astype(sink.dtype)


attend.defvjp(_forward_rule, _backward_rule)
