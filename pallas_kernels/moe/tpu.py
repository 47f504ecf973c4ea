"""Routed experts on the TPU (Mosaic): two grouped matmuls, the first with SwiGLU, routing weight and Q8 in it.

Rows lie in tiles of one expert; the grid goes over blocks of output columns, then over tiles. A step picks its layer
and expert by prefetched scalars, so a block of weights is copied from the stacked array once for all consecutive tiles
of an expert. Steps of unused tiles repeat the last block: nothing is copied or computed for them. Where most tiles are
unused (most pairs are for other devices), the grid ends with the used ones.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dsv41_jax import quant
from pallas_kernels.flops import ONE_HOT_SCOPE
from pallas_kernels.implementation import traced_once
from pallas_kernels.moe import tpu_fp4
from pallas_kernels.moe.groups import Groups, group_rows, place_weights, take_rows
from pallas_kernels.moe.pack import LANES, padded

Leaf = dict[str, Array]

_LEAST_HEIGHT, _MOST_HEIGHT = 8, 128  # rows of a tile: a register's, and what a matrix unit takes well
_BLOCK_BYTES = 6 << 20  # of one matrix in a grid step, at most (and twice that for the copy ahead)
_VMEM_BYTES = 56 << 20
_FEW_TOKENS = 256
_Q8_FLOOR = 1e-4  # of `quant.q8`


def tile_height(rows: int, n_experts: int) -> int:
    """Rows of a tile: about the mean load of an expert, a power of two."""
    mean = max(1, rows // n_experts)
    return min(_MOST_HEIGHT, max(_LEAST_HEIGHT, 1 << (mean - 1).bit_length()))


@traced_once("limit", "share", "interpret")
def experts(
    x: Array,
    chosen: Array,
    weights: Array,
    w1: Leaf,
    w3: Leaf,
    w2: Leaf,
    layer,
    *,
    limit: float,
    share: int,
    interpret: bool,
) -> Array:
    """See `pallas_kernels.moe.experts`."""
    d = x.shape[1]
    n_experts = next(iter(w1.values())).shape[1]
    groups = group_rows(chosen, n_experts, tile_height(chosen.size // share, n_experts))
    rows = _tiled(quant.fake_q8(x), groups)
    weight = place_weights(weights, groups)
    tiles = groups.expert.shape[0] if share == 1 else jnp.maximum(groups.used[0], 1)
    call = functools.partial(_call, groups=groups, tiles=tiles, layer=layer, interpret=interpret)
    hidden = call(functools.partial(_gate_up, limit=limit), rows, (w1, w3), weight, name="moe_gate_up")
    out = call(_down, hidden, (w2,), None, name="moe_down")
    return out[..., :d].reshape(-1, d)[groups.position]


def _tiled(x: Array, groups: Groups) -> Array:
    """`take_rows`; for few tokens as an exact product with ones and zeros, which XLA does faster than a gather."""
    if x.shape[0] > _FEW_TOKENS:
        return take_rows(x, groups.source, groups.height)
    pick = (groups.source[:, None] == jnp.arange(x.shape[0])).astype(jnp.bfloat16)
    with jax.named_scope(ONE_HOT_SCOPE):
        rows = jnp.einsum("sn,nd->sd", pick, x, preferred_element_type=jnp.float32)
    return rows.astype(jnp.bfloat16).reshape(-1, groups.height, x.shape[1])


def _layer_scale(leaf: Leaf, layer: Array) -> Array:
    """FP8 scales of a layer, one for each output: float32 [E, 1, N]."""
    return jnp.swapaxes(quant.e8m0_to_f32(leaf["scale"][layer]), -1, -2)


def _columns(n: int, bytes_a_column: int) -> int:
    """Output columns of a block: a divisor of n in multiples of 128 that fits; at least two blocks, for two cores."""
    if n % LANES:
        return n
    fits = [c for c in range(LANES, n + 1, LANES) if n % c == 0 and c * bytes_a_column <= _BLOCK_BYTES]
    halves = [c for c in fits if n // c % 2 == 0]
    return max(halves or fits or [LANES])


def _call(
    finish,
    x: Array,
    leaves: tuple[Leaf, ...],
    weight: Array | None,
    *,
    groups: Groups,
    tiles: Array | int,
    layer: Array | int,
    interpret: bool,
    name: str,
) -> Array:
    """finish(sums of each matrix, weight) of the first `tiles` tiles of x [tiles, height, K] -> bf16 [tiles, height,
    N].
    """
    layer = jnp.asarray(layer, jnp.int32)
    _, height, k = x.shape
    packed = "words" in leaves[0]
    if packed:
        kp, n = padded(k), leaves[0]["words"].shape[-1]
        x = jnp.pad(x, ((0, 0), (0, 0), (0, kp - k)))
        columns = _columns(n, kp // 2)
        arrays = [array for leaf in leaves for array in (leaf["words"], leaf["scales"])]
        blocks = [(1, 1, array.shape[2], columns) for array in arrays]
    else:
        kp, n = k, leaves[0]["weight"].shape[-2]
        columns = _columns(n, k * leaves[0]["weight"].dtype.itemsize)
        arrays = [leaf["weight"] for leaf in leaves]
        blocks = [(1, 1, columns, k) for _ in arrays]
    steps = n // columns

    def tile(j, i, layer, expert, used):
        return jnp.minimum(i, jnp.maximum(used[0] - 1, 0))

    def rows(j, i, *scalars):
        return tile(j, i, *scalars), 0, 0

    def block(axis, j, i, layer, expert, used):
        place = [0, 0]
        place[axis] = j
        return layer[0], expert[i], *place

    def scale_block(j, i, layer, expert, used):
        return expert[i], 0, j

    in_specs = [pl.BlockSpec((1, height, kp), rows)]
    in_specs += [pl.BlockSpec(shape, functools.partial(block, 1 if packed else 0)) for shape in blocks]
    if not packed and "scale" in leaves[0]:
        arrays += [_layer_scale(leaf, layer) for leaf in leaves]
        in_specs += [pl.BlockSpec((1, 1, columns), scale_block) for _ in leaves]
    if weight is not None:
        arrays.append(weight)
        in_specs.append(pl.BlockSpec((1, height, 1), rows))
    scratch = [pltpu.VMEM((height, columns), jnp.float32) for _ in leaves]
    if packed:
        scratch += tpu_fp4.scratch(height, kp, columns)
    return pl.pallas_call(
        functools.partial(_kernel, finish, len(leaves), packed, weight is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(steps, tiles),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((1, height, columns), lambda j, i, *scalars: (tile(j, i, *scalars), 0, j)),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], height, n), jnp.bfloat16),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        interpret=interpret,
        name=name,
    )(layer[None], groups.expert, groups.used, x, *arrays)


def _kernel(finish, matrices: int, packed: bool, weighted: bool, layer, expert, used, x, *refs):
    refs = list(refs)
    arrays = [refs.pop(0) for _ in range(2 * matrices if packed else matrices)]
    scales = [refs.pop(0) for _ in range(len(refs) - 1 - matrices - weighted)] if not packed else []
    weight = refs.pop(0) if weighted else None
    out, *scratch = refs
    sums, scratch = scratch[:matrices], scratch[matrices:]

    @pl.when(pl.program_id(1) < used[0])
    def _():
        if packed:
            tpu_fp4.multiply(x, list(zip(arrays[::2], arrays[1::2], strict=True)), sums, *scratch)
        else:
            for number, (array, total) in enumerate(zip(arrays, sums, strict=True)):
                total[...] = _plain(x[0], array[0, 0], scales[number][0] if scales else None)
        finish(sums, None if weight is None else weight[0], out)


def _plain(x: Array, matrix: Array, scale: Array | None) -> Array:
    """x [M, K] times matrix [N, K] and scale [1, N], if any -> float32 [M, N]."""
    contract = (((1,), (1,)), ((), ()))
    total = jax.lax.dot_general(x, matrix, contract, preferred_element_type=jnp.float32)
    return total if scale is None else total * scale


def _round(x: Array) -> Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _gate_up(sums, weight: Array, out, *, limit: float) -> None:
    """Q8 of bf16(SwiGLU * weight), 128 columns at a time."""
    for c in range(0, out.shape[2], LANES):
        here = slice(c, min(c + LANES, out.shape[2]))
        gate, up = (_round(total[:, here]) for total in sums)
        if limit > 0:
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        out[0, :, here] = _q8(_round(jax.nn.silu(gate) * up * weight))


def _down(sums, weight: None, out) -> None:
    out[0] = sums[0][...].astype(jnp.bfloat16)


def _q8(x: Array) -> Array:
    """`quant.fake_q8` of float32 [rows, lanes], in steps that the TPU has: bf16."""
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    peak = jnp.abs(x)
    for distance in (1, 2, 4, 8, 16):  # the largest of 32 lanes, in each of them
        ahead, behind = pltpu.roll(peak, x.shape[1] - distance, 1), pltpu.roll(peak, distance, 1)
        peak = jnp.maximum(peak, jnp.where(lane & distance == 0, ahead, behind))
    ratio = jnp.maximum(peak, _Q8_FLOOR) * jnp.float32(1.0 / quant.E4M3_MAX)
    scale = (_bits(ratio) + 0x7FFFFF) & 0x7F800000  # the power of two at or above
    value = x * _float((254 << 23) - scale)  # |value| <= 448
    # A number whose last bit is worth what the last bit of the E4M3 code is: adding it rounds to nearest even.
    coarse = _float(jnp.maximum(_bits(value) & 0x7F800000, 121 << 23) + ((20 << 23) | 0x400000))
    return (((value + coarse) - coarse) * _float(scale)).astype(jnp.bfloat16)


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
