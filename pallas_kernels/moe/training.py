"""Routed experts for training: float matrices, with a gradient of their own.

Rows are grouped into tiles as everywhere (`groups`), so that nothing is dropped. Two forms:

    loop       XLA, everywhere: a loop over the used tiles. It takes a tile's rows, applies its expert where its
               matrices lie, and adds the outputs to the tokens' sums; backward, it does so again and adds the gradients
               where they belong. Nothing is as large as all tiles
    megablox   TPUs in bf16: `training_tpu`

The plain reference is `reference`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax.numerics import Numerics
from pallas_kernels.moe import training_tpu
from pallas_kernels.moe.groups import Groups, group_rows, place_weights
from pallas_kernels.moe.training_tile import Options, one_tile

_MOST_HEIGHT = 256  # rows of a tile: small enough to stay in a CPU's cache, large enough to hide the loop


class Matrices(NamedTuple):
    """Float32 matrices of stacked experts, as a matmul uses them (fake-quantised once, by whoever owns them).

    w1, w3 [E, inter, D], w2 [E, D, inter].
    """

    w1: Array
    w3: Array
    w2: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def experts(options: Options, x: Array, chosen: Array, weights: Array, matrices: Matrices) -> tuple[Array, Array]:
    """Sum over a token's experts of w2 Q8(weight * SwiGLU(w1 x, w3 x)), in ascending order of experts.

    Args:
        x: [n, D], quantised already in numerics that quantise. chosen: int32 [n, k], 0 <= expert <= E, ascending but
            for E, which stands for an expert of another device. weights: float32 [n, k].

    Returns:
        float32 [n, D], and how many of a token's pairs were computed: int32 [n].
    """
    return _forward(options, x, chosen, weights, matrices)[0]


def _forward(options: Options, x: Array, chosen: Array, weights: Array, matrices: Matrices):
    groups = _groups(options, chosen, matrices)
    arguments = options, x, place_weights(weights, groups), groups, *_operands(matrices, options.numerics)
    run = training_tpu.forward if _by_kernels(options, groups, matrices) else _loop_forward
    return run(*arguments), (x, weights, matrices, groups._replace(height=None))  # a number is no array


def _backward(options: Options, saved: tuple, cotangents: tuple):
    x, weights, matrices, groups = saved
    groups = groups._replace(height=groups.source.shape[0] // groups.expert.shape[0])
    arguments = options, x, place_weights(weights, groups), groups, *_operands(matrices, options.numerics)
    run = training_tpu.backward if _by_kernels(options, groups, matrices) else _loop_backward
    d_x, d_weight, d_w13, d_w2 = run(*arguments, options.numerics.round(cotangents[0]))
    d_weights = d_weight.reshape(-1).at[groups.position].get(mode="fill", fill_value=0)
    no_gradient = np.zeros(weights.shape, jax.dtypes.float0)
    d_w1, d_w3 = jnp.split(d_w13, 2, axis=1)
    return d_x.astype(x.dtype), no_gradient, d_weights, Matrices(d_w1, d_w3, d_w2)


experts.defvjp(_forward, _backward)


def _by_kernels(options: Options, groups: Groups, matrices: Matrices) -> bool:
    """Whether the program being traced is for TPUs (the mesh in the context, else the default devices) and fits."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return platform == "tpu" and training_tpu.takes(options.numerics.dtype, groups, *matrices.w1.shape[1:])


def _groups(options: Options, chosen: Array, matrices: Matrices) -> Groups:
    """Tiles of about the mean load of an expert, a power of two."""
    n_experts = matrices.w1.shape[0]
    mean = max(2, chosen.size // options.share // n_experts)
    return group_rows(chosen, n_experts, min(_MOST_HEIGHT, 1 << (mean - 1).bit_length()))


def _tile_rows(groups: Groups, tile: Array) -> Array:
    """Tokens of a tile, int32 [height]; the number of tokens where there is none."""
    return jax.lax.dynamic_slice_in_dim(groups.source, tile * groups.height, groups.height)


def _take(x: Array, source: Array) -> Array:
    """x [n, D] -> [height, D]. Where there is no token, any row: its weight is 0, and so is every gradient of it."""
    return x.at[jnp.minimum(source, x.shape[0] - 1)].get(mode="promise_in_bounds")


def _operands(matrices: Matrices, numerics: Numerics) -> tuple[Array, Array]:
    """w1 over w3 [E, 2 inter, D] and w2, in the dtype of the products. Quantised values are exact in bf16."""
    w1, w3, w2 = (w.astype(numerics.dtype) for w in matrices)
    return jnp.concatenate([w1, w3], axis=1), w2


def _loop_forward(
    options: Options, x: Array, weight: Array, groups: Groups, w13: Array, w2: Array
) -> tuple[Array, Array]:
    """weight: float32 [tiles, height, 1]. Results as of `experts`."""

    def body(tile: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        total, computed = state
        source, expert = _tile_rows(groups, tile), groups.expert[tile]
        y = one_tile(options, _take(x, source), weight[tile], w13[expert], w2[expert])
        return total.at[source].add(y.astype(jnp.float32), mode="drop"), computed.at[source].add(1, mode="drop")

    state = jnp.zeros(x.shape, jnp.float32), jnp.zeros(x.shape[0], jnp.int32)
    return jax.lax.fori_loop(0, groups.used[0], body, state)


def _loop_backward(
    options: Options, x: Array, weight: Array, groups: Groups, w13: Array, w2: Array, d_total: Array
) -> tuple[Array, ...]:
    """d_total: [n, D] in the activation dtype. Gradients of x, weight, w13 and w2, float32; in bf16, what one tile adds
    to them has been rounded to bf16.
    """

    def body(tile: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        d_x, d_weight, d_w13, d_w2 = state
        source, expert = _tile_rows(groups, tile), groups.expert[tile]
        inputs = _take(x, source), weight[tile], w13[expert], w2[expert]
        dx, dw, more_w13, more_w2 = jax.vjp(functools.partial(one_tile, options), *inputs)[1](_take(d_total, source))
        return (
            d_x.at[source].add(dx.astype(jnp.float32), mode="drop"),
            d_weight.at[tile].set(dw),
            d_w13.at[expert].add(more_w13.astype(jnp.float32)),
            d_w2.at[expert].add(more_w2.astype(jnp.float32)),
        )

    zeros = tuple(jnp.zeros(array.shape, jnp.float32) for array in (x, weight, w13, w2))
    return jax.lax.fori_loop(0, groups.used[0], body, zeros)


def reference(options: Options, x: Array, chosen: Array, weights: Array, matrices: Matrices) -> Array:
    """What `experts` computes, every expert on every row: float32 [n, D]. Its gradient is JAX's own."""
    w13, w2 = _operands(matrices, options.numerics)
    total = jnp.zeros(x.shape, jnp.float32)
    for expert in range(w2.shape[0]):
        for slot in range(chosen.shape[1]):
            mine = (chosen[:, slot] == expert)[:, None]
            weight = jnp.where(mine, weights[:, slot, None], 0.0)
            y = one_tile(options, x, weight, w13[expert], w2[expert])
            total = total + jnp.where(mine, y.astype(jnp.float32), 0.0)
    return total
