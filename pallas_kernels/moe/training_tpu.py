"""Routed experts for training on TPUs: JAX's own grouped matmuls in Mosaic (`jax.experimental.pallas.ops.tpu.megablox`)
around arithmetic that XLA fuses.

`megablox.gmm` multiplies sorted rows by the matrix of their group, `tgmm` gives the gradient of the matrices; both skip
unused tiles. XLA's `ragged_dot` is no help: its weight gradient computes every expert on every row. All tiled rows are
in memory at a time; the rounds of `expert_rounds` bound them.
"""

import functools
import importlib

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu import megablox

from pallas_kernels.moe.groups import Groups, take_rows
from pallas_kernels.moe.training_tile import Options, hidden

_kernels = importlib.import_module(f"{megablox.__name__}.gmm")  # its name is hidden by the function `megablox.gmm`
_ROWS = (512, 256, 128)  # of a block: the first that divides all rows
_COLUMNS = 512  # of a block, contracted and output
_LANES = 128


def takes(dtype: jnp.dtype, groups: Groups, inter: int, width: int) -> bool:
    """Whether the kernels take such tiles and matrices."""
    rows = groups.source.shape[0]
    return dtype == jnp.bfloat16 and rows % _ROWS[-1] == 0 and inter % _LANES == 0 and width % _LANES == 0


def forward(
    options: Options, x: Array, weight: Array, groups: Groups, w13: Array, w2: Array, interpret: bool = False
) -> tuple[Array, Array]:
    """See `training.experts`; weight float32 [tiles, height, 1], w13 [E, 2 inter, D] and w2 [E, D, inter] bf16."""
    numerics = options.numerics
    gate_up = numerics.round_f32(_matmul(take_rows(x, groups.source, groups.height), w13, groups, interpret))
    out = numerics.round(_matmul(hidden(options, gate_up, weight), w2, groups, interpret))
    # A pair counts as computed if its place holds its own token in a used tile.
    token = groups.source.at[groups.position].get(mode="fill", fill_value=-1)
    used = groups.position < groups.used[0] * groups.height
    computed = (token == jnp.arange(x.shape[0])[:, None]) & used
    return _sum_slots(out, groups), jnp.sum(computed, axis=1, dtype=jnp.int32)


def backward(
    options: Options,
    x: Array,
    weight: Array,
    groups: Groups,
    w13: Array,
    w2: Array,
    d_total: Array,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Gradients of x, weight, w13 and w2, float32, from d_total bf16 [n, D]."""
    numerics, n_experts = options.numerics, w2.shape[0]
    tiled, d_out = (take_rows(rows, groups.source, groups.height) for rows in (x, d_total))
    gate_up = numerics.round_f32(_matmul(tiled, w13, groups, interpret))
    a, pull = jax.vjp(functools.partial(hidden, options), gate_up, weight)
    d_gate_up, d_weight = pull(numerics.round(_matmul(d_out, w2, groups, interpret, transposed=True)))
    d_gate_up = numerics.round(d_gate_up)
    d_w2 = _weight_gradient(d_out, a, groups, n_experts, interpret)
    d_w13 = _weight_gradient(d_gate_up, tiled, groups, n_experts, interpret)
    d_x = _sum_slots(_matmul(d_gate_up, w13, groups, interpret, transposed=True), groups)
    return d_x, d_weight, d_w13, d_w2


def _sum_slots(tiled: Array, groups: Groups) -> Array:
    """[tiles, height, D] -> float32 [n, D], the sum over each token's pairs."""
    rows = tiled.reshape(-1, tiled.shape[-1])
    slots = (groups.position[:, slot] for slot in range(groups.position.shape[1]))
    return sum(rows.at[place].get(mode="fill", fill_value=0).astype(jnp.float32) for place in slots)


def _matmul(x: Array, matrices: Array, groups: Groups, interpret: bool, transposed: bool = False) -> Array:
    """x [tiles, height, K] times matrices [E, N, K], transposed -> float32 [tiles, height, N]; with `transposed`, x
    [tiles, height, N] times the matrices as they are. Unused tiles hold anything: nobody may read them.
    """
    columns = matrices.shape[2 if transposed else 1]
    sizes, tiling = _group_sizes(groups, matrices.shape[0]), _tiling(groups, x.shape[-1], columns)
    rows = x.reshape(-1, x.shape[-1])
    out = _kernels.gmm(rows, matrices, sizes, jnp.float32, tiling, transpose_rhs=not transposed, interpret=interpret)
    return out.reshape(*x.shape[:2], columns)


def _weight_gradient(dy: Array, x: Array, groups: Groups, n_experts: int, interpret: bool) -> Array:
    """Sum over the rows of each expert of dy [tiles, height, N] times x [tiles, height, K]: float32 [E, N, K]. Zeros
    for an expert without rows.
    """
    left, right = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    sizes, tiling = _group_sizes(groups, n_experts), _tiling(groups, dy.shape[-1], x.shape[-1])
    return _kernels.tgmm(left.swapaxes(0, 1), right, sizes, jnp.float32, tiling, interpret=interpret)


def _group_sizes(groups: Groups, n_experts: int) -> Array:
    """Rows of the used tiles of each expert, int32 [E]; they come first, in ascending order."""
    used = jnp.arange(groups.expert.shape[0]) < groups.used[0]
    mine = (groups.expert[None] == jnp.arange(n_experts)[:, None]) & used
    return jnp.sum(mine, axis=1, dtype=jnp.int32) * groups.height


def _tiling(groups: Groups, k: int, n: int) -> tuple[int, int, int]:
    """Rows, contracted and output columns of a block."""
    height = next(size for size in _ROWS if groups.source.shape[0] % size == 0)
    return height, min(_COLUMNS, k), min(_COLUMNS, n)
