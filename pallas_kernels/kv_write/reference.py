"""What the caches keep, in plain `jax.numpy`: the arithmetic of `norms`, `rope` and `quant`, the places of `pages` and
`rings`.
"""

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from dsv41_jax.norms import rms_scale
from dsv41_jax.numerics import RELEASED

LANES = 128


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x bf16 [..., d], weight [d] -> bf16 [..., d]: float32 statistics, one rounding."""
    x = x.astype(jnp.float32)
    return RELEASED.round(x * rms_scale(x, eps) * weight.astype(jnp.float32))


def rotate_tail(x: Array, cos: Array, sin: Array) -> Array:
    """Adjacent pairs of the last 2 * cos.shape[-1] channels of bf16 x [..., d], turned; one rounding to bf16."""
    cos, sin = full_angles(cos, sin, x.shape[-1])
    x = x.astype(jnp.float32)
    partner = jnp.flip(x.reshape(*x.shape[:-1], -1, 2), axis=-1).reshape(x.shape)
    return RELEASED.round(x * cos + partner * sin)


def full_angles(cos: Array, sin: Array, d: int) -> tuple[Array, Array]:
    """Factors [..., d] of a channel and of its partner from the angles [..., rope/2] of the last channels' pairs."""
    pad = [(0, 0)] * (cos.ndim - 1) + [(d - 2 * cos.shape[-1], 0)]
    cos = jnp.pad(jnp.repeat(cos, 2, axis=-1), pad, constant_values=1.0)
    return cos, jnp.pad(jnp.stack([-sin, sin], axis=-1).reshape(*sin.shape[:-1], -1), pad)


def main_words(d: int) -> int:
    """int32 words of a main KV entry of d channels: codes, then scales."""
    return d // 8 + -(-d // (4 * quant.MAIN_KV_BLOCK))


def nibbles_to_words(codes: Array) -> Array:
    """Codes 0..15 [..., d] -> int32 [..., d/8]; nibble k of word w is channel k * d/8 + w."""
    planes = codes.reshape(*codes.shape[:-1], 8, codes.shape[-1] // 8).astype(jnp.uint32)
    shift = 4 * jnp.arange(8, dtype=jnp.uint32)[:, None]
    return jax.lax.bitcast_convert_type(jnp.sum(planes << shift, axis=-2, dtype=jnp.uint32), jnp.int32)


def bytes_to_words(scales: Array) -> Array:
    """8-bit floats [..., n] -> int32 [..., ceil(n/4)]; byte b of word w is scale b * words + w, missing ones are 0."""
    n = scales.shape[-1]
    words = -(-n // 4)
    raw = jax.lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.uint32)
    raw = jnp.pad(raw, [(0, 0)] * (raw.ndim - 1) + [(0, 4 * words - n)]).reshape(*raw.shape[:-1], 4, words)
    shift = 8 * jnp.arange(4, dtype=jnp.uint32)[:, None]
    return jax.lax.bitcast_convert_type(jnp.sum(raw << shift, axis=-2, dtype=jnp.uint32), jnp.int32)


def scale_place(page: Array, place: Array, page_entries: int, words: int) -> tuple[Array, Array]:
    """Row and lane [..., words] of the scale words of index keys."""
    size = page_entries * words
    word = place[..., None] + page_entries * jnp.arange(words)
    together = max(1, LANES // size)  # pages that share a row
    rows = page[..., None] // together * -(-size // LANES) + word // LANES
    return rows, page[..., None] % together * size + word % LANES


def main_entries(
    raw: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    words: Array,
    slot: Array | int,
    page: Array,
    place: Array,
    keep: Array,
    *,
    page_rows: int,
    eps: float,
) -> tuple[Array, Array]:
    """See `kv_write.main_entries`."""
    latent = rms_norm(raw, norm, eps)
    codes, scales = quant.q4_main(rotate_tail(latent, cos, sin))
    entry = jnp.concatenate([nibbles_to_words(codes), bytes_to_words(scales)], axis=-1)
    word = place[..., None] * entry.shape[-1] + jnp.arange(entry.shape[-1])
    row = jnp.where(keep[..., None], page[..., None] * page_rows + word // LANES, words.shape[1])
    return words.at[slot, row, word % LANES].set(entry, mode="drop"), latent


def index_entries(
    raw: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    codes: Array,
    scales: Array,
    slot: Array | int,
    page: Array,
    place: Array,
    keep: Array,
    *,
    page_entries: int,
    eps: float,
) -> tuple[Array, Array]:
    """See `kv_write.index_entries`."""
    code, scale = quant.q4_index(rotate_tail(rms_norm(raw, norm, eps), cos, sin))
    key, scale = nibbles_to_words(code), bytes_to_words(scale)
    word = jnp.arange(key.shape[-1]) * page_entries + place[..., None]
    gone = jnp.where(keep, page, codes.shape[1])[..., None]
    codes = codes.at[slot, gone, word // LANES, word % LANES].set(key, mode="drop")
    row, lane = scale_place(page, place, page_entries, scale.shape[-1])
    row = jnp.where(keep[..., None], row, scales.shape[1])
    return codes, scales.at[slot, row, lane].set(scale, mode="drop")


def window_rows(
    raw: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    codes: Array,
    scales: Array,
    layer: Array | int,
    start: Array,
    n_valid: Array,
    *,
    eps: float,
) -> tuple[Array, Array, Array, Array]:
    """See `kv_write.window_rows`."""
    b, t, _ = raw.shape
    size = codes.shape[-2]
    values, powers = quant.q8(rotate_tail(rms_norm(raw, norm, eps), cos, sin))
    own_codes = jax.lax.bitcast_convert_type(values, jnp.uint8)
    own_scales = jax.lax.bitcast_convert_type(powers, jnp.uint8)  # [B, t, d/32]
    i = jnp.arange(t)
    keep = (i < n_valid[:, None]) & (i >= n_valid[:, None] - size)
    slot = jnp.where(keep, (start[:, None] + i) % size, size)
    row = jnp.arange(b)[:, None]
    codes = codes.at[layer, row, slot].set(own_codes, mode="drop")
    scales = scales.at[layer, row, :, slot].set(own_scales, mode="drop")  # indexed axes come first
    return codes, scales, own_codes, own_scales.swapaxes(-1, -2)
