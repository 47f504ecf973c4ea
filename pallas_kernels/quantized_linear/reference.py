"""Dense FP8 maps in plain `jax.numpy`: what the kernels must compute."""

import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from dsv41_jax.numerics import RELEASED, einsum_f32, project_rows


def linear(x: Array, weight: Array, scale: Array, layer: Array | None) -> Array:
    """y = Q8(x) W^T, float32 accumulation, one rounding; shapes as in the package's `linear`."""
    matrix = quant.dequantize_weight(_leaf(weight, scale, layer))
    return RELEASED.round(project_rows(quant.fake_q8(x), matrix))


def grouped_linear(x: Array, weight: Array, scale: Array, layer: Array | None, groups: int) -> Array:
    """Block diagonal, input as it is; shapes as in the package's `grouped_linear`."""
    matrix = quant.dequantize_weight(_leaf(weight, scale, layer))
    matrix = matrix.reshape(groups, -1, matrix.shape[-1])
    rows = x.reshape(-1, groups, matrix.shape[-1])
    n = rows.shape[0]
    rows = jnp.concatenate([rows, rows]) if n == 1 else rows  # see numerics.project_rows
    y = einsum_f32("tgk,grk->tgr", rows, matrix)[:n]
    return RELEASED.round(y).reshape(*x.shape[:-1], -1)


def _leaf(weight: Array, scale: Array, layer: Array | None) -> dict[str, Array]:
    if layer is None:
        return {"weight": weight, "scale": scale}
    return {"weight": weight[layer], "scale": scale[layer]}
