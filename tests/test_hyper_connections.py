"""Hyper-connections against the golden numbers: coefficients, collapse, expand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import hyper_connections as hc
from dsv41_jax.numerics import FLOAT32, RELEASED
from module_golden import assert_within_one_ulp, load, wide
from pallas_kernels.mhc import reference

GOLD = load("mhc")
CASES = {"hc4": 4, "hc2": 2}
# Sums of up to 256 float32 terms in another order; exp amplifies them in a harsh row.
ATOL, HARSH_ATOL, EQUAL = 2e-6, 1e-5, 0.99


def module(case: str) -> hc.HyperConnection:
    iterations, eps = GOLD[f"{case}.iters_eps"]
    return hc.HyperConnection(int(iterations), float(eps), 1e-20)


@functools.cache
def coefficients_of(case: str) -> dict[str, np.ndarray]:
    """mixes, pre, post and comb of the recorded streams, through the module."""
    params = {key: jnp.asarray(GOLD[f"{case}.{key}"]) for key in ("fn", "base", "scale")}

    @jax.jit
    def run(params, x):
        mixes = module(case).apply({}, x, params["fn"], method="mix")
        return mixes, *module(case).apply({"params": params}, x)

    return dict(zip(("mixes", "pre", "post", "comb"), run(params, GOLD[f"{case}.x"]), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_coefficients_equal_golden(case):
    for name, got in coefficients_of(case).items():
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, GOLD[f"{case}.{name}"], rtol=0, atol=ATOL, err_msg=name)


def harsh(case: str) -> tuple:
    iterations, eps = GOLD[f"{case}.iters_eps"]
    base, scale = GOLD[f"{case}.base"], GOLD[f"{case}.scale"]
    return jax.jit(
        lambda mix: hc.coefficients(
            mix, jnp.asarray(base), jnp.asarray(scale), CASES[case], int(iterations), float(eps)
        )
    )(GOLD[f"{case}.harsh_mixes"])


@pytest.mark.parametrize("case", CASES)
def test_harsh_coefficients_equal_golden(case):
    for name, got in zip(("pre", "post", "comb"), harsh(case), strict=True):
        np.testing.assert_allclose(got, GOLD[f"{case}.harsh_{name}"], rtol=0, atol=HARSH_ATOL, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_comb_ends_on_columns_of_sum_one(case):
    comb = np.asarray(coefficients_of(case)["comb"])
    np.testing.assert_allclose(comb.sum(axis=-2), 1, atol=1e-5)
    assert (comb > 0).all()


def streams(case: str, numerics=RELEASED, comb=None) -> dict[str, jax.Array]:
    """Collapse, expand and mean of the recorded streams under the recorded coefficients."""
    gold = {key: jnp.asarray(GOLD[f"{case}.{key}"]) for key in ("x", "pre", "post", "comb", "sublayer_out")}
    x, u = gold["x"].astype(numerics.dtype), gold["sublayer_out"].astype(numerics.dtype)
    comb = gold["comb"] if comb is None else comb

    @jax.jit
    def run(x, u, comb):
        return {
            "hc_pre_out": hc.collapse(x, gold["pre"], numerics),
            "hc_pre_identity_out": hc.collapse(x, hc.identity_mix(x.shape[:2], CASES[case]), numerics),
            "hc_post_out": hc.expand(u, x, gold["post"], comb, numerics),
            "target_hidden_mean": hc.stream_mean(x, numerics),
        }

    return run(x, u, comb)


@pytest.mark.parametrize("case", CASES)
def test_streams_equal_golden(case):
    for name, got in streams(case).items():
        assert_within_one_ulp(got, GOLD[f"{case}.{name}"], EQUAL)
    np.testing.assert_array_equal(wide(streams(case)["hc_pre_identity_out"]), wide(GOLD[f"{case}.x"][:, :, 0]))


def test_float32_streams_equal_a_float64_sum():
    """float32 numerics take another route (a dot); it is the same sum."""
    x, u = wide(GOLD["hc4.x"]).astype(np.float64), wide(GOLD["hc4.sublayer_out"]).astype(np.float64)
    pre, post, comb = (GOLD[f"hc4.{name}"].astype(np.float64) for name in ("pre", "post", "comb"))
    want = {
        "hc_pre_out": np.einsum("btc,btcd->btd", pre, x),
        "hc_pre_identity_out": x[:, :, 0],
        "hc_post_out": post[..., None] * u[:, :, None] + np.einsum("btjk,btjd->btkd", comb, x),
        "target_hidden_mean": x.mean(axis=2),
    }
    for name, got in streams("hc4", FLOAT32).items():
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want[name], rtol=1e-6, atol=1e-6 * np.abs(want[name]).max(), err_msg=name)


def test_comb_transposed_fails():
    """Negative control: rows are sources, columns destinations."""
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(
            jnp.swapaxes(coefficients_of("hc4")["comb"], -1, -2), GOLD["hc4.comb"], rtol=0, atol=ATOL
        )
    out = streams("hc4", comb=jnp.swapaxes(jnp.asarray(GOLD["hc4.comb"]), -1, -2))
    with pytest.raises(AssertionError):
        assert_within_one_ulp(out["hc_post_out"], GOLD["hc4.hc_post_out"], EQUAL)


def sinkhorn_with(mistake: str):
    def sinkhorn(logits, iterations, eps):
        if mistake == "one_pass_less":
            return real(logits, iterations - 1, eps)
        if mistake == "no_eps":
            return real(logits, iterations, 0.0)
        m = real(logits, iterations, eps)
        return m / (jnp.sum(m, axis=1, keepdims=True) + eps)  # ends on a row pass

    real = reference.sinkhorn
    return sinkhorn


@pytest.mark.parametrize("mistake", ["one_pass_less", "no_eps", "ends_on_rows"])
def test_wrong_sinkhorn_fails_the_harsh_rows(mistake, monkeypatch):
    """Negative control: what a converged matrix cannot show, hc2 and the harsh rows do."""
    monkeypatch.setattr(reference, "sinkhorn", sinkhorn_with(mistake))
    with pytest.raises(AssertionError):
        for case in CASES:
            np.testing.assert_allclose(harsh(case)[2], GOLD[f"{case}.harsh_comb"], rtol=0, atol=HARSH_ATOL)
