"""RMSNorm: float32 statistics, the weight inside the single rounding, and the tiny eps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.norms import RMSNorm, rms_scale
from dsv41_jax.numerics import FLOAT32, RELEASED
from module_golden import BF16, assert_within_one_ulp, load, ulps, wide

GOLD = load("attention")
EPS = 1e-20


def norm(x, weight, numerics=RELEASED, eps=EPS):
    return jax.jit(lambda w, x: RMSNorm(eps, numerics).apply({"params": {"weight": w}}, x))(weight, x)


def numpy_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * weight


def streams() -> np.ndarray:
    """bf16 rows of very different sizes; the last one is zero."""
    x = GOLD["layer0.x"][0, :, :].astype(np.float32) * np.logspace(-8, 8, 30)[:, None]
    x[-1] = 0
    return x.astype(BF16)


def test_equals_float64_up_to_one_rounding():
    x, weight = streams(), GOLD["layer0.w.kv_norm.weight"]
    want = numpy_norm(x, weight)
    assert_within_one_ulp(norm(x, weight), want.astype(BF16), equal=0.99)
    exact = norm(x, weight, FLOAT32)
    assert exact.dtype == jnp.float32
    np.testing.assert_allclose(exact, want, rtol=2e-6)
    # Small rows are scaled up too: an eps of 1e-6 would leave them small.
    assert np.abs(wide(norm(x, weight))[0]).max() > 1
    assert np.abs(wide(norm(x, weight, eps=1e-6))[0]).max() < 1e-3


def test_zero_rows_and_their_gradient_are_finite():
    """eps 1e-20 makes the factor of a zero row 1e10 (bf16 and float32 hold it)."""
    x = np.stack([np.zeros(64, np.float32), np.ones(64, np.float32)])
    value, gradient = jax.jit(
        jax.value_and_grad(lambda x: jnp.sum(RMSNorm(EPS, FLOAT32).apply({"params": {"weight": jnp.ones(64)}}, x) ** 2))
    )(x)
    np.testing.assert_allclose(value, 64.0, rtol=1e-6)
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(jax.jit(rms_scale)(x, EPS), [[1e10], [1.0]], rtol=1e-6)


@pytest.mark.parametrize("mistake", ["mean_subtracted", "two_roundings", "bf16_statistics"])
def test_wrong_norms_fail_the_comparison(mistake):
    """Negative control for the one-rounding comparison."""
    x, weight = wide(streams()[:-1]), wide(GOLD["layer0.w.kv_norm.weight"])
    want = numpy_norm(x, weight).astype(BF16)
    if mistake == "mean_subtracted":
        x = x - x.mean(-1, keepdims=True)
    scale = 1 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + np.float32(EPS))
    if mistake == "bf16_statistics":
        scale = wide(scale.astype(BF16))
    y = x * scale
    if mistake == "two_roundings":
        y = wide(y.astype(BF16))
    assert np.mean(ulps((y * weight).astype(BF16), want) == 0) < 0.99
