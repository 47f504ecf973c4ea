"""Dense FP8 maps on CUDA GPUs (Triton): weights are widened in registers, 32 columns (one scale) at a time.

A program multiplies a tile of rows by a tile of output columns over a part of K. K is split when a map has few
outputs, so that every multiprocessor has loads in flight; the parts are added in order, in float32. The input is
quantised by XLA before: doing it in each program would cost more than widening the weights.

Weights are read as uint16, because an array of bytes between 2 and 4 GiB could not be addressed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from dsv41_jax import quant
from pallas_kernels import gpu_codes

BLOCK = quant.BLOCK
_PROGRAMS = 256  # wanted: about two for each multiprocessor


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Rows and output columns of a program; blocks of 32 columns of K a loop step takes."""

    rows: int
    columns: int
    blocks: int
    warps: int
    stages: int


def _tiles(n: int) -> _Tiles:
    if n <= 16:
        return _Tiles(16, 64, 4, 4, 4)
    if n <= 64:
        return _Tiles(32 if n <= 32 else 64, 64, 4, 4, 3)
    return _Tiles(128, 128, 2, 8, 3)


def _parts(blocks: int, step: int, programs: int) -> int:
    """Parts that K is split into: a divisor of its loop steps that gives about _PROGRAMS, 16 at most."""
    if blocks % step:
        return 1
    steps = blocks // step
    wanted = min(16, max(1, _PROGRAMS // programs))
    return max(parts for parts in range(1, wanted + 1) if steps % parts == 0)


def project(
    x: Array, weight: Array, scale: Array, layer: Array, *, groups: int, quantize: bool, interpret: bool = False
) -> Array:
    """See `quantized_linear.tpu.project`."""
    n, (_, out, width) = x.shape[0], weight.shape
    tiles = _tiles(n)
    height = out // groups
    across, down = pl.cdiv(height, tiles.columns), pl.cdiv(n, tiles.rows)
    parts = _parts(width // BLOCK, tiles.blocks, across * down * groups)
    pairs = jax.lax.bitcast_convert_type(weight.reshape(*weight.shape[:-1], width // 2, 2), jnp.uint16)
    rows = quant.fake_q8(x) if quantize else x
    y = pl.pallas_call(
        functools.partial(_kernel, tiles, n, height, width, parts),
        grid=(across * groups, down, parts),
        out_shape=jax.ShapeDtypeStruct((parts, n, out), jnp.bfloat16 if parts == 1 else jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="quantized_linear" if quantize else "grouped_linear",
    )(layer.reshape(1), rows, pairs, jax.lax.bitcast_convert_type(scale, jnp.uint8))
    if parts == 1:
        return y[0]
    return functools.reduce(jnp.add, [y[part] for part in range(parts)]).astype(jnp.bfloat16)


def _kernel(tiles: _Tiles, n: int, height: int, width: int, parts: int, layer_ref, x, pairs, scale, y):
    across, part = pl.cdiv(height, tiles.columns), pl.program_id(2)
    group = jax.lax.div(pl.program_id(0), across)
    column = (pl.program_id(0) - group * across) * tiles.columns + jnp.arange(tiles.columns)
    row = pl.program_id(1) * tiles.rows + jnp.arange(tiles.rows)
    there, real = (row < n)[:, None], column < height
    output = group * height + column
    layer, blocks = layer_ref[0], width // BLOCK
    half = jnp.arange(BLOCK // 2)

    def add(step: Array, total: Array) -> Array:
        for b in range(tiles.blocks):
            block = step * tiles.blocks + b
            inside = block < blocks
            k = block * BLOCK + jnp.arange(BLOCK)
            left = plt.load(x.at[row[:, None], (group * width + k)[None, :]], mask=there & inside, other=0.0)
            codes = plt.load(
                pairs.at[layer, output[:, None], (block * (BLOCK // 2) + half)[None, :]],
                mask=real[:, None] & inside,
                other=0,
            )
            byte = plt.load(scale.at[layer, jax.lax.div(output, BLOCK), block], mask=real & inside, other=127)
            factor = gpu_codes.e8m0(byte.astype(jnp.int32)) * gpu_codes.E4M3_UNIT
            matrix = (gpu_codes.e4m3_pairs(codes) * factor[:, None]).astype(jnp.bfloat16)
            total += plt.dot(left, matrix.T)
        return total

    steps = pl.cdiv(pl.cdiv(blocks, tiles.blocks), parts)
    zero = jnp.zeros((tiles.rows, tiles.columns), jnp.float32)
    total = jax.lax.fori_loop(part * steps, (part + 1) * steps, add, zero)
    plt.store(y.at[part, row[:, None], output[None, :]], total.astype(y.dtype), mask=there & real[None, :])
