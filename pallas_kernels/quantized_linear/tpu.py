"""Dense FP8 maps on the TPU (Mosaic): weights stay E4M3 in HBM and are widened a block at a time in registers.

Rows of a block of weights are multiplied by their scales while they are widened, so that any number of partial sums can
stay in the matrix unit; a bf16 operand holds the product of an E4M3 value and a power of two exactly.

How E4M3 is widened depends on the chip. Generation 7 converts it in hardware. The older ones convert E4M3 of exponent
bias 11 (`float8_e4m3b11fnuz`) in hardware, which has the same bits for values 16 times smaller, subnormals included;
only the byte 0x80 is not a number there, and is made a plain zero first.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dsv41_jax import quant
from pallas_kernels.implementation import traced_once

BLOCK = quant.BLOCK
Q8_FLOOR = 1e-4  # of `quant.q8`
LANES = 128
ROWS = 512  # of the input that one grid step multiplies
WEIGHT_BYTES = 2 << 20  # of weights that one grid step reads, about
INNER_WEIGHTS = 5 << 17  # that a pass of the inner loop multiplies, about: enough to hide how a matmul starts and ends
VMEM_BYTES = 52 << 20


def generation() -> tuple[int, int]:
    """Generation of the TPU that is compiled for, and its cores; (5, 1) where nothing says which it is."""
    try:
        info = pltpu.get_tpu_info()
    except ValueError:  # no TPU here, and no mesh of TPUs in the context
        return 5, 1
    return info.generation, info.num_cores


@traced_once("groups", "quantize", "interpret", "chip")
def project(
    x: Array,
    weight: Array,
    scale: Array,
    layer: Array,
    *,
    groups: int,
    quantize: bool,
    interpret: bool,
    chip: tuple[int, int] | None = None,
) -> Array:
    """x [n, groups * K] times weight [L, N, K] of a layer -> bf16 [n, N].

    Args:
        weight: float8_e4m3fn; rows g * N / groups .. belong to group g.
        scale: float8_e8m0fnu [L, N/32, K/32]. Exact for 2^-117 to 2^119.
        quantize: Q8 of the input first.
        chip: generation and cores; by default those of the TPU that is compiled for.
    """
    chip = generation() if chip is None else chip
    scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)[layer]
    n, out = x.shape[0], weight.shape[1]
    width, height = weight.shape[2], out // groups
    if width % LANES or height % LANES:  # small models; released shapes are multiples
        (weight, scale), layer = _padded(weight[layer], scale, groups), jnp.int32(0)
        x = _pad(x.reshape(n, groups, width), 2, LANES).reshape(n, -1)
    x = _pad(x.astype(jnp.bfloat16), 0, 16 if n <= ROWS else ROWS)
    y = _call(x, weight, scale, layer, groups, quantize, chip, interpret)
    return y[:n].reshape(n, groups, -1)[:, :, :height].reshape(n, out)


def _pad(x: Array, axis: int, multiple: int) -> Array:
    missing = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)]) if missing else x


def _padded(weight: Array, scale: Array, groups: int) -> tuple[Array, Array]:
    """A layer with rows of a group and columns in multiples of a tile: weight [1, N, K], scale [N/32, K/32]."""
    weight = jax.lax.bitcast_convert_type(weight, jnp.uint8)
    weight, scale = (a.reshape(groups, -1, a.shape[-1]) for a in (weight, scale))
    weight, scale = (_pad(_pad(a, 1, m), 2, m) for a, m in ((weight, LANES), (scale, LANES // BLOCK)))
    weight = jax.lax.bitcast_convert_type(weight, jnp.float8_e4m3fn)
    return weight.reshape(1, -1, weight.shape[-1]), scale.reshape(-1, scale.shape[-1])


def _divisor(n: int, most: int) -> int:
    """The largest divisor of n that is a multiple of LANES and at most `most` (LANES at least)."""
    return max(d for d in range(LANES, n + 1, LANES) if n % d == 0 and (d <= most or d == LANES))


def _call(x, weight, scale, layer, groups, quantize, chip, interpret):
    n, (_, out, width) = x.shape[0], weight.shape
    parts = groups
    if groups == 1 and out % (2 * LANES) == 0:
        parts = chip[1]  # each core quantises the input for itself
    height = out // parts
    tall = _divisor(height, min(WEIGHT_BYTES // width, height // 4))  # at least four steps: copies overlap with work
    rows = min(n, ROWS)
    inner = INNER_WEIGHTS if rows <= LANES else INNER_WEIGHTS // 2
    step = _divisor(tall, max(2 * LANES, min(4 * LANES, inner // width)))
    depth = _divisor(width, inner // step)
    steps = height // tall
    factors = _factors(scale, chip[0]).reshape(out // step, step // BLOCK, width // BLOCK)
    kernel = functools.partial(_kernel, step=step, depth=depth, quantize=quantize, generation=chip[0])
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(parts, n // rows, steps),
            in_specs=[
                pl.BlockSpec((rows, width), lambda p, m, i, layer: (m, p if groups > 1 else 0)),
                pl.BlockSpec((1, tall, width), lambda p, m, i, layer: (layer[0], p * steps + i, 0)),
                pl.BlockSpec((tall // step, *factors.shape[1:]), lambda p, m, i, layer: (p * steps + i, 0, 0)),
            ],
            out_specs=pl.BlockSpec((rows, tall), lambda p, m, i, layer: (m, p * steps + i)),
            scratch_shapes=[pltpu.VMEM((tall // step, step // BLOCK, width), jnp.int32)]
            + [pltpu.VMEM((rows, width), jnp.bfloat16)] * quantize,
        ),
        out_shape=jax.ShapeDtypeStruct((n, out), jnp.bfloat16),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="quantized_linear" if quantize else "grouped_linear",
    )(jnp.reshape(layer, 1).astype(jnp.int32), x, weight, factors)


def _kernel(layer_ref, x_ref, weight_ref, factors_ref, y_ref, spread_ref, *scratch, step, depth, quantize, generation):
    tall, width = weight_ref.shape[1:]
    if quantize:
        lhs_ref = scratch[0]

        @pl.when(pl.program_id(2) == 0)
        def _():
            _q8(x_ref, lhs_ref)
    else:
        lhs_ref = x_ref

    def spread(j, _):
        for k in range(0, width, LANES):
            spread_ref[j, :, k : k + LANES] = _spread(factors_ref, j, k)

    jax.lax.fori_loop(0, tall // step, spread, None)

    def columns(j, _):
        def add(k, total):
            pieces = [_widen(weight_ref, spread_ref, j, r, k, depth, generation) for r in range(0, step, BLOCK)]
            lhs = lhs_ref[:, pl.ds(pl.multiple_of(k * depth, depth), depth)]
            return total + jax.lax.dot_general(
                lhs, jnp.concatenate(pieces), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )

        zero = jnp.zeros((lhs_ref.shape[0], step), jnp.float32)
        total = jax.lax.fori_loop(0, width // depth, add, zero)
        y_ref[:, pl.ds(pl.multiple_of(j * step, step), step)] = total.astype(jnp.bfloat16)

    jax.lax.fori_loop(0, tall // step, columns, None)


def _factors(exponents: Array, generation: int) -> Array:
    """Words of UE8M0 scales, as `_widen` multiplies by them: float32, or bf16 twice where the chip multiplies bf16."""
    exponents = exponents.astype(jnp.int32)
    if generation < 7:
        exponents = exponents + 4  # the other bias
    if generation < 6:
        return exponents << 23
    return (exponents << 23) | (exponents << 7)


def _spread(factors_ref, j: Array, column: int) -> Array:
    """Factors of the 128 columns from `column`, one per lane: int32 [step / 32, 128]."""
    first = column // BLOCK
    start = first // LANES * LANES
    tile = factors_ref[j, :, start : min(start + LANES, factors_ref.shape[2])]
    tile = jnp.pad(tile, ((0, 0), (0, LANES - tile.shape[1])))
    lane = jax.lax.broadcasted_iota(jnp.int32, tile.shape, 1)
    return jnp.take_along_axis(tile, (lane >> 5) + first % LANES, axis=1)


def _widen(weight_ref, spread_ref, j: Array, row: int, k: Array, depth: int, generation: int) -> Array:
    """32 rows of the weights from row `row` of part j, columns k * depth .., times their factors: bf16, exact."""
    step = spread_ref.shape[1] * BLOCK
    begin = pl.multiple_of(k * depth, depth)
    weight = weight_ref[0, pl.ds(pl.multiple_of(j * step, step) + row, BLOCK), pl.ds(begin, depth)]
    rows = [
        jnp.broadcast_to(spread_ref[j, row // BLOCK : row // BLOCK + 1, pl.ds(begin + c, LANES)], (8, LANES))
        for c in range(0, depth, LANES)  # a tile at a time: one load each
    ]
    factor = jnp.concatenate(rows, axis=1)
    if generation < 7:
        words = pltpu.bitcast(weight, jnp.int32)
        words &= ((words & 0x7F7F7F7F) + 0x7F7F7F7F) | 0x7F7F7F7F  # the sign of a zero
        weight = pltpu.bitcast(words, jnp.float8_e4m3b11fnuz)
    if generation < 6:
        factor = pltpu.bitcast(factor, jnp.float32)
        return (weight.astype(jnp.float32) * jnp.concatenate([factor] * 4)).astype(jnp.bfloat16)
    return weight.astype(jnp.bfloat16) * jnp.concatenate([pltpu.bitcast(factor, jnp.bfloat16)] * 2)


def _q8(x_ref, codes_ref):
    """`quant.fake_q8` of bf16 [rows, n], in steps that the TPU has.

    A block's scale depends on its largest exponent only, after 1.75 2^e < |x| < 2^(e+1) count as 2^(e+1). The matrix
    unit finds it: sums of 32 numbers 2^(8 e) have it in their upper exponent bits, in every lane of the block. That
    takes 32 exponents, 2^-14 (the floor of the quantiser) to 2^17; larger inputs compare lane with lane.
    """
    rows, width = x_ref.shape
    together = _divisor(width, 10 * LANES if rows <= LANES else LANES)

    def columns(i: Array) -> list:
        return [pl.ds(pl.multiple_of(i * together, together) + c, LANES) for c in range(0, together, LANES)]

    def compare(i, largest):
        return functools.reduce(jnp.maximum, [jnp.abs(x_ref[:, here]) for here in columns(i)], largest)

    largest = jax.lax.fori_loop(0, width // together, compare, jnp.zeros((rows, LANES), jnp.bfloat16))
    usual = jnp.max(largest.astype(jnp.float32)) <= 1.75 * 2**17

    def each_tile(scale_of):
        def several(i, _):
            for here in columns(i):
                x = x_ref[:, here].astype(jnp.float32)
                codes_ref[:, here] = _rounded(x, scale_of(x))

        jax.lax.fori_loop(0, width // together, several, None)

    @pl.when(usual)
    def _():
        row, lane = (jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
        same_block = ((row >> 5) == (lane >> 5)).astype(jnp.bfloat16)

        def scale_of(x: Array) -> Array:
            exponent = (pltpu.bitcast(x, jnp.int32) & 0x7FFFFFFF) + 0x1FFFFF
            exponent = jnp.maximum(exponent, 113 << 23) & 0x7F800000
            power = pltpu.bitcast(((exponent - (113 << 23)) << 3) + (1 << 23), jnp.float32)
            total = jnp.dot(power.astype(jnp.bfloat16), same_block, preferred_element_type=jnp.float32)
            return (((pltpu.bitcast(total, jnp.int32) - (1 << 23)) >> 3) & (31 << 23)) + (105 << 23)

        each_tile(scale_of)

    @pl.when(jnp.logical_not(usual))
    def _():
        def scale_of(x: Array) -> Array:
            lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
            peak = jnp.abs(x)
            for distance in (1, 2, 4, 8, 16):
                peak = jnp.maximum(peak, jnp.take_along_axis(peak, lane ^ distance, axis=1))
            ratio = jnp.maximum(peak, Q8_FLOOR) * jnp.float32(1.0 / quant.E4M3_MAX)
            return (pltpu.bitcast(ratio, jnp.int32) + 0x7FFFFF) & 0x7F800000

        each_tile(scale_of)


def _rounded(x: Array, scale: Array) -> Array:
    """x / scale rounded to E4M3, times scale, in bf16; `scale` is the bits of a power of two, at least |x| / 448."""
    value = x * pltpu.bitcast((254 << 23) - scale, jnp.float32)
    # A number whose last bit is worth what the last bit of the E4M3 code is: adding it rounds to nearest even.
    coarse = jnp.maximum(pltpu.bitcast(value, jnp.int32) & 0x7F800000, 121 << 23) + ((20 << 23) | 0x400000)
    coarse = pltpu.bitcast(coarse, jnp.float32)
    return (((value + coarse) - coarse) * pltpu.bitcast(scale, jnp.float32)).astype(jnp.bfloat16)
