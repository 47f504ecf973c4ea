"""Rows times the matrices of an expert in any storage, inside Triton kernels.

FP4 words lie [K/8, N] (`pack`): a load of 16 rows of words is 128 values of K, contiguous along N, and gives 8 planes
of 16 values: K 64 h + 4 r + p, r < 16, of half h and byte p. Inputs are stored in that order (`by_planes`), so that a
plane of them is contiguous too. A byte's low weight is the upper byte of a float16, and its high weight becomes that by
a rotation; subnormal weights are subnormal float16, which Triton converts exactly.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plt

from dsv41_jax import quant
from pallas_kernels import gpu_codes
from pallas_kernels.moe.pack import E5M2_UNIT, LANES, padded

_PLANE = 16
_COLUMNS = 2 * quant.BLOCK  # of K in a loop step of FP8 and bf16


class Place(NamedTuple):
    """Layer, expert, output columns [n] of a program, and how many columns there are."""

    layer: Array
    expert: Array
    column: Array
    columns: int


def arrays(leaf: dict[str, Array]) -> list[Array]:
    """What kernels read of a leaf: words and scales; FP8 as pairs of codes, and bytes of scales; bf16."""
    if "words" in leaf:
        return [leaf["words"], leaf["scales"]]
    weight = leaf["weight"]
    if "scale" not in leaf:
        return [weight]
    pairs = jax.lax.bitcast_convert_type(weight.reshape(*weight.shape[:-1], -1, 2), jnp.uint16)
    return [pairs, jax.lax.bitcast_convert_type(leaf["scale"], jnp.uint8)]


def by_planes(x: Array) -> Array:
    """[n, K] -> [n, padded K] in the order of the planes of FP4 words."""
    x = jnp.pad(x, ((0, 0), (0, padded(x.shape[1]) - x.shape[1])))
    return jnp.swapaxes(x.reshape(x.shape[0], -1, _PLANE, 4), -1, -2).reshape(x.shape)


def order(leaf: list, k: Array) -> Array:
    """Where kernels that read `leaf` look for column k of their input."""
    if leaf[0].dtype != jnp.int32:
        return k
    return (k & -64) | ((k & 3) << 4) | ((k >> 2) & 15)


def multiply(x, row: Array, leaves: list[list], place: Place) -> list[Array]:
    """x[row] (zeros where row is past the end) times each matrix: float32 [rows, columns]."""
    width, there = x.shape[1], (row < x.shape[0])[:, None]
    zero = jnp.zeros((row.shape[0], place.column.shape[0]), jnp.float32)
    packed = leaves[0][0].dtype == jnp.int32
    step = _add_packed if packed else _add_plain
    size = LANES if packed else _COLUMNS

    def add(i: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        def left(begin: int, n: int) -> Array:
            k = i * size + begin + jnp.arange(n)
            return plt.load(x.at[row[:, None], k[None, :]], mask=there & (k < width)[None, :], other=0.0)

        return step(left, leaves, place, i, totals)

    sums = jax.lax.fori_loop(0, -(-width // size), add, (zero,) * len(leaves))
    if packed or len(leaves[0]) == 1:
        return list(sums)
    return [total * _row_scale(leaf[1], place)[None, :] for total, leaf in zip(sums, leaves, strict=True)]


def _add_packed(left, leaves: list[list], place: Place, i: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
    """128 values of K."""
    layer, expert, column, _ = place
    r = jnp.arange(_PLANE)
    real = column < leaves[0][0].shape[3]
    codes = []
    for words, scales in leaves:
        packed = plt.load(
            words.at[layer, expert, (i * _PLANE + r)[:, None], column[None, :]], mask=real[None, :], other=0
        )
        exponents = plt.load(scales.at[layer, expert, i, column], mask=real, other=0x7F7F7F7F)
        codes.append((packed, [_scale(exponents, block) for block in range(4)]))
    totals = list(totals)
    for half in range(2):
        for byte in range(4):
            rows = left((half * 4 + byte) * _PLANE, _PLANE)
            for number, (packed, scale) in enumerate(codes):
                factor = jnp.where((r < 8)[:, None], scale[2 * half][None, :], scale[2 * half + 1][None, :])
                plane = (_halves(packed, half, byte) * factor).astype(jnp.bfloat16)
                totals[number] += plt.dot(rows, plane)
    return tuple(totals)


def _scale(exponents: Array, block: int) -> Array:
    """float32 scale of a byte of scale words, with the unit that `_halves` leaves out."""
    return gpu_codes.e8m0((exponents >> (8 * block)) & 0xFF) * E5M2_UNIT


def _halves(words: Array, half: int, byte: int) -> Array:
    """float32 weights / E5M2_UNIT of the low (0) or high (1) code of a byte of words."""

    def field(mask: int, up: int) -> Array:
        moved = words << up if up >= 0 else words >> -up
        return moved & mask

    if half == 0:
        bits = field(0x8E00, 8 - 8 * byte)
    else:
        bits = field(0x8000, 15 - 8 * byte) | field(0x0E00, 5 - 8 * byte)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.float16).astype(jnp.float32)


def _add_plain(left, leaves: list[list], place: Place, i: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
    """64 values of K of FP8 (without its scale) or bf16 matrices [N, K]."""
    layer, expert, column, columns = place
    rows = left(0, _COLUMNS)
    sums = []
    for (weight, *_), total in zip(leaves, totals, strict=True):
        n = _COLUMNS if weight.dtype == jnp.bfloat16 else _COLUMNS // 2
        k = i * n + jnp.arange(n)
        mask = (column < columns)[:, None] & (k < weight.shape[3])[None, :]
        matrix = plt.load(weight.at[layer, expert, column[:, None], k[None, :]], mask=mask, other=0)
        if weight.dtype != jnp.bfloat16:
            matrix = gpu_codes.e4m3_pairs(matrix).astype(jnp.bfloat16)
        sums.append(total + plt.dot(rows, matrix.T))
    return tuple(sums)


def _row_scale(scale, place: Place) -> Array:
    """float32 [columns]: FP8's scale of each output, with the unit that the codes leave out."""
    layer, expert, column, columns = place
    byte = plt.load(scale.at[layer, expert, column, 0], mask=column < columns, other=127)
    return gpu_codes.e8m0(byte.astype(jnp.int32)) * gpu_codes.E4M3_UNIT
