"""Hyper-connections: the reference against the modules, the TPU kernels (interpreted) against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_jax import hyper_connections as hc
from dsv41_jax.norms import RMSNorm
from dsv41_jax.numerics import RELEASED
from pallas_kernels import mhc
from pallas_kernels.implementation import KernelError

ITERATIONS, HC_EPS, NORM_EPS, LAYERS = 20, 1e-6, 1e-20, 3
# Projections of up to 20,480 float32 terms of size 0.02 in another order, then divisions by float32 reciprocals: twenty
# Sinkhorn rounds do not amplify them. A weight rounded to bf16 alone would cost 1e-3.
COEFFICIENT_TOLERANCE = 1e-5
# A sum of a few products in another order or fused may round to the neighbouring bf16 number, of 8 bits.
STREAM_TOLERANCE = 2.0**-7


@functools.cache
def connect(implementation: str):
    options = {"iterations": ITERATIONS, "hc_eps": HC_EPS, "norm_eps": NORM_EPS}
    return jax.jit(functools.partial(mhc.connect, implementation=implementation, **options))


def inputs(seed: int, lead: tuple[int, ...], c: int, d: int) -> tuple:
    """x, update, pre, and the stacked parameters of a sublayer."""
    rng = np.random.default_rng(seed)
    rows = (2 + c) * c

    def normal(*shape, scale=1.0, dtype=jnp.float32):
        return jnp.asarray(scale * rng.standard_normal(shape), dtype)

    x = normal(*lead, c, d, scale=rng.choice([1e-3, 1.0, 50.0]), dtype=jnp.bfloat16)
    update = normal(*lead, d, dtype=jnp.bfloat16), normal(*lead, c), normal(*lead, c, c)
    stacked = normal(LAYERS, rows, c * d, scale=0.02), normal(LAYERS, rows), normal(LAYERS, 3)
    return x, update, normal(*lead, c), *stacked, normal(LAYERS, d, dtype=jnp.bfloat16)


def modules(x, update, pre, fn, base, scale, norm, layer):
    """The same by `hyper_connections` and `norms`."""
    u, post, comb = update
    x = hc.expand(u, x, post, comb, RELEASED)
    y = RMSNorm(NORM_EPS, RELEASED).apply({"params": {"weight": norm[layer]}}, hc.collapse(x, pre, RELEASED))
    mixer = hc.HyperConnection(ITERATIONS, HC_EPS, NORM_EPS)
    params = {"fn": fn[layer], "base": base[layer], "scale": scale[layer]}
    return x, y, *mixer.apply({"params": params}, x)


def assert_close(got, want):
    """Streams and input in bf16, coefficients in float32."""
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        bf16 = g.dtype == jnp.bfloat16
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        if bf16:
            np.testing.assert_allclose(g, w, rtol=STREAM_TOLERANCE, atol=1e-6)
        else:
            np.testing.assert_allclose(g, w, rtol=0, atol=COEFFICIENT_TOLERANCE)


# A single token, a verify block, more rows than a few.
@pytest.mark.parametrize("lead", [(1, 1), (2, 3), (1, 20)])
def test_reference_has_the_bits_of_the_modules(lead):
    arguments = inputs(0, lead, 4, 96)
    for got, want in zip(connect("reference")(*arguments, 1), jax.jit(modules)(*arguments, 1), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


# Padded rows; more than a tile of rows; channels that fill no lanes.
@pytest.mark.parametrize(("n", "c", "d"), [(5, 4, 384), (70, 3, 96)])
def test_connect(n, c, d):
    @settings(max_examples=8)
    @given(st.integers(0, 2**31), st.integers(0, LAYERS - 1))
    def check(seed, layer):
        arguments = inputs(seed, (n,), c, d)
        got = connect("interpret")(*arguments, layer)
        assert_close(got, connect("reference")(*arguments, layer))
        comb = np.asarray(got[-1])
        np.testing.assert_allclose(comb.sum(axis=1), 1.0, atol=1e-5)  # the last pass is over columns

    check()


def test_connect_without_an_update_leaves_the_streams():
    x, _, *rest = inputs(1, (2, 9), 2, 128)
    got = connect("interpret")(x, None, *rest, 2)
    assert_close(got, connect("reference")(x, None, *rest, 2))
    np.testing.assert_array_equal(np.asarray(got[0], np.float32), np.asarray(x, np.float32))


def test_projection_is_as_exact_as_float32():
    """Against float64, with weights that two bf16 numbers cannot hold."""
    x, _, pre, fn, base, scale, norm = inputs(2, (3,), 4, 1024)
    fn = jnp.sign(fn) * (1 + 2.0**-9 + 2.0**-20) / 64
    scale = jnp.ones_like(scale)
    pre_new = np.asarray(connect("interpret")(x, None, pre, fn, base, scale, norm, 0)[2], np.float64)
    v = np.asarray(x, np.float64).reshape(3, -1)
    factor = (np.mean(v**2, axis=1, keepdims=True) + NORM_EPS) ** -0.5

    def expected(weights):
        mix = v @ np.asarray(weights[0], np.float64)[:4].T * factor + np.asarray(base[0, :4], np.float64)
        return 1 / (1 + np.exp(-mix)) + HC_EPS

    np.testing.assert_allclose(pre_new, expected(fn), atol=1e-6)
    rounded = expected(fn.astype(jnp.bfloat16))
    assert np.abs(rounded - expected(fn)).max() > 1e-5  # what a projection in bf16 would miss by


def test_expand():
    x, update, *_ = inputs(3, (2, 10), 4, 96)
    got = jax.jit(functools.partial(mhc.expand, implementation="interpret"))(x, *update)
    assert_close([got], [mhc.expand(x, *update, implementation="reference")])


def test_errors():
    x, update, *rest = inputs(4, (2,), 4, 64)
    options = {"iterations": ITERATIONS, "hc_eps": HC_EPS, "norm_eps": NORM_EPS}
    for arguments, changed, message in (
        ((x, update, *rest, 0), {"implementation": "mosaic"}, "mosaic"),
        ((x.astype(jnp.float32), update, *rest, 0), {}, "float32"),
        ((x, (update[0][:, :3], *update[1:]), *rest, 0), {}, "u is"),
        ((x, update, rest[0], rest[1][..., :7], *rest[2:], 0), {}, "fn is"),
        ((x, update, rest[0].astype(jnp.bfloat16), *rest[1:], 0), {}, "pre is bfloat16"),
        ((x, update, *rest, 0), {"iterations": 0}, "iterations=0"),
    ):
        with pytest.raises(KernelError, match=message):
            mhc.connect(*arguments, **{**options, **changed})
    with pytest.raises(KernelError, match="5 streams"):
        wide = jnp.zeros((2, 5, 64), jnp.bfloat16)
        mhc.expand(wide, update[0], jnp.zeros((2, 5)), jnp.zeros((2, 5, 5)), implementation="interpret")
