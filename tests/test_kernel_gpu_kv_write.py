"""The Triton kernels of kv_write, interpreted, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import kernel_inputs, quant
from pallas_kernels import gpu_codes
from pallas_kernels.implementation import KernelError
from pallas_kernels.kv_write import gpu, reference

EPS = 1e-20
# The mean of squares is summed in another order, so a normed value at a tie of bf16 rounding may fall to the other side
# and, rarely, take a code with it: this many numbers of some thousand may differ.
FLIPS = 2


def rows(seed: int, b: int, n: int, dim: int, rope: int = 16):
    keys = jax.random.split(jax.random.key(seed), 3)
    angle = jax.random.uniform(keys[2], (b, n, rope // 2), maxval=6.0)
    raw = jax.random.normal(keys[0], (b, n, dim), jnp.bfloat16) * jnp.bfloat16(3)
    raw = raw.at[0, 0].set(0).at[0, 1, : dim // 2].multiply(jnp.bfloat16(2.0**-14))
    norm = (1 + 0.1 * jax.random.normal(keys[1], (dim,))).astype(jnp.bfloat16)
    return raw, norm, jnp.cos(angle), jnp.sin(angle)


def places(layout, b: int, n: int):
    """Consecutive entries that cross a page; one is not kept."""
    entry = layout.entries - n // 2 + jnp.arange(n) * jnp.ones((b, 1), jnp.int32)
    page = jnp.array([[2, 0], [3, 5]])[jnp.arange(b)[:, None], entry // layout.entries]
    return page, entry % layout.entries, jnp.ones((b, n), bool).at[1, 2].set(False)


def same(operation: str, arguments: tuple, **options):
    """Both compute the same bits, up to FLIPS."""
    got = jax.jit(functools.partial(getattr(gpu, operation), **options, interpret=True))(*arguments)
    want = jax.jit(functools.partial(getattr(reference, operation), **options))(*arguments)
    for mine, right in zip(got, want, strict=True):
        assert mine.dtype == right.dtype and mine.shape == right.shape
        assert np.sum(np.asarray(mine) != np.asarray(right)) <= FLIPS


@pytest.mark.parametrize(("dim", "ratio"), [(64, 2), (512, 1)])
def test_main_entries(dim, ratio):
    layout, b, n = kernel_inputs.layout(ratio, head_dim=dim), 2, 5
    words = kernel_inputs.main_pool(jax.random.key(0), layout, 2, 6)
    arguments = (*rows(dim, b, n, dim), words, jnp.int32(1), *places(layout, b, n))
    same("main_entries", arguments, page_rows=layout.main_rows, eps=EPS)


@pytest.mark.parametrize(("dim", "ratio"), [(64, 2), (128, 1)])
def test_index_entries(dim, ratio):
    layout, b, n = kernel_inputs.layout(ratio, index_dim=dim), 2, 5
    codes, scales = kernel_inputs.index_pool(jax.random.key(0), layout, 2, 6)
    arguments = (*rows(dim, b, n, dim), codes, scales, jnp.int32(1), *places(layout, b, n))
    same("index_entries", arguments, page_entries=layout.entries, eps=EPS)


@pytest.mark.parametrize(("dim", "t"), [(64, 9), (512, 3)])
def test_window_rows(dim, t):
    """More rows than the ring has; padding rows; a block that wraps."""
    b, size = 2, 6
    codes, scales = kernel_inputs.window_ring(jax.random.key(1), 2, b, size, dim)
    arguments = (*rows(t, b, t, dim), codes, scales, jnp.int32(1), jnp.array([4, 11]), jnp.array([t, 2]))
    same("window_rows", arguments, eps=EPS)


def test_other_sizes_are_refused():
    layout = kernel_inputs.layout(1, head_dim=96)
    words = kernel_inputs.main_pool(jax.random.key(0), layout, 1, 2)
    with pytest.raises(KernelError, match="96 channels; 32, 64, 128, 256 and 512"):
        gpu.main_entries(*rows(0, 2, 5, 96), words, 0, *places(layout, 2, 5), page_rows=layout.main_rows, eps=EPS)


def test_codes_have_the_bits_of_the_quantisers():
    x = jax.random.normal(jax.random.key(2), (4096,)) * 2.0 ** jax.random.randint(jax.random.key(3), (4096,), -12, 11)
    exact = jnp.arange(0, 8, 1 / 16, jnp.float32)  # every value and every tie of E2M1
    x = jnp.concatenate([x, exact, -exact, exact * 64, exact / 64, exact / 1024])
    np.testing.assert_array_equal(jax.jit(gpu_codes.e2m1_code)(x), quant.e2m1_codes(quant.round_e2m1(x)))
    want = jax.lax.bitcast_convert_type(quant.round_e4m3(x).astype(jnp.float8_e4m3fn), jnp.uint8)
    np.testing.assert_array_equal(jax.jit(gpu_codes.e4m3_code)(x), want)
    positive = jnp.abs(x) + 1e-4
    want = jax.lax.bitcast_convert_type(quant.power_of_two_at_least(positive), jnp.int32) >> 23
    np.testing.assert_array_equal(gpu_codes.power_at_least(positive), want)
