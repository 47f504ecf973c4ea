"""One rounding between modules, exact products, float32 sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import numerics
from dsv41_jax.numerics import FLOAT32, NOQUANT, RELEASED, einsum_f32, project_rows
from module_golden import BF16, assert_same_bits, wide


def test_named():
    assert numerics.named("released") is RELEASED
    assert numerics.named("noquant") is NOQUANT
    assert numerics.named("float32") is FLOAT32
    with pytest.raises(ValueError, match=r"'fp16'.*float32, noquant, released"):
        numerics.named("fp16")


def test_what_each_numerics_quantises():
    assert (RELEASED.dtype, RELEASED.quantize_activations) == (jnp.bfloat16, True)
    assert (NOQUANT.dtype, NOQUANT.quantize_activations) == (jnp.bfloat16, False)
    assert (FLOAT32.dtype, FLOAT32.quantize_activations) == (jnp.float32, False)
    assert not any(n.quantize_weights for n in (RELEASED, NOQUANT, FLOAT32))


def float32_samples() -> np.ndarray:
    """Every bf16 number, every tie between two of them, and the float32 numbers next to the ties."""
    high = np.arange(0x10000, dtype=np.uint32) << 16
    patterns = np.concatenate([high | low for low in (0, 0x7FFF, 0x8000, 0x8001)])
    x = patterns.view(np.float32)
    x = x[~np.isnan(x)]
    return x[(np.abs(x) >= 2.0**-126) | (x == 0)]  # XLA may read float32 subnormals as zero


def test_rounding_is_to_nearest_even_even_when_it_is_widened_at_once():
    x = float32_samples()
    rounded, widened, kept, unchanged = jax.jit(
        lambda x: (RELEASED.round(x), RELEASED.round(x).astype(jnp.float32), RELEASED.round_f32(x), FLOAT32.round(x))
    )(x)
    want = x.astype(BF16)
    assert_same_bits(rounded, want)
    assert_same_bits(widened, want.astype(np.float32))
    assert_same_bits(kept, want.astype(np.float32))
    assert_same_bits(unchanged, x)
    assert FLOAT32.round_f32(x) is x


def test_a_scalar_is_not_rounded_before_it_multiplies():
    """bf16 times a Python number rounds the number first, and the result differs: the release multiplies in float32."""
    x = jnp.asarray(np.linspace(0.5, 2, 256), jnp.bfloat16)
    constant = 192**-0.5
    right = RELEASED.round(x.astype(jnp.float32) * jnp.float32(constant))
    assert_same_bits(right, (np.asarray(x).astype(np.float32) * np.float32(constant)).astype(BF16))
    assert (wide(x * constant) != wide(right)).any()


def test_products_are_exact_and_sums_float32():
    # 1.0078125^2 = 1 + 2^-6 + 2^-14: the last term is lost in bf16, and beside 64 in TF32 too.
    a = b = jnp.asarray([[1.0078125, 8.0]], jnp.bfloat16)
    for dtypes in ((jnp.bfloat16, jnp.bfloat16), (jnp.float32, jnp.bfloat16), (jnp.float32, jnp.float32)):
        got = einsum_f32("ik,jk->ij", a.astype(dtypes[0]), b.astype(dtypes[1]))
        assert got.dtype == jnp.float32
        assert float(got[0, 0]) == 1.0078125**2 + 64


def test_a_projected_row_does_not_depend_on_its_neighbours():
    inner = 320
    rng = np.random.default_rng(inner)
    x = rng.standard_normal((37, inner)).astype(np.float32)
    matrix = rng.standard_normal((96, inner)).astype(np.float32)
    project = jax.jit(project_rows)
    whole = np.asarray(project(x, matrix))
    np.testing.assert_allclose(whole, x.astype(np.float64) @ matrix.astype(np.float64).T, atol=1e-4)
    assert_same_bits(project(x[:1], matrix), whole[:1])
    assert_same_bits(project(x[36], matrix), whole[36])
    assert_same_bits(project(x[5:8][:, None], matrix), whole[5:8][:, None])
    assert_same_bits(np.asarray(project(x[:32].reshape(2, 16, inner), matrix)).reshape(32, 96), whole[:32])
