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
from pallas_kernels.implementation import traced_once
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
def _patterns(dim: int) -> np.ndarray:
    """int32 [4, tiles, 128], for the channel at each lane of each tile of 128 channels: the word of an entry that holds
    its code, the code's first bit, the word that holds its scale, the scale's first bit.
    """
    width, scales = dim // 8, scale_words(dim)
    channel = np.minimum(np.arange(_round_up(dim, LANES)), dim - 1).reshape(-1, LANES)
    number = channel // quant.MAIN_KV_BLOCK
    return np.stack([channel % width, 4 * (channel // width), width + number % scales, 8 * (number // scales)])


@functools.cache
def _window_blocks(dim: int) -> np.ndarray:
    """[d/32, round_up(d, 128)]: 1 where a channel belongs to a block of 32. A product with it repeats scales."""
    channel = np.arange(_round_up(dim, LANES))
    return (channel // quant.BLOCK == np.arange(dim // quant.BLOCK)[:, None]).astype(jnp.bfloat16)


def _half_e4m3(bits: Array) -> Array:
    """float32 of half an E4M3 number without sign, int32 bits 0..127. Finite, whatever the bits."""
    normal = jax.lax.bitcast_convert_type((bits << 20) + (119 << 23), jnp.float32)
    return jnp.minimum(normal, normal + normal - 2.0**-7)  # the second is smaller below 2^-7, and right there


def _double_e2m1(code: Array) -> Array:
    """float32 of twice an E2M1 number, int32 bits 0..3; the others are ignored."""
    magnitude = _shift_right(jnp.full_like(code, _DOUBLE_MAGNITUDES), (code & 7) << 2) & 15
    signed = jax.lax.bitcast_convert_type(magnitude.astype(jnp.float32), jnp.int32) | ((code & 8) << 28)
    return jax.lax.bitcast_convert_type(signed, jnp.float32)


def _unpack_entries(rows: list[Array], place: Array, patterns: Array, dim: int) -> Array:
    """bf16 values [n, round_up(d, 128)] of n entries.

    Args:
        rows: the first or the first and the second row of words of each entry, int32 [n, 128].
        place: int32 [1, n], first lane of each entry (0 where there is one row only).
        patterns: see `_patterns`.
    """
    shape = rows[0].shape
    words, start = rows[0], 0
    if len(rows) == 2:
        start = jnp.broadcast_to(place, (LANES, shape[0])).T
        lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        words = jnp.where(lane >= start, rows[0], rows[1])

    @functools.cache  # tiles need the same words where 128 is a multiple of d/8
    def under(word: tuple[int, int]) -> Array:
        index = (jnp.broadcast_to(patterns[*word][None], shape) + start) & (LANES - 1)
        return jnp.take_along_axis(words, index, axis=1)

    def field(kind: int, tile: int) -> Array:
        wanted = _patterns(dim)[kind]
        same = next(i for i in range(tile + 1) if (wanted[i] == wanted[tile]).all())
        return _shift_right(under((kind, same)), jnp.broadcast_to(patterns[kind + 1, tile][None], shape))

    def tile(i: int) -> Array:
        return (_double_e2m1(field(0, i)) * _half_e4m3(field(2, i) & 127)).astype(jnp.bfloat16)

    return jnp.concatenate([tile(i) for i in range(_round_up(dim, LANES) // LANES)], axis=1)


def _unpack_window(codes: Array, scales: Array, blocks: Array) -> Array:
    """bf16 values [R, d] of E4M3 bits uint8 [R, d] and UE8M0 scales uint8 [d/32, R]; `blocks` of `_window_blocks`."""
    scales = jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32).astype(jnp.bfloat16)
    scales = jax.lax.dot_general(scales, blocks, _TN, preferred_element_type=jnp.float32)
    codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    return (codes * scales[:, : codes.shape[1]]).astype(jnp.bfloat16)


def _kernel(dim: int, chosen: bool, linear: bool, layer_ref, *refs):
    del layer_ref  # the block specs use it
    q_ref, codes_ref, scales_ref, blocks_ref, seen_ref, sink_ref, *refs = refs
    *entries, out_ref, window, selected = refs if chosen else (*refs, None)

    @pl.when(pl.program_id(1) == 0)
    def _():
        rows = codes_ref.shape[2]
        if (rows, dim) != window.shape:  # the rest meets probabilities and queries that are 0: it must be finite
            window[...] = jnp.zeros_like(window)
        window[:rows, :dim] = _unpack_window(codes_ref[0, 0], scales_ref[0, 0], blocks_ref[...])

    near = window[...]
    if linear:
        tile = jax.lax.div(pl.program_id(1), _BF16_ROWS)
        near = window[pl.ds(pl.multiple_of(tile * _BF16_ROWS, _BF16_ROWS), seen_ref.shape[3])]
    parts = [(near, seen_ref[0, 0] > 0)]
    if chosen:
        words_ref, place_ref, patterns_ref = entries
        for first in range(0, words_ref.shape[3], _CHUNK):
            chunk = slice(first, first + _CHUNK)
            rows = [words_ref[0, 0, i, chunk] for i in range(words_ref.shape[2])]
            place = jnp.maximum(place_ref[0, 0, :, chunk], 0)
            selected[chunk] = _unpack_entries(rows, place, patterns_ref[...], dim)
        parts.append((selected[...], place_ref[0, 0] >= 0))

    def logits(keys: Array, visible: Array) -> Array:
        s = jax.lax.dot_general(q_ref[0, 0], keys, _NT, preferred_element_type=jnp.float32)
        return jnp.where(visible, s * np.float32(dim**-0.5), -jnp.inf)

    scores = [logits(*part) for part in parts]
    peak = functools.reduce(jnp.maximum, (jnp.max(s, axis=1, keepdims=True) for s in scores))
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)  # no key at all: the sum stays 0
    denominator = jnp.exp(sink_ref[...] - peak)
    total = jnp.zeros(out_ref.shape[2:], jnp.float32)
    for (keys, _), s in zip(parts, scores, strict=True):
        p = jnp.exp(s - peak)
        denominator += jnp.sum(p, axis=1, keepdims=True)
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
        # One pool of rows: a view, since no tile of 8 rows belongs to two sources. XLA's gather of a row then takes 5.3
        # instead of 7.9 bundles (v5p).
        words = entries.words.reshape(-1, LANES).at[entries.slot * height + jnp.minimum(rows, height - 1)]
    else:
        words = entries.words.at[entries.slot, rows]
    return words.get(mode="clip"), lane[:, :, None]


def _few(
    q: Array, seen: Array, window: WindowKeys, entries: Entries | None, sink: Array, linear: bool, interpret: bool
) -> Array:
    """The kernel for B sequences of t queries.

    Args:
        seen: int32 [B, t, 1, n], which window rows a query sees: among all of them, or with `linear` among the n from
            row i // 16 * 16 on for query i.
    """
    b, t, heads, dim = q.shape
    full, padded_heads = _round_up(dim, LANES), _round_up(heads, _BF16_ROWS)
    q = jnp.pad(q, [(0, 0), (0, 0), (0, padded_heads - heads), (0, full - dim)])
    sink = jnp.pad(sink, (0, padded_heads - heads))[:, None]
    kept = seen.shape[-1] + linear * ((t - 1) // _BF16_ROWS * _BF16_ROWS)
    layer = jnp.asarray(window.layer, jnp.int32).reshape(1)

    def whole(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda b, t, layer: (0,) * x.ndim)

    def each(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, *x.shape[2:]), lambda b, t, layer: (b, t) + (0,) * (x.ndim - 2))

    def of_layer(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, *x.shape[2:]), lambda b, t, layer: (layer[0], b, 0, 0))

    blocks = jnp.asarray(_window_blocks(dim))
    codes, scales = window.codes, window.scales
    if not interpret:  # or the compiler copies the rings of all layers into VMEM, where they fit
        codes, scales = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (codes, scales))
    arguments = [q, codes, scales, blocks, seen, sink]
    specs = [each(q), of_layer(codes), of_layer(scales), whole(blocks), each(seen), whole(sink)]
    scratch = [pltpu.VMEM((kept, full), jnp.bfloat16)]
    if entries is not None:
        words, place = _gather(entries, dim)
        patterns = jnp.asarray(_patterns(dim), jnp.int32)
        arguments += [words, place, patterns]
        specs += [each(words), each(place), whole(patterns)]
        scratch.append(pltpu.VMEM((words.shape[3], full), jnp.bfloat16))
    out = pl.pallas_call(
        functools.partial(_kernel, dim, entries is not None, linear),
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
    return _few(q, seen, window, entries, sink, True, interpret)


@traced_once("width", "temporary_bytes", "interpret")
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
        return _few(q, seen, window, entries, sink, False, interpret)

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
