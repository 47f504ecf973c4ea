"""Muon: momentum whose matrices are made orthogonal (report, optimizer; the numbers are those of the V4 report).

    M <- mu M + G        O = NS(mu M + G) sqrt(max(rows, columns)) 0.18

`optax.contrib.scale_by_muon` is not this rule: it corrects the bias of momentum and gradient by different factors, so
that early directions differ, and it adds 1e-8 to norms, which is not small beside gradients of a mean over a batch.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from dsv41_jax.training.optimizer_settings import OptimizerSettings

FAST, EXACT = (3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)
COEFFICIENTS = (FAST,) * 8 + (EXACT,) * 2  # eight steps blow small singular values up, two bring all close to 1


class MuonState(NamedTuple):
    """momentum: a tree like the parameters."""

    momentum: optax.Updates


def orthogonalize(x: Array, dtype: jnp.dtype = jnp.float32, epsilon: float = 1e-20) -> Array:
    """The nearest orthogonal matrix (singular values near 1) of each matrix of a stack, by ten Newton-Schulz steps.

    Args:
        x: [..., rows, columns]; the matrices are independent.
        dtype: of the products' inputs, and of what is kept between steps; sums are float32.

    Returns:
        float32 of the same shape; zero for a zero matrix.
    """
    if x.shape[-2] > x.shape[-1]:  # the square of the smaller side is formed
        return orthogonalize(x.swapaxes(-1, -2), dtype, epsilon).swapaxes(-1, -2)
    x = x.astype(jnp.float32)
    # By the largest number first: the momentum of an expert that nothing chooses decays until its squares are zero.
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
    x = x / jnp.where(largest > 0, largest, 1.0)
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True)) + epsilon)

    def product(equation: str, a: Array, b: Array) -> Array:
        a, b = a.astype(dtype), b.astype(dtype)
        return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    def step(x: Array, coefficients: Array) -> tuple[Array, None]:
        a, b, c = coefficients
        gram = product("...ik,...jk->...ij", x, x)
        inner = b * gram + c * product("...ij,...jk->...ik", gram, gram)
        return (a * x + product("...ij,...jk->...ik", inner, x)).astype(dtype), None

    x, _ = lax.scan(step, x.astype(dtype), jnp.asarray(COEFFICIENTS, jnp.float32))
    return x.astype(jnp.float32)


def _orthogonalize_layers(x: Array, dtype: jnp.dtype, epsilon: float) -> Array:
    """`orthogonalize` of a stack [layers, ..., rows, columns], one layer after another in place: of a large model only
    one layer's products are in memory.
    """
    if x.ndim == 2 or len(x) == 1:
        return orthogonalize(x, dtype, epsilon)

    def layer(i: Array, x: Array) -> Array:
        done = orthogonalize(lax.dynamic_index_in_dim(x, i, keepdims=False), dtype, epsilon)
        return lax.dynamic_update_index_in_dim(x, done, i, 0)

    return lax.fori_loop(0, len(x), layer, x)


def scale_by_muon(settings: OptimizerSettings, slices: Callable[[str], int]) -> optax.GradientTransformation:
    """Muon without rate and decay, on a tree of stacks of matrices [..., rows, columns].

    Args:
        slices: of a dotted path, into how many equal parts of rows its matrices are cut, each orthogonalised by itself:
            the heads of query weights, else 1. The momentum keeps the parameter's shape.
    """
    kept, product_dtype = jnp.dtype(settings.momentum_dtype), jnp.dtype(settings.newton_schulz_dtype)

    def init(params: optax.Params) -> MuonState:
        return MuonState(jax.tree.map(lambda x: jnp.zeros(x.shape, kept), params))

    def direction(path: tuple, gradient: Array, momentum: Array) -> Array:
        name = ".".join(key.key for key in path)
        mixed = settings.muon_momentum * momentum + gradient
        *stack, rows, columns = mixed.shape
        parts = slices(name)
        if rows % parts:
            raise ValueError(f"params.{name}: {rows} rows cannot be cut into {parts} heads")
        cut = mixed.reshape(*stack, parts, rows // parts, columns) if parts > 1 else mixed
        scale = settings.update_rms * max(cut.shape[-2:]) ** 0.5
        return scale * _orthogonalize_layers(cut, product_dtype, settings.epsilon).reshape(mixed.shape)

    def update(gradients: optax.Updates, state: MuonState, params: optax.Params | None = None):
        momentum = jax.tree.map(
            lambda m, g: settings.muon_momentum * m.astype(jnp.float32) + g, state.momentum, gradients
        )
        updates = jax.tree_util.tree_map_with_path(direction, gradients, momentum)
        return updates, MuonState(jax.tree.map(lambda m: m.astype(kept), momentum))

    return optax.GradientTransformation(init, update)
