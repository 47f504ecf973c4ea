"""Scores of paged FP4 index keys on a TPU.

Pages are copied by hand into a double-buffered tile of keys and unpacked on the way to the matrix unit; nothing but the
scores is written. Unpacking works on many codes at once (`_fields`, `_bf16_bits`): the magnitude of a code becomes four
bits, an exponent 0 (zero) to 4 and one mantissa bit, which are put where bf16 has them, two codes of a word at a time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.indexer.reference import LANES, PagedKeys

_TILE = 16  # rows of 128 keys that are fetched together
_GROUP = 4  # of these, scored together
_SPAN = 64  # at most, of a grid step
_QUERIES = 64  # at most, of a grid step
_TOGETHER = 8  # queries scored together
_VMEM_BYTES = 48 * 2**20

# Unpacked keys are 2^-25 of what they stand for, queries 2^25: a code's bits are 2^-125 of its value, and a scale can
# make up for 2^100 before its exponent overflows.
_KEY_EXPONENT = 100
_QUERY_FACTOR = 2.0 ** (125 - _KEY_EXPONENT)


class Packing:
    """Where the channels of packed keys are, as the matrix unit gets them.

    A tile is 128 keys: int32 [rows, 128], rows a multiple of 8; with 64 keys a page, the even words of two pages and
    then their odd words. Pair plane k of it, k = 0..3, holds nibbles k and k + 4 of every word: bf16 [2 * rows, 128].
    """

    def __init__(self, dim: int, entries: int):
        self.dim, self.entries = dim, entries
        self.pages = LANES // entries  # of a tile
        words = dim // 8
        self.page_rows = words // self.pages
        self.buffer_rows = -(-self.page_rows // 8) * 8
        self.rows = self.buffer_rows * self.pages
        word = np.full(self.rows, -1)
        for part in range(self.pages):
            first = part * self.buffer_rows
            word[first : first + self.page_rows] = np.arange(part, words, self.pages)
        nibble = np.arange(4)[:, None, None] + 4 * np.arange(2)  # [4, 1, 2]
        channel = np.where(word[:, None] < 0, -1, nibble * words + word[:, None])
        self.channel = channel.reshape(-1)  # of every row of the planes, -1 for none
        self.block = np.maximum(channel, 0) // 32  # [4, rows, 2]: of every row's scale

    def queries(self, queries: Array) -> Array:
        """bf16 [..., dim] -> [..., 8 * rows]: in the order of the planes, times what unpacked keys lack."""
        taken = jnp.take(queries, np.maximum(self.channel, 0), axis=-1)
        return jnp.where(self.channel >= 0, taken * _QUERY_FACTOR, 0).astype(jnp.bfloat16)

    def scales(self, words: Array) -> list[Array]:
        """The scale of each block of 32 channels, 2^100 of it: float32 [..., 128] of scale words int32 [..., 128]."""
        shifts = range(0, 8 * self.dim // 32, 8)
        exponents = (jnp.minimum(((words >> shift) & 255) + _KEY_EXPONENT, 254) for shift in shifts)
        return [_as_float(exponent << 23) for exponent in exponents]

    def unpack(self, words: Array, scales: list[Array]) -> Array:
        """Keys bf16 [8 * rows, 128] of a tile of words int32 [rows, 128] and its scales, float32 [1, 128] each."""
        fields = _fields(words)
        planes = []
        for k in range(4):
            bits = _bf16_bits(words, fields, k)
            low = _as_float(bits << 16) * self._plane_scale(self.block[k, :, 0], scales)
            high = _as_float(bits & np.int32(-(2**16))) * self._plane_scale(self.block[k, :, 1], scales)
            both = jax.lax.shift_right_logical(_as_bits(low), 16) | _as_bits(high)  # both are bf16 values
            planes.append(pltpu.bitcast(both, jnp.bfloat16))
        return jnp.concatenate(planes, axis=0)

    def _plane_scale(self, blocks: np.ndarray, scales: list[Array]) -> Array:
        """Scales of the rows of a plane whose blocks are given: float32 [rows or 1, 128]."""
        plane = scales[blocks[0]]
        if len(set(blocks.tolist())) > 1:  # planes of 96 channels
            row = jax.lax.broadcasted_iota(jnp.int32, (self.rows, LANES), 0)
            for first in range(1, self.rows):
                if blocks[first] != blocks[first - 1]:
                    plane = jnp.where(row >= first, scales[blocks[first]], plane)
        return plane


def _as_float(bits: Array) -> Array:
    return pltpu.bitcast(bits, jnp.float32)


def _as_bits(value: Array) -> Array:
    return pltpu.bitcast(value, jnp.int32)


def _fields(words: Array) -> Array:
    """Eight codes of a word -> eight nibbles: exponent 0..4 and a mantissa bit of the magnitudes.

    Magnitude code x (0 .. 7 for 0, .5, 1, 1.5, 2, 3, 4, 6) becomes x + min(x, 2), at most 9.
    """
    x = words & 0x77777777
    two = (x | (x >> 1)) & 0x22222222
    one = x & ~(two >> 1) & 0x11111111
    return x + (two | one)


def _shift_left(x: Array, by: int) -> Array:
    if by == 0:
        return x
    return x << by if by > 0 else jax.lax.shift_right_logical(x, -by)


def _bf16_bits(words: Array, fields: Array, k: int) -> Array:
    """Nibbles k (low half) and k + 4 (high half) of every word as bf16, 2^-125 of their value."""
    sign = _shift_left(words, 12 - 4 * k) & np.int32(np.uint32(0x80008000).view(np.int32))
    return sign | (_shift_left(fields, 6 - 4 * k) & 0x03C003C0)


def round_bf16(x: Array, interpret: bool) -> Array:
    """float32 rounded to bf16. XLA, which runs what is interpreted, may drop a pair of conversions."""
    if interpret:
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def head_sums(queries: Array, weights: Array, keys: Array, count: int, interpret: bool) -> Array:
    """Sums over heads, not rounded yet: float32 [count, L].

    Args:
        queries: bf16 [count * heads, C], heads a multiple of 8. weights: float32 [count * heads, 128], equal lanes.
        keys: bf16 [C, L], L a multiple of 128.
    """
    e = round_bf16(jnp.dot(queries, keys, preferred_element_type=jnp.float32), interpret)
    wide = jnp.concatenate([weights] * (keys.shape[1] // LANES), axis=1)
    e = round_bf16(jnp.maximum(e, 0.0) * wide, interpret)
    heads = e.shape[0] // count
    return jnp.concatenate(
        [jnp.sum(e[i * heads : (i + 1) * heads], axis=0, keepdims=True) for i in range(count)], axis=0
    )


def _kernel(packing: Packing, sizes, interpret, visible, limit, slot, table, after, q, w, codes, scales, out, *scratch):
    """Scores of `count` queries of a row for the keys of a span; see `scores` for the grid."""
    rows, blocks, count, span = sizes
    code_buffer, scale_buffer, state, arrived = scratch
    part, row, block, step = (pl.program_id(i) for i in range(4))
    b = part * rows + row
    tile_keys, tile_pages = _TILE * LANES, _TILE * packing.pages
    tiles = jax.lax.div(limit[b] + tile_keys - 1, tile_keys)  # of this row that hold a visible key

    def start(row_table, tile, buffer):
        def page_copies(i, _):
            page = row_table[0, 0, tile * tile_pages + i]
            to = code_buffer.at[buffer, i, pl.ds(0, packing.page_rows)]
            pltpu.make_async_copy(codes.at[slot[0], page], to, arrived.at[0, buffer]).start()
            scale_row = pl.ds(page >> (packing.pages - 1), 1)
            to = scale_buffer.at[buffer, pl.ds(i, 1)]
            pltpu.make_async_copy(scales.at[slot[0], scale_row], to, arrived.at[1, buffer]).start()
            return 0

        jax.lax.fori_loop(0, tile_pages, page_copies, 0, unroll=not interpret)

    def wait(buffer):  # for all copies of a tile: a semaphore counts bytes
        to = code_buffer.at[buffer, :, pl.ds(0, packing.page_rows)]
        pltpu.make_async_copy(to, to, arrived.at[0, buffer]).wait()
        to = scale_buffer.at[buffer]
        pltpu.make_async_copy(to, to, arrived.at[1, buffer]).wait()

    # state: the buffer of the tile to score next, and whether its copies have been started.
    @pl.when((row == 0) & (block == 0) & (step == 0))
    def _():
        state[0] = 0
        state[1] = 0
        if packing.page_rows < packing.buffer_rows:
            code_buffer[...] = jnp.zeros_like(code_buffer)

    first = step * (span // _TILE)
    here = jnp.clip(tiles - first, 0, span // _TILE)
    following = jnp.where(row + 1 < rows, limit[jnp.minimum(b + 1, limit.shape[0] - 1)], 0)

    @pl.when((here > 0) & (state[1] == 0))
    def _():
        start(table, first, state[0])

    def score(i, _):
        tile, buffer = first + i, state[0]
        last = tile + 1 == tiles
        more = ~(last & (block + 1 == blocks))

        @pl.when(more)
        def _():
            start(table, jnp.where(last, 0, tile + 1), 1 - buffer)

        @pl.when(~more & (following > 0))
        def _():
            start(after, 0, 1 - buffer)

        state[0] = 1 - buffer
        state[1] = (more | (following > 0)).astype(jnp.int32)
        wait(buffer)
        _score_tile(packing, count, interpret, table, tile, buffer, q, w, code_buffer, scale_buffer, out, i)
        return 0

    jax.lax.fori_loop(0, here, score, 0)

    key = (step * span + jax.lax.broadcasted_iota(jnp.int32, (span, LANES), 0)) * LANES
    key = key + jax.lax.broadcasted_iota(jnp.int32, (span, LANES), 1)

    def hide(i, _):
        seen = visible[(b * blocks + block) * count + i]
        out[0, i] = jnp.where(key < seen, round_bf16(out[0, i], interpret), -jnp.inf)
        return 0

    jax.lax.fori_loop(0, count, hide, 0)


def _score_tile(packing, count, interpret, table, tile, buffer, q, w, code_buffer, scale_buffer, out, place):
    """Sums over heads of one tile of keys into rows 16 * place .. of `out`."""
    pages, lanes = packing.pages, jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    together = min(count, _TOGETHER)
    heads = q.shape[1] // count

    def words_of(r):
        if pages == 1:
            return code_buffer[buffer, r]
        a, b = code_buffer[buffer, 2 * r], code_buffer[buffer, 2 * r + 1]
        left = lanes < LANES // 2
        even = jnp.where(left, a, pltpu.roll(b, LANES // 2, 1))
        odd = jnp.where(left, pltpu.roll(a, LANES // 2, 1), b)
        return jnp.concatenate([even, odd], axis=0)

    def scale_words_of(r):
        if pages == 1:
            return scale_buffer[buffer, pl.ds(r, 1)]
        halves = []
        for side in range(2):  # the side of the row that a page's scales are on is the page's own
            page = table[0, 0, (tile * _TILE + r) * 2 + side]
            scale = scale_buffer[buffer, pl.ds(2 * r + side, 1)]
            halves.append(pltpu.roll(scale, ((page + side) & 1) * (LANES // 2), 1))
        return jnp.where(lanes < LANES // 2, *halves)

    def group(g, _):
        scales = packing.scales(jnp.concatenate([scale_words_of(g * _GROUP + i) for i in range(_GROUP)], axis=0))
        parts = []
        for i in range(_GROUP):
            parts.append(packing.unpack(words_of(g * _GROUP + i), [scale[i : i + 1] for scale in scales]))
        keys = jnp.concatenate(parts, axis=1)

        def queries(j, _):
            rows = pl.ds(pl.multiple_of(j * together * heads, 8), together * heads)
            sums = head_sums(q[0, rows], w[0, rows], keys, together, interpret)
            for i in range(_GROUP):
                part = sums[:, i * LANES : (i + 1) * LANES]
                out[0, pl.ds(j * together, together), place * _TILE + g * _GROUP + i] = part
            return 0

        jax.lax.fori_loop(0, count // together, queries, 0, unroll=count == together)
        return 0

    unroll = count == together and not interpret
    jax.lax.fori_loop(0, _TILE // _GROUP, group, 0, unroll=unroll)


def pad_to(x: Array, axis: int, multiple: int, value=0) -> Array:
    """x with an axis padded to a multiple."""
    short = -x.shape[axis] % multiple
    return (
        x
        if short == 0
        else jnp.pad(x, [(0, short if i == axis % x.ndim else 0) for i in range(x.ndim)], constant_values=value)
    )


def row_weights(weights: Array) -> Array:
    """Head weights [B, rows] -> float32 [B, rows, 128], equal lanes."""
    return jnp.broadcast_to(weights.astype(jnp.float32)[..., None], (*weights.shape, LANES))


def scores(queries: Array, weights: Array, keys: PagedKeys, visible: Array, *, interpret: bool) -> Array:
    """See `pallas_kernels.indexer.scores`.

    Grid: halves of the batch (one for each core of a chip that has two), rows of a half, blocks of queries, spans of
    keys. Only tiles that hold a visible key are fetched.
    """
    b, t, heads, dim = queries.shape
    packing = Packing(dim, keys.entries)
    count = t if t <= _TOGETHER else min(_QUERIES, -(-t // _TOGETHER) * _TOGETHER)
    queries, weights = (pad_to(pad_to(x, 1, count), 2, 8) for x in (queries, weights))
    visible = pad_to(jnp.clip(visible, 0, keys.page_table.shape[1] * keys.entries), 1, count)
    padded, heads = queries.shape[1:3]
    blocks = padded // count
    n = keys.page_table.shape[1] * keys.entries
    tiles = -(-n // (_TILE * LANES))
    span = _TILE * min(tiles, _SPAN // _TILE)
    table = jnp.clip(keys.page_table, 0, keys.codes.shape[1] - 1)
    table = pad_to(table, 1, span * packing.pages)[:, None]
    spans = table.shape[2] // (span * packing.pages)

    q = packing.queries(queries).reshape(b, padded * heads, -1)
    w = row_weights(weights.reshape(b, padded * heads))
    parts = 2 if b % 2 == 0 else 1
    rows = b // parts
    last = b - 1

    def at(of_row, *rest):
        return lambda part, row, block, step, *_: (of_row(part * rows + row), *(f(block, step) for f in rest))

    def zero(block, step):
        return 0

    def own(i):
        return i

    whole = pl.BlockSpec(memory_space=pl.ANY)
    smem = functools.partial(pl.BlockSpec, (1, 1, table.shape[2]), memory_space=pltpu.SMEM)
    per_query = lambda width: pl.BlockSpec((1, count * heads, width), at(own, lambda block, step: block, zero))  # noqa: E731
    out = pl.pallas_call(
        functools.partial(_kernel, packing, (rows, blocks, count, span), interpret),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(parts, rows, blocks, spans),
            in_specs=[
                smem(at(own, zero, zero)),
                smem(at(lambda i: jnp.minimum(i + 1, last), zero, zero)),
                per_query(q.shape[-1]),
                per_query(LANES),
                whole,
                whole,
            ],
            out_specs=pl.BlockSpec(
                (1, count, span, LANES), at(own, lambda block, step: block, lambda block, step: step, zero)
            ),
            scratch_shapes=[
                pltpu.VMEM((2, _TILE * packing.pages, packing.buffer_rows, LANES), jnp.int32),
                pltpu.VMEM((2, _TILE * packing.pages, LANES), jnp.int32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((b, padded, spans * span, LANES), jnp.float32),
        interpret=interpret,
        name="indexer_scores",
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=_VMEM_BYTES,
            disable_bounds_checks=True,
        ),
    )(
        visible.reshape(-1).astype(jnp.int32),
        jnp.max(visible, axis=1).astype(jnp.int32),
        jnp.asarray(keys.slot, jnp.int32).reshape(1),
        table,
        table,
        q,
        w,
        keys.codes,
        keys.scales,
    )
    return out.reshape(b, padded, -1)[:, :t, :n]
