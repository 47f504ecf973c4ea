"""Sparse attention in plain jax.numpy: unpack every key to bf16, then one softmax over window and entries."""

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from dsv41_jax.numerics import FEW_TOKENS, RELEASED, Numerics, einsum_f32, row_sum
from pallas_kernels.sparse_attention.keys import LANES, Entries, WindowKeys, entry_words, query_tile

# Fewer queries to a tile than these (or the window) save nothing: their windows overlap.
_WINDOW_TILE = 64


def attend_values(
    q: Array,
    window_kv: Array,
    window_mask: Array,
    selected_kv: Array | None,
    selected_mask: Array | None,
    sink: Array,
    numerics: Numerics,
) -> Array:
    """Softmax over window and selected keys together.

    Args:
        q: [B, t, H, d]. sink: float32 [H].
        window_kv: shared by the queries [B, n, d] or gathered for each [B, t, n, d], with window_mask bool [B, t, n].
        selected_kv: None, or entries in one of the two forms; selected_mask bool [B, t, K].

    Returns:
        [B, t, H, d] in the activation dtype. Probabilities are rounded to it too (relative to the row maximum); the
        denominator is not rounded. A query without any key yields exactly 0.
    """
    scale = jnp.float32(q.shape[-1] ** -0.5)
    forms = {3: ("bthd,bnd->bthn", "bthn,bnd->bthd"), 4: ("bthd,btnd->bthn", "bthn,btnd->bthd")}
    parts = [(*forms[window_kv.ndim], window_kv, window_mask)]
    if selected_kv is not None:
        parts.append((*forms[selected_kv.ndim], selected_kv, selected_mask))
    logits = [
        jnp.where(mask[:, :, None, :], einsum_f32(scores, q, kv) * scale, -jnp.inf) for scores, _, kv, mask in parts
    ]
    peak = jnp.stack([jnp.max(part, axis=-1) for part in logits]).max(axis=0)
    peak = jax.lax.stop_gradient(jnp.where(jnp.isfinite(peak), peak, 0.0))  # no key at all: the sum stays 0
    denominator = jnp.exp(sink.astype(jnp.float32) - peak)
    total = jnp.zeros(q.shape, jnp.float32)
    for part, (_, values, kv, _) in zip(logits, parts, strict=True):
        p = jnp.exp(part - peak[..., None])
        denominator = denominator + row_sum(p)
        total = total + einsum_f32(values, numerics.round(p), kv)
    return numerics.round(total / denominator[..., None])


def window_values(codes: Array, scales: Array) -> Array:
    """bf16 values [..., d] of E4M3 bits uint8 [..., d] and UE8M0 scales uint8 [..., d/32]."""
    values = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    return (values * jnp.repeat(quant.e8m0_to_f32(scales), quant.BLOCK, axis=-1)).astype(jnp.bfloat16)


def entry_values(words: Array, dim: int) -> Array:
    """bf16 values [..., d] of the words int32 [..., entry_words(d)] of entries."""
    raw = jax.lax.bitcast_convert_type(words, jnp.uint32)

    def fields(part: Array, bits: int) -> Array:
        """The 32 / bits fields of every word, the lowest fields of all words first."""
        shift = bits * jnp.arange(32 // bits, dtype=jnp.uint32)[:, None]
        planes = (part[..., None, :] >> shift) & (2**bits - 1)
        return planes.reshape(*part.shape[:-1], -1)

    values = quant.e2m1_values(fields(raw[..., : dim // 8], 4))
    scales = fields(raw[..., dim // 8 :], 8)[..., : dim // quant.MAIN_KV_BLOCK].astype(jnp.uint8)
    scales = jax.lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(jnp.float32)
    return (values * jnp.repeat(scales, quant.MAIN_KV_BLOCK, axis=-1)).astype(jnp.bfloat16)


def selected_values(entries: Entries, dim: int) -> Array:
    """bf16 values [B, t, K, d] of the selected entries; anything finite where row < 0."""
    word = jnp.maximum(entries.lane, 0)[..., None] + jnp.arange(entry_words(dim))
    row = jnp.maximum(entries.row, 0)[..., None] + word // LANES
    words = entries.words.at[entries.slot, row, word % LANES].get(mode="clip")
    return jnp.where((entries.row >= 0)[..., None], entry_values(words, dim), 0)


def _own_windows(query_position: Array, window: WindowKeys, width: int) -> tuple[Array, Array]:
    """Values [B, t, width, d] and mask bool [B, t, width] of each query's window, in the order of positions.

    Each query's window by itself, so that a block of few queries sums in the order in which single queries do.
    """
    wanted = query_position[..., None] - jnp.arange(width)[::-1]
    match = (wanted[..., None] == window.position[:, None, None]) & (wanted[..., None] >= 0)
    row, exists = jnp.argmax(match, axis=-1), jnp.any(match, axis=-1)
    batch = jnp.arange(row.shape[0])[:, None, None]
    codes = window.codes[window.layer, batch, row]
    scales = window.scales.swapaxes(-1, -2)[window.layer, batch, row]
    return window_values(codes, scales), exists


def attend(
    q: Array,
    query_position: Array,
    window: WindowKeys,
    entries: Entries | None,
    sink: Array,
    *,
    width: int,
    temporary_bytes: int,
) -> Array:
    """See `pallas_kernels.sparse_attention.attend`."""
    b, t, heads, dim = q.shape
    chosen = 0 if entries is None else entries.row.shape[-1]

    def selected(row: Array | None, lane: Array | None) -> tuple[Array | None, Array | None]:
        if entries is None or not chosen:
            return None, None
        part = Entries(entries.words, entries.slot, row, lane)
        return selected_values(part, dim), row >= 0

    row, lane = (None, None) if entries is None else (entries.row, entries.lane)
    if t <= FEW_TOKENS:
        own = _own_windows(query_position, window, width)
        return attend_values(q, *own, *selected(row, lane), sink, RELEASED)

    rows = window.codes.shape[-2]
    values = window_values(window.codes[window.layer], window.scales[window.layer].swapaxes(-1, -2))

    def tile(parts) -> Array:
        first, q, at, row, lane = parts
        size = min(width - 1 + at.shape[1], rows)  # rows of the tile's windows; the last t rows are the queries' own
        begin = jnp.maximum(first + rows - t - width + 1, 0)
        kv = jax.lax.dynamic_slice_in_dim(values, begin, size, axis=1)
        position = jax.lax.dynamic_slice_in_dim(window.position, begin, size, axis=1)[:, None]
        mask = (position >= 0) & (position <= at[..., None]) & (position > at[..., None] - width)
        return attend_values(q, kv, mask, *selected(row, lane), sink, RELEASED)

    # Per query: gathered words, values and scales; logits and probabilities.
    most = max(_WINDOW_TILE, width)
    query_bytes = 4 * b * (4 * chosen * dim + 3 * heads * (chosen + width + most) + 3 * heads * dim)
    size = query_tile(t, min(temporary_bytes / 2 / query_bytes, most))
    if size == t:
        return tile((jnp.int32(0), q, query_position, row, lane))

    def split(x: Array | None) -> Array | None:
        return None if x is None else jnp.moveaxis(x.reshape(b, t // size, size, *x.shape[2:]), 1, 0)

    parts = (jnp.arange(0, t, size), *map(split, (q, query_position, row, lane)))
    out = jax.lax.map(tile, parts)
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)
