"""Dense FP8 maps: the TPU kernel, interpreted, against the reference; and what the operation refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from dsv41_jax import quant
from pallas_kernels import quantized_linear
from pallas_kernels.implementation import KernelError
from pallas_kernels.quantized_linear import tpu

# Both sides add exact products in float32, in another order; a sum within that noise of a tie of bf16 rounding falls to
# the other side, one unit in the last place of 8 bits. Terms that cancel leave noise of the largest term, 2^-24 of it.
CLOSE = {"rtol": 2.0**-7, "atol": 2.0**-16}
GENERATIONS = (5, 6, 7)


def leaf(seed: int, layers: int, n: int, k: int) -> dict[str, jax.Array]:
    """Every finite E4M3 byte, subnormals and both zeros included, with different scales."""
    rng = np.random.default_rng(seed)
    byte = rng.integers(0, 256, (layers, n, k)).astype(np.uint8)
    byte[byte & 127 == 127] = 0x80
    scale = rng.integers(110, 122, (layers, n // 32, k // 32)).astype(np.uint8)
    return {
        "weight": jax.lax.bitcast_convert_type(jnp.asarray(byte), jnp.float8_e4m3fn),
        "scale": jax.lax.bitcast_convert_type(jnp.asarray(scale), jnp.float8_e8m0fnu),
    }


def rows(seed: int, n: int, k: int) -> jax.Array:
    """Blocks of very different size; one row is zero."""
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.integers(-16, 4, (n, k // 32))).repeat(32, 1)
    x = rng.standard_normal((n, k)) * size
    x[n // 2] *= rng.integers(2)
    return jnp.asarray(x, jnp.bfloat16)


def close(got, want):
    assert got.dtype == want.dtype == jnp.bfloat16
    want = np.asarray(want, np.float32)
    limits = {**CLOSE, "atol": CLOSE["atol"] * max(1.0, np.abs(want).max())}
    np.testing.assert_allclose(np.asarray(got, np.float32), want, **limits)


@functools.partial(jax.jit, static_argnums=(4, 5))
def project(x, weight, scale, layer, quantize, chip):
    return tpu.project(x, weight, scale, layer, groups=1, quantize=quantize, interpret=True, chip=chip)


@pytest.mark.parametrize("generation", GENERATIONS)
@given(seed=st.integers(0, 2**20), layer=st.integers(0, 1))
@settings(max_examples=4)
def test_linear(generation, seed, layer):
    """Two parts of N (cores), two steps, a last layer, rows that fill no tile."""
    weights, x = leaf(seed, 2, 512, 384), rows(seed, 5, 384)
    want = quantized_linear.linear(x, weights, layer, implementation="reference")
    close(project(x, weights["weight"], weights["scale"], jnp.int32(layer), True, (generation, 2)), want)


@pytest.mark.parametrize(("n", "k"), [(32, 64), (160, 96), (128, 128)])
def test_small_models(n, k):
    weights, x = leaf(n, 3, n, k), rows(k, 6, k).reshape(2, 3, k)
    arguments = (x, weights, 2)
    got = quantized_linear.linear(*arguments, implementation="interpret")
    assert got.shape == (2, 3, n)
    close(got, quantized_linear.linear(*arguments, implementation="reference"))


def test_one_matrix_without_layers():
    weights, x = leaf(3, 1, 64, 64), rows(4, 1, 64)
    alone = {name: value[0] for name, value in weights.items()}
    got = quantized_linear.linear(x, alone, implementation="interpret")
    close(got, quantized_linear.linear(x, weights, 0, implementation="reference"))


@pytest.mark.parametrize(("groups", "r", "k"), [(2, 128, 128), (4, 32, 64)])
def test_grouped(groups, r, k):
    weights, x = leaf(r, 2, groups * r, k), rows(k, 3, groups * k)
    got = quantized_linear.grouped_linear(x, weights, 1, groups=groups, implementation="interpret")
    close(got, quantized_linear.grouped_linear(x, weights, 1, groups=groups, implementation="reference"))


def test_several_tiles_of_rows(monkeypatch):
    monkeypatch.setattr(tpu, "ROWS", 16)
    weights, x = leaf(5, 1, 128, 128), rows(6, 40, 128)
    got = quantized_linear.linear(x, weights, 0, implementation="interpret")
    close(got, quantized_linear.linear(x, weights, 0, implementation="reference"))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_code_and_scale_is_exact(generation):
    """One-hot rows read the matrix: all 254 codes under scales from 2^-100 to 2^100."""
    byte = np.arange(256, dtype=np.uint8)
    byte[byte & 127 == 127] = 0x80
    weight = np.broadcast_to(byte[:, None], (256, 128))
    scale = np.broadcast_to(np.array([27, 120, 127, 227], np.uint8), (8, 4))
    weights = {
        "weight": jax.lax.bitcast_convert_type(jnp.asarray(weight)[None], jnp.float8_e4m3fn),
        "scale": jax.lax.bitcast_convert_type(jnp.asarray(scale)[None], jnp.float8_e8m0fnu),
    }
    x = jnp.eye(128, dtype=jnp.bfloat16)[::32]
    got = project(x, *weights.values(), jnp.int32(0), False, (generation, 1))
    want = quant.dequantize_weight({name: value[0] for name, value in weights.items()})[:, ::32].T
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@jax.jit
def q8(x: jax.Array) -> jax.Array:
    return pl.pallas_call(tpu._q8, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


@given(bits=st.lists(st.integers(0, 2**16 - 1), min_size=64, max_size=64), usual=st.booleans())
@settings(max_examples=40)
def test_input_is_quantised_to_the_bit(bits, usual):
    """Any finite bf16 of ordinary size, in blocks of very different sizes; `usual` is the range of the fast way."""
    rng = np.random.default_rng(bits[0])
    x = jnp.asarray(rng.choice(np.asarray(bits, np.uint16), (16, 128))).view(jnp.bfloat16)
    x = jnp.where(jnp.abs(x) <= (1.75 * 2**17 if usual else 1e30), x, jnp.bfloat16(1.75 * 2**17))
    np.testing.assert_array_equal(np.asarray(q8(x), np.float32), np.asarray(quant.fake_q8(x), np.float32))


@pytest.mark.parametrize("value", [0.0, -1.0, 448.0, 1.75 * 2**17, 1.7578125 * 2**17, 3e38, 1e-4, 2.0**-126])
def test_input_at_the_edges_of_a_scale(value):
    x = jnp.full((16, 128), value, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(q8(x), np.float32), np.asarray(quant.fake_q8(x), np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((2, 64), jnp.float32)}, "x is float32"),
        ({"x": jnp.zeros((2, 96), jnp.bfloat16)}, "x has 96 columns"),
        ({"layer": None}, "layer=None"),
        ({"weight": jnp.zeros((1, 64, 64), jnp.bfloat16)}, "weight bfloat16"),
        ({"scale": jnp.zeros((1, 64, 2), jnp.float8_e8m0fnu)}, "one scale per 32x32"),
        ({"implementation": "cuda"}, "'cuda' is unknown"),
    ],
)
def test_refusals(change, message):
    weights = leaf(0, 1, 64, 64)
    given = {"x": rows(0, 2, 64), "layer": 0, "implementation": "interpret", **weights, **change}
    with pytest.raises(KernelError, match=message):
        quantized_linear.linear(
            given["x"],
            {"weight": given["weight"], "scale": given["scale"]},
            given["layer"],
            implementation=given["implementation"],
        )


def test_groups_must_divide_rows():
    with pytest.raises(KernelError, match="3 groups"):
        quantized_linear.grouped_linear(rows(0, 2, 192), leaf(0, 1, 64, 64), 0, groups=3, implementation="interpret")
