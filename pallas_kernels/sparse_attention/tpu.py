"""Sparse attention on a TPU: XLA gathers rows of packed words, one kernel makes values of them and attends.

A program computes one query of one sequence. It unpacks the selected entries to bf16 in VMEM, in the order of
channels, and attends over them and the window with all logits at hand: one maximum, no rescaling. The window's rows are
unpacked at the first query of a sequence and kept.

An entry lies anywhere in two rows of 128 words. Words at or after its first lane come from the first row, words before
it from the second: one selection leaves the entry whole, only rotated, and the gather along lanes that puts the right
word under every channel undoes the rotation too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dsv41_jax import quant
from dsv41_jax.numerics import FEW_TOKENS
from pallas_kernels.sparse_attention.keys import LANES, Entries, WindowKeys, entry_words, query_tile, scale_words

_BF16_ROWS = 16  # of a tile
_CHUNK = 128  # entries unpacked at a time
_SEGMENT = 32  # queries of a longer block that share window rows
_VMEM_BYTES = 32 << 20
# Nibble c: twice the magnitude of E2M1 code c.
_DOUBLE_MAGNITUDES = np.int32(np.uint32(0xC8643210).view(np.int32))

_NT = (((1,), (1,)), ((), ()))
_TN = (((0,), (0,)), ((), ()))
_shift_right = jax.lax.shift_right_logical


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@functools.cache
def _channel_patterns(dim: int) -> np.ndarray:
    """int32 [2 * tiles + 2, 128]: for each tile of 128 channels the word of an entry under every lane, then the shift
    that brings the channel's code to bits 0..3; word and shift of scale number `lane`.
    """
    width, scales = dim // 8, scale_words(dim)
    channel = np.minimum(np.arange(_round_up(dim, LANES)), dim - 1).reshape(-1, LANES)
    number = np.minimum(np.arange(LANES), dim // quant.MAIN_KV_BLOCK - 1)
    rows = [channel % width, 4 * (channel // width), [width + number % scales], [8 * (number // scales)]]
    return np.concatenate(rows).astype(np.int32)


@functools.cache
def _spread(blocks: int, block: int, dim: int, value: float) -> np.ndarray:
    """[blocks, round_up(dim, 128)]: `value` where a channel belongs to a block. A product with it repeats scales."""
    channel = np.arange(_round_up(dim, LANES))
    return np.where(channel // block == np.arange(blocks)[:, None], value, 0).astype(jnp.bfloat16)


def _e4m3(byte: Array) -> Array:
    """float32 of E4M3 bits without sign, int32. Never infinite or NaN, whatever the bits."""
    normal = pltpu.bitcast((byte << 20) + (120 << 23), jnp.float32)
    return jnp.minimum(normal, normal + normal - 2.0**-6)  # the second is smaller below 2^-6, and right there


def _e2m1_times(code: Array, scale: Array) -> Array:
    """bf16 of twice an E2M1 code (bits 0..3, others are ignored) times float32 scales."""
    magnitude = _shift_right(jnp.full_like(code, _DOUBLE_MAGNITUDES), (code & 7) << 2) & 15
    signed = pltpu.bitcast(magnitude.astype(jnp.float32), jnp.int32) | ((code & 8) << 28)
    return (pltpu.bitcast(signed, jnp.float32) * scale).astype(jnp.bfloat16)


def _lanes(words: Array, index: Array) -> Array:
    return jnp.take_along_axis(words, index & (LANES - 1), axis=1)


def _entry_chunk(rows: list[Array], begin: Array, patterns: Array, spread: Array, dim: int) -> list[Array]:
    """bf16 values [128, 128] of a chunk of entries for each tile of channels.

    Args:
        rows: the first or the first and the second row of words of each entry, int32 [128, 128].
        begin: int32 [1, 128], first lane of each entry (a value along the lanes for each row of `rows`).
        patterns, spread: see `_channel_patterns` and `_spread`.
    """
    tiles = _round_up(dim, LANES) // LANES
    words, start = rows[0], 0
    if len(rows) == 2:
        start = jnp.broadcast_to(begin, (_CHUNK, LANES)).T
        lane = jax.lax.broadcasted_iota(jnp.int32, (_CHUNK, LANES), 1)
        words = jnp.where(lane >= start, rows[0], rows[1])

    def pattern(i: int) -> Array:
        return jnp.broadcast_to(patterns[i : i + 1], (_CHUNK, LANES))

    scales = _e4m3(_shift_right(_lanes(words, pattern(2 * tiles) + start), pattern(2 * tiles + 1)) & 127)
    scales = jnp.dot(scales.astype(jnp.bfloat16), spread, preferred_element_type=jnp.float32)
    same = LANES % (dim // 8) == 0  # every tile needs the same words
    values = []
    for i in range(tiles):
        if i == 0 or not same:
            under = _lanes(words, pattern(i) + start)
        code = _shift_right(under, pattern(tiles + i))
        values.append(_e2m1_times(code, scales[:, LANES * i : LANES * (i + 1)]))
    return values


def _kernel(dim: int, chosen: bool, step: int, span: int, layer_ref, *refs):
    del layer_ref
    *inputs, out_ref, window, selected = refs if chosen else (*refs, None)
    q_ref, codes_ref, scales_ref, window_spread, seen_ref, sink_ref, *entries = inputs
    rows = codes_ref.shape[2]

    @pl.when(pl.program_id(1) == 0)
    def _unpack_window():
        if (rows, dim) != window.shape:  # the rest meets probabilities and queries that are 0: it must be finite
            window[...] = jnp.zeros_like(window)
        bits = scales_ref[0, 0].astype(jnp.int32) << 23
        scale = pltpu.bitcast(bits, jnp.float32).astype(jnp.bfloat16)
        scale = jax.lax.dot_general(scale, window_spread[...], _TN, preferred_element_type=jnp.float32)
        codes = jax.lax.bitcast_convert_type(codes_ref[0, 0], jnp.float8_e4m3fn).astype(jnp.float32)
        window[:rows, :dim] = (codes * scale[:, :dim]).astype(jnp.bfloat16)

    q = q_ref[0, 0]
    near = window[...]
    if step:
        tile = jax.lax.div(pl.program_id(1), _BF16_ROWS)
        near = window[pl.ds(pl.multiple_of(tile * _BF16_ROWS, _BF16_ROWS), span)]

    def logits(keys: Array, visible: Array) -> Array:
        s = jax.lax.dot_general(q, keys, _NT, preferred_element_type=jnp.float32) * np.float32(dim**-0.5)
        return jnp.where(visible, s, -jnp.inf)

    parts = [(near, logits(near, seen_ref[0, 0] > 0))]
    if entries:
        words_ref, place_ref, patterns, spread = entries
        for first in range(0, words_ref.shape[3], _CHUNK):
            chunk = slice(first, first + _CHUNK)
            place = place_ref[0, 0, :, chunk]
            words = [words_ref[0, 0, i, chunk] for i in range(words_ref.shape[2])]
            values = _entry_chunk(words, jnp.maximum(place, 0), patterns[...], spread[...], dim)
            keys = jnp.concatenate(values, axis=1)
            selected[chunk] = keys
            parts.append((chunk, logits(keys, place >= 0)))
    peak = functools.reduce(jnp.maximum, (jnp.max(s, axis=1, keepdims=True) for _, s in parts))
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    denominator = jnp.exp(sink_ref[...] - peak)
    total = jnp.zeros(q.shape, jnp.float32)
    for keys, s in parts:
        p = jnp.exp(s - peak)
        denominator += jnp.sum(p, axis=1, keepdims=True)
        keys = selected[keys] if isinstance(keys, slice) else keys
        total += jnp.dot(p.astype(jnp.bfloat16), keys, preferred_element_type=jnp.float32)
    out_ref[0, 0] = (total * (1.0 / denominator)).astype(out_ref.dtype)


def _gather(entries: Entries, dim: int) -> tuple[Array, Array]:
    """Rows of words int32 [B, t, 1 or 2, K', 128] of the entries and their first lanes [B, t, 1, K'], -1 for none."""
    count = entries.row.shape[-1]
    padding = [(0, 0), (0, 0), (0, _round_up(count, _CHUNK) - count)]
    row = jnp.pad(entries.row, padding, constant_values=-1)
    lane = jnp.where(row >= 0, jnp.pad(entries.lane, padding), -1)
    rows = jnp.maximum(row, 0)[:, :, None]
    if not entries.padded:
        runs_over = lane[:, :, None] + entry_words(dim) > LANES
        rows = jnp.concatenate([rows, rows + runs_over], axis=2)
    sources, height, _ = entries.words.shape
    if height % 8 == 0 and sources * height < 2**31:
        # One pool of rows: a view, since no tile of 8 rows belongs to two sources. XLA issues 3 gathers where it issues
        # 2 by pairs of indices.
        words = entries.words.reshape(-1, LANES).at[entries.slot * height + jnp.minimum(rows, height - 1)]
    else:
        words = entries.words.at[entries.slot, rows]
    return words.get(mode="clip"), lane[:, :, None]


def _few(
    q: Array, seen: Array, window: WindowKeys, entries: Entries | None, sink: Array, step: int, interpret: bool
) -> Array:
    """The kernel for B sequences of t queries.

    Args:
        seen: int32 [B, t, 1, span]; the window rows that a query sees, among all rows, or where `step` is 1 among those
            from row i // 16 * 16 on for query i.
    """
    b, t, heads, dim = q.shape
    full, padded_heads = _round_up(dim, LANES), _round_up(heads, _BF16_ROWS)
    q = jnp.pad(q, [(0, 0), (0, 0), (0, padded_heads - heads), (0, full - dim)])
    sink = jnp.pad(sink, (0, padded_heads - heads))[:, None]
    rows, span = window.codes.shape[2], seen.shape[-1]
    kept = max(_round_up(rows, _BF16_ROWS), span + step * ((t - 1) // _BF16_ROWS * _BF16_ROWS))
    layer = jnp.asarray(window.layer, jnp.int32).reshape(1)

    def whole(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda b, t, layer: (0,) * x.ndim)

    def each(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, *x.shape[2:]), lambda b, t, layer: (b, t) + (0,) * (x.ndim - 2))

    def of_layer(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, *x.shape[2:]), lambda b, t, layer: (layer[0], b, 0, 0))

    window_spread = jnp.asarray(_spread(dim // quant.BLOCK, quant.BLOCK, dim, 1.0))
    arguments = [q, window.codes, window.scales, window_spread, seen, sink]
    specs = [each(q), of_layer(window.codes), of_layer(window.scales), whole(window_spread), each(seen), whole(sink)]
    scratch = [pltpu.VMEM((kept, full), jnp.bfloat16)]
    if entries is not None:
        words, place = _gather(entries, dim)
        patterns = jnp.asarray(_channel_patterns(dim))
        spread = jnp.asarray(_spread(LANES, quant.MAIN_KV_BLOCK, dim, 0.5))
        arguments += [words, place, patterns, spread]
        specs += [each(words), each(place), whole(patterns), whole(spread)]
        scratch.append(pltpu.VMEM((words.shape[3], full), jnp.bfloat16))
    out = pl.pallas_call(
        functools.partial(_kernel, dim, entries is not None, step, span),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(b, t), in_specs=specs, out_specs=each(q), scratch_shapes=scratch
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        interpret=interpret,
        name="sparse_attention",
    )(layer, *arguments)
    return out[:, :, :heads, :dim]


def _seen(query_position: Array, position: Array, width: int, pad: int) -> Array:
    """int32 [B, t, 1, n + pad] of query_position [B, t] and position [B, t or 1, n]: which keys a query sees."""
    at = query_position[..., None]
    seen = (position >= 0) & (position <= at) & (position > at - width)
    return jnp.pad(seen, [(0, 0), (0, 0), (0, pad)]).astype(jnp.int32)[:, :, None]


def _segment(
    q: Array, query_position: Array, window: WindowKeys, entries: Entries | None, sink: Array, width: int, interpret
) -> Array:
    """The kernel for sequences of _SEGMENT queries, whose rows of the window are width - 1 + _SEGMENT."""
    t, rows = q.shape[1], window.codes.shape[2]
    span = _round_up(width + _BF16_ROWS - 1, _BF16_ROWS)
    row = np.arange(t)[:, None] // _BF16_ROWS * _BF16_ROWS + np.arange(span)
    position = jnp.where(row < rows, window.position[:, np.minimum(row, rows - 1)], -1)
    seen = _seen(query_position, position, width, 0)
    return _few(q, seen, window, entries, sink, 1, interpret)


def attend(
    q: Array,
    query_position: Array,
    window: WindowKeys,
    entries: Entries | None,
    sink: Array,
    *,
    width: int,
    temporary_bytes: int,
    interpret: bool,
) -> Array:
    """See `pallas_kernels.sparse_attention.attend`."""
    b, t, heads, dim = q.shape
    rows = window.codes.shape[2]
    if entries is not None and not entries.row.shape[-1]:
        entries = None
    if t <= FEW_TOKENS:
        seen = _seen(query_position, window.position[:, None], width, _round_up(rows, _BF16_ROWS) - rows)
        return _few(q, seen, window, entries, sink, 0, interpret)

    segments = -(-t // _SEGMENT)
    fill = segments * _SEGMENT - t

    def split(x: Array | None, value: int = 0) -> Array | None:
        """[B, t, ...] -> [segments, B, _SEGMENT, ...]."""
        if x is None:
            return None
        x = jnp.pad(x, [(0, 0), (0, fill)] + [(0, 0)] * (x.ndim - 2), constant_values=value)
        return jnp.moveaxis(x.reshape(b, segments, _SEGMENT, *x.shape[2:]), 1, 0)

    row, lane = (None, None) if entries is None else (entries.row, entries.lane)
    parts = (jnp.arange(segments), split(q), split(query_position, -1), split(row, -1), split(lane))
    chosen = 0 if entries is None else _round_up(row.shape[-1], _CHUNK) * (1 if entries.padded else 2)
    together = query_tile(segments, temporary_bytes / 2 / (4 * LANES * b * _SEGMENT * max(chosen, 1)))

    def some(parts) -> Array:
        """`together` segments of every sequence, as sequences of their own."""
        segment, q, at, row, lane = parts
        own = rows - t - width + 1 + segment[:, None] * _SEGMENT + jnp.arange(width - 1 + _SEGMENT)
        exists, own = (own >= 0) & (own < rows), jnp.clip(own, 0, rows - 1)

        def sequences(x: Array) -> Array:
            return x.reshape(1, together * b, *x.shape[2:])

        def flat(x: Array | None) -> Array | None:
            return None if x is None else x.reshape(together * b, *x.shape[2:])

        codes = jnp.moveaxis(window.codes[window.layer, :, own], 2, 1)  # [segment, rows, B, d] before
        scales = jnp.moveaxis(window.scales[window.layer, :, :, own], 1, -1)  # [segment, rows, B, d/32] before
        position = jnp.moveaxis(jnp.where(exists[..., None], window.position.T[own], -1), 2, 1)
        near = WindowKeys(sequences(codes), sequences(scales), 0, flat(position))
        taken = None if entries is None else Entries(entries.words, entries.slot, flat(row), flat(lane), entries.padded)
        out = _segment(flat(q), flat(at), near, taken, sink, width, interpret)
        return out.reshape(together, b, *out.shape[1:])

    if together == segments:
        out = some(parts)
    else:
        grouped = jax.tree.map(lambda x: x.reshape(segments // together, together, *x.shape[1:]), parts)
        out = jax.lax.map(some, grouped).reshape(segments, b, _SEGMENT, heads, dim)
    return jnp.moveaxis(out, 0, 1).reshape(b, segments * _SEGMENT, heads, dim)[:, :t]
