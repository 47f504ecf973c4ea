"""A tile's rows times packed FP4 weights, inside a TPU kernel.

One AND (or five operations for the other half) turns a word of weights into four float8_e5m2, which the matrix unit
takes as they are beside a bf16 left operand. Scales differ by 32 values of K and by column. For few rows they multiply
sums, not weights: the left operand of 128 values of K is block diagonal, so that the four blocks' sums come out apart.
For many rows, where the matrix unit has no rows to spare, the weights are widened to bf16 and multiplied.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.moe.pack import E5M2_UNIT, LANES

_FEW_ROWS = 16
_BLOCKS = 4  # of 32 values of K, in 128
_WORDS = 16  # rows of words that hold 128 values of K
# Of weights, 128 x 128, in a loop's body: enough to hide what starts and ends a matmul. Many rows hide it anyway.
_TILES_AT_ONCE = 60
_ROWS_AT_ONCE = 2048  # times tiles (or pairs of them)


def scratch(height: int, k: int, columns: int) -> list:
    """What `multiply` needs: the left operand, and scales as float32."""
    depth = k // LANES
    if height <= _FEW_ROWS:
        lhs = depth, _BLOCKS * height, LANES
    else:  # newer matrix units are 256 deep
        pair = 2 if depth % 2 == 0 else 1
        lhs = depth // pair, height, pair * LANES
    return [pltpu.VMEM(lhs, jnp.bfloat16), pltpu.VMEM((columns // LANES, _BLOCKS * depth, LANES), jnp.float32)]


def multiply(x, matrices: list, sums: list, lhs, factors) -> None:
    """sums[i] float32 [M, columns] = x bf16 [1, M, K] times matrices[i], a pair of references to words and scales
    [1, 1, rows, columns]."""
    height, depth = x.shape[1], lhs.shape[0]
    few = lhs.shape[1] > height
    _spread_rows(x, lhs)
    columns = sums[0].shape[1] // LANES
    together = max(c for c in (1, 2, 3, 4, 5) if columns % c == 0)
    most = _TILES_AT_ONCE if few else max(together, _ROWS_AT_ONCE // height)
    unroll = max(u for u in range(1, depth + 1) if depth % u == 0 and u * together <= most)
    for (words, scales), total in zip(matrices, sums, strict=True):
        _factors(scales, factors)
        add = functools.partial(_few if few else _many, words, lhs, factors, together=together)

        def group(g, _, add=add, total=total):
            def step(i, acc):
                for u in range(unroll):
                    acc = add(g, i * unroll + u, acc)
                return acc

            zeros = (jnp.zeros((height, LANES), jnp.float32),) * together
            acc = jax.lax.fori_loop(0, depth // unroll, step, zeros)
            start = pl.multiple_of(g * (together * LANES), LANES)
            total[:, pl.ds(start, together * LANES)] = jnp.concatenate(acc, axis=1)
            return 0

        jax.lax.fori_loop(0, columns // together, group, 0)


def _spread_rows(x, lhs) -> None:
    """lhs[t] = 128 or 256 columns of x, times 2^14; for few rows block diagonal: row j * M + m is block j of row m."""
    height, width = x.shape[1], lhs.shape[2]
    lane = jax.lax.broadcasted_iota(jnp.int32, (height, width), 1)
    for t in range(lhs.shape[0]):
        part = x[0, :, t * width : (t + 1) * width].astype(jnp.float32) * E5M2_UNIT
        if lhs.shape[1] > height:
            part = jnp.concatenate([jnp.where(lane >> 5 == j, part, 0.0) for j in range(_BLOCKS)])
        lhs[t] = part.astype(jnp.bfloat16)


def _factors(scales, factors) -> None:
    """factors[c, j * depth + t] = scales of block j of the 128 values of K from 128 t on, columns 128 c on."""
    depth = factors.shape[1] // _BLOCKS
    for c in range(factors.shape[0]):
        words = scales[0, 0, :depth, c * LANES : (c + 1) * LANES]
        for j in range(_BLOCKS):
            bits = words << (23 - 8 * j) if j < 3 else jax.lax.shift_right_logical(words, np.int32(1))
            factors[c, j * depth : (j + 1) * depth] = pltpu.bitcast(bits & 0x7F800000, jnp.float32)


def _four(byte: int) -> np.int32:
    return np.uint32(byte * 0x01010101).view(np.int32)


def _halves(words, g: Array, t: Array, together: int) -> list[Array]:
    """The two halves of 128 values of K: float8_e5m2 [64, together * 128] each, times 2^-14."""
    here = pl.ds(pl.multiple_of(t * _WORDS, _WORDS), _WORDS), pl.ds(g * (together * LANES), together * LANES)
    word = words[0, 0, *here]
    low = word & _four(0x8E)
    high = (jax.lax.shift_right_logical(word, np.int32(3)) & _four(0x0E)) | ((word << 7) & _four(0x80))
    return [pltpu.bitcast(half, jnp.float8_e5m2) for half in (low, high)]


def _few(words, lhs, factors, g: Array, t: Array, acc: tuple, *, together: int) -> tuple:
    """acc + the products of 128 values of K, by sums of each block."""
    height, depth = lhs.shape[1] // _BLOCKS, lhs.shape[0]
    weights = jnp.concatenate(_halves(words, g, t, together))
    parts = jax.lax.dot_general(lhs[t], weights, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    out = []
    for c, total in enumerate(acc):
        part = parts[:, c * LANES : (c + 1) * LANES]
        scaled = [
            part[j * height : (j + 1) * height] * factors[g * together + c, pl.ds(j * depth + t, 1), :]
            for j in range(_BLOCKS)
        ]
        out.append(total + ((scaled[0] + scaled[1]) + (scaled[2] + scaled[3])))
    return tuple(out)


def _many(words, lhs, factors, g: Array, t: Array, acc: tuple, *, together: int) -> tuple:
    """acc + the products of 128 or 256 values of K, by widened weights."""
    pair, depth = lhs.shape[2] // LANES, factors.shape[1] // _BLOCKS
    wide = []
    for tile in [t * pair + p for p in range(pair)]:
        for number, half in enumerate(_halves(words, g, tile, together)):
            for block in range(2):
                j = 2 * number + block
                rows = [factors[g * together + c, pl.ds(j * depth + tile, 1), :] for c in range(together)]
                part = half[32 * block : 32 * block + 32].astype(jnp.float32)
                wide.append((part * jnp.concatenate(rows, axis=1)).astype(jnp.bfloat16))
    total = jnp.dot(lhs[t], jnp.concatenate(wide), preferred_element_type=jnp.float32)
    return tuple(a + total[:, c * LANES : (c + 1) * LANES] for c, a in enumerate(acc))
