"""Paged FP4 index keys in VMEM: how pages get there, how they are unpacked, and the arithmetic of a score.

Unpacking works on many codes at once (`_fields`, `_bf16_bits`): the magnitude of a code becomes four bits, an exponent
0 (zero) to 4 and one mantissa bit, which are put where bf16 has them, two codes of a word at a time.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.indexer.reference import LANES

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


def pad_to(x: Array, axis: int, multiple: int, value: int = 0) -> Array:
    """x with an axis padded to a multiple."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths, constant_values=value) if widths[axis][1] else x


def row_weights(weights: Array) -> Array:
    """Head weights [B, rows] -> float32 [B, rows, 128], equal lanes."""
    return jnp.broadcast_to(weights.astype(jnp.float32)[..., None], (*weights.shape, LANES))


class PageBuffers:
    """Two buffers of pages and their scales in VMEM: one is filled while the other is read.

    Attributes:
        codes: int32 [2, pages, buffer rows, 128]; rows that a page has not are zero after `reset`.
        scales: int32 [2, pages, 128], the row of scales that a page shares.
        state: int32 [2] in SMEM: the buffer to read next, and whether it is being filled.
    """

    def __init__(self, packing: Packing, slot, codes, scales, scratch):
        self.packing, self.slot, self.pool_codes, self.pool_scales = packing, slot, codes, scales
        self.codes, self.scales, self.state, self._arrived = scratch

    @staticmethod
    def scratch(packing: Packing, pages: int) -> list:
        """Scratch shapes, for buffers of so many pages."""
        return [
            pltpu.VMEM((2, pages, packing.buffer_rows, LANES), jnp.int32),
            pltpu.VMEM((2, pages, LANES), jnp.int32),
            pltpu.SMEM((2,), jnp.int32),
            pltpu.SemaphoreType.DMA((2, 2)),
        ]

    def reset(self) -> None:
        """Before a core's first step."""
        self.state[0] = 0
        self.state[1] = 0
        if self.packing.page_rows < self.packing.buffer_rows:
            self.codes[...] = jnp.zeros_like(self.codes)

    def start(self, buffer, page_of: Callable, unroll: int) -> None:
        """Begin to fill a buffer: page `page_of(i)` goes to place i."""

        def copies(i, _):
            page = page_of(i)
            to = self.codes.at[buffer, i, pl.ds(0, self.packing.page_rows)]
            pltpu.make_async_copy(self.pool_codes.at[self.slot[0], page], to, self._arrived.at[0, buffer]).start()
            row = pl.ds(page >> (self.packing.pages - 1), 1)
            to = self.scales.at[buffer, pl.ds(i, 1)]
            pltpu.make_async_copy(self.pool_scales.at[self.slot[0], row], to, self._arrived.at[1, buffer]).start()
            return 0

        jax.lax.fori_loop(0, self.codes.shape[1], copies, 0, unroll=unroll)

    def wait(self, buffer) -> None:
        """Until a buffer is full. A semaphore counts bytes, so one wait is enough for all pages."""
        to = self.codes.at[buffer, :, pl.ds(0, self.packing.page_rows)]
        pltpu.make_async_copy(to, to, self._arrived.at[0, buffer]).wait()
        to = self.scales.at[buffer]
        pltpu.make_async_copy(to, to, self._arrived.at[1, buffer]).wait()

    def advance(self, more, start_more: Callable, then, start_then: Callable):
        """Wait for the next buffer and begin to fill the other: by `start_more` if `more`, else by `start_then` if
        `then`. Returns the buffer to read.
        """
        buffer = self.state[0]
        pl.when(more)(lambda: start_more(1 - buffer))
        pl.when(~more & then)(lambda: start_then(1 - buffer))
        self.state[0] = 1 - buffer
        self.state[1] = (more | then).astype(jnp.int32)
        self.wait(buffer)
        return buffer
