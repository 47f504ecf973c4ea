"""Routed experts: the Triton kernels, interpreted, against the reference, in every storage."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe import gpu
from test_kernel_moe import EXPERTS, HIDDEN, LIMIT, assert_close, leaves, run, tokens


@functools.partial(jax.jit, static_argnames="limit")
def kernel(x, chosen, weights, matrices, layer, limit):
    return gpu.experts(x, chosen, weights, *matrices, layer, limit=limit, interpret=True)


def check(n: int, chosen: jax.Array, layer: int, storage: str) -> None:
    x, weights = tokens(n, chosen.shape[1])
    got = kernel(x, chosen, weights, leaves(storage), layer, LIMIT)
    assert_close(got, run(x, chosen, weights, layer, storage, "reference"))


@pytest.mark.parametrize("storage", ["fp4", "fp8", "bf16"])
def test_experts(storage):
    rng = np.random.default_rng(0)
    chosen = np.sort(np.stack([rng.permutation(EXPERTS)[:2] for _ in range(5)]), axis=1)
    check(5, jnp.asarray(chosen, jnp.int32), 1, storage)


def test_one_expert_gets_everything():
    """More rows than a tile has, and experts without any."""
    check(19, jnp.full((19, 1), EXPERTS - 1, jnp.int32), 0, "fp4")


def test_one_token():
    check(1, jnp.array([[0, 3, 7]], jnp.int32), 1, "fp4")


def test_tiles_of_prefill():
    """Enough rows an expert that tiles are tall."""
    rows = 17 * EXPERTS
    assert gpu._tiles(rows, EXPERTS).rows == 64
    check(rows, jnp.arange(rows, dtype=jnp.int32)[:, None] % EXPERTS, 0, "fp4")


def test_without_a_limit():
    x, weights = tokens(2, 1)
    chosen = jnp.array([[2], [5]], jnp.int32)
    far = kernel(x, chosen, weights, leaves("bf16"), 0, 1e9)
    assert far.shape == (2, 1, HIDDEN)
    np.testing.assert_array_equal(
        np.asarray(kernel(x, chosen, weights, leaves("bf16"), 0, 0.0), np.float32), np.asarray(far, np.float32)
    )
