"""Routed experts on CUDA GPUs (Triton): two kernels, each one pass over the matrices of the experts that have rows.

    gate_up   w1 and w3 of a tile of rows, SwiGLU, routing weight and Q8
    down      w2

Rows are gathered by their token while they are loaded, and tiles without rows end at once. There are thousands of
programs (tiles of rows times tiles of columns), so K is not split.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from dsv41_jax import quant
from pallas_kernels import gpu_codes
from pallas_kernels.moe import gpu_weights
from pallas_kernels.moe.groups import Groups, group_rows, place_weights

Leaf = dict[str, Array]

BLOCK = quant.BLOCK
_Q8_FLOOR = 1e-4


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Rows and output columns of a program, warps, software pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


def _tiles(rows: int, n_experts: int) -> _Tiles:
    """By the mean load: decoding streams weights, prefill reuses them."""
    if rows // n_experts <= 16:
        return _Tiles(16, 64, 4, 3)
    return _Tiles(64, 64, 4, 3)


def experts(
    x: Array,
    chosen: Array,
    weights: Array,
    w1: Leaf,
    w3: Leaf,
    w2: Leaf,
    layer: Array | int,
    *,
    limit: float,
    share: int = 1,
    interpret: bool,
) -> Array:
    """See `pallas_kernels.moe.experts`."""
    d, n_experts = x.shape[1], next(iter(w1.values())).shape[1]
    inter = w1["words"].shape[-1] if "words" in w1 else w1["weight"].shape[-2]
    tiles = _tiles(chosen.size // share, n_experts)
    groups = group_rows(chosen, n_experts, tiles.rows)
    rows = quant.fake_q8(x)
    if "words" in w1:
        rows = gpu_weights.by_planes(rows)
    call = functools.partial(_call, tiles, groups, jnp.asarray(layer, jnp.int32), interpret=interpret)
    finish = functools.partial(_gate_up, limit, interpret)
    weight = place_weights(weights, groups).reshape(-1)
    hidden = call(finish, rows, groups.source, (w1, w3), weight, columns=inter, name="moe_gate_up")
    slots = jnp.arange(groups.source.shape[0], dtype=jnp.int32)
    out = call(None, hidden, slots, (w2,), None, columns=d, name="moe_down")
    return out[groups.position]


def _call(
    tiles: _Tiles,
    groups: Groups,
    layer: Array,
    finish: Callable | None,
    x: Array,
    source: Array,
    leaves: tuple[Leaf, ...],
    weight: Array | None,
    *,
    columns: int,
    name: str,
    interpret: bool,
) -> Array:
    """Rows x[source] times each matrix, by tiles -> bf16 [slots, columns]: finish(sums, weight), or the only sum."""
    arrays = [array for leaf in leaves for array in gpu_weights.arrays(leaf)]
    scalars = [jnp.stack([layer, groups.used[0]]), groups.expert, source]
    return pl.pallas_call(
        functools.partial(_kernel, tiles, finish, len(leaves), weight is not None, columns),
        grid=(pl.cdiv(columns, tiles.columns), groups.expert.shape[0]),
        out_shape=jax.ShapeDtypeStruct((source.shape[0], columns), jnp.bfloat16),
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name=name,
    )(*scalars, x, *([] if weight is None else [weight]), *arrays)


def _kernel(tiles, finish, matrices, weighted, columns, scalars, expert, source, x, *refs):
    *refs, out = refs
    weight, arrays = (refs[0], refs[1:]) if weighted else (None, refs)
    each = len(arrays) // matrices
    leaves = [arrays[i : i + each] for i in range(0, len(arrays), each)]
    column = pl.program_id(0) * tiles.columns + jnp.arange(tiles.columns)
    tile = pl.program_id(1)

    @pl.when(tile < scalars[1])
    def _():
        slot = tile * tiles.rows + jnp.arange(tiles.rows)
        place = gpu_weights.Place(scalars[0], plt.load(expert.at[tile]), column, columns)
        sums = gpu_weights.multiply(x, plt.load(source.at[slot]), leaves, place)
        if weighted:
            result, at = finish(sums, plt.load(weight.at[slot])), gpu_weights.order(leaves[0], column)
        else:
            result, at = sums[0].astype(jnp.bfloat16), column
        plt.store(out.at[slot[:, None], at[None, :]], result, mask=(column < columns)[None, :])


def _gate_up(limit: float, interpret: bool, sums: list[Array], weight: Array) -> Array:
    """Q8 of bf16(SwiGLU * weight): bf16 [rows, columns]."""
    gate, up = (gpu_codes.rounded(total, interpret) for total in sums)
    if limit > 0:
        gate, up = jnp.minimum(gate, limit), jnp.minimum(jnp.maximum(up, -limit), limit)
    x = gpu_codes.rounded(gate / (1.0 + jnp.exp(-gate)) * up * weight[:, None], interpret)
    blocks = x.reshape(x.shape[0], -1, BLOCK)
    ratio = jnp.maximum(jnp.max(jnp.abs(blocks), axis=2), _Q8_FLOOR) * jnp.float32(1.0 / quant.E4M3_MAX)
    scale = gpu_codes.power_at_least(ratio)[:, :, None]
    value = blocks * gpu_codes.e8m0(254 - scale)  # |value| <= 448
    # A number whose last bit is worth what the last bit of the E4M3 code is: adding it rounds to nearest even.
    exponent = jnp.maximum(jax.lax.bitcast_convert_type(value, jnp.int32) & 0x7F800000, 121 << 23)
    coarse = jax.lax.bitcast_convert_type(exponent + ((20 << 23) | 0x400000), jnp.float32)
    return (((value + coarse) - coarse) * gpu_codes.e8m0(scale)).reshape(x.shape).astype(jnp.bfloat16)
