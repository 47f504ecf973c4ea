"""Linear maps against the golden matmuls; a row's numbers do not depend on its neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import quant
from dsv41_jax.csa2 import GroupedLinear
from dsv41_jax.linear import Linear, LinearF32, weight_matrix
from dsv41_jax.numerics import (
    FLOAT32,
    NOQUANT,
    QUANTIZED_TRAINING,
    QUANTIZED_TRAINING_BF16,
    RELEASED,
    Numerics,
    project_rows,
)
from module_golden import BF16, assert_close, assert_same_bits, load, weights, wide

GOLD = load("quant")
FP8, FP4 = (jax.tree.map(jnp.asarray, weights(GOLD, f"{name}.")) for name in ("w_fp8", "w_fp4"))
A = jnp.asarray(GOLD["gemm.a"])


def linear(leaf: dict, x: jax.Array, numerics: Numerics, quantized: bool = True) -> jax.Array:
    params = {key: leaf[key] for key in ("weight", "scale") if key in leaf}
    return Linear(leaf["weight"].shape[0], numerics, quantized).apply({"params": params}, x)


def expert_matmul(leaf: dict, x: jax.Array) -> jax.Array:
    """What `moe` does with an FP4 weight."""
    stored = {key: leaf[key] for key in ("weight", "scale")}
    return RELEASED.round(project_rows(quant.fake_q8(x), weight_matrix(stored, RELEASED, "fp4")))


def test_quantised_matmuls_equal_golden():
    fp8, fp4 = jax.jit(lambda x: (linear(FP8, x, RELEASED), expert_matmul(FP4, x)))(A)
    assert_close(fp8, GOLD["gemm.out_fp8"])
    assert_close(fp4, GOLD["gemm.out_fp4"])


def test_plain_linear_does_not_quantise_its_input():
    leaf = {"weight": FP8["dequant"].astype(jnp.bfloat16)}
    plain, noquant = jax.jit(lambda x: (linear(leaf, x, RELEASED, quantized=False), linear(FP8, x, NOQUANT)))(A)
    assert_close(plain, GOLD["gemm.out_bf16_noactquant"])
    assert_same_bits(noquant, plain)  # `noquant`: stored weights, input as it is


def test_float32_numerics():
    stored, dequantised, f32 = jax.jit(
        lambda x: (
            linear(FP8, x, FLOAT32),
            linear({"weight": FP8["dequant"]}, x, FLOAT32),
            LinearF32(96).apply({"params": {"weight": FP8["dequant"].astype(jnp.bfloat16)}}, x),
        )
    )(A.astype(jnp.float32))
    assert stored.dtype == f32.dtype == jnp.float32
    assert_same_bits(stored, dequantised)
    want = wide(A).astype(np.float64) @ GOLD["w_fp8.dequant"].astype(np.float64).T
    np.testing.assert_allclose(stored, want, atol=1e-5)
    np.testing.assert_allclose(f32, want, atol=1e-5)


def test_training_rounds_weights_through_their_stored_format():
    w = FP8["dequant"] * 1.03
    rounded, want = jax.jit(
        lambda w: (weight_matrix({"weight": w}, QUANTIZED_TRAINING, "fp8"), quant.fake_quantize_weight("fp8", w))
    )(w)
    assert_same_bits(rounded, want)
    assert (rounded != w).any()
    for numerics, stored_as in ((QUANTIZED_TRAINING, None), (FLOAT32, "fp8")):
        assert_same_bits(weight_matrix({"weight": jnp.asarray(w)}, numerics, stored_as), w)
    # Masters are multiplied in the activation dtype; what they are quantised to is exact in it.
    assert_same_bits(weight_matrix({"weight": jnp.asarray(w)}, RELEASED, "fp8"), w.astype(BF16))
    assert_same_bits(
        weight_matrix({"weight": jnp.asarray(w)}, QUANTIZED_TRAINING_BF16, "fp8").astype(jnp.float32), rounded
    )


def modules(inner: int) -> dict:
    """Linear maps on `inner` inputs, as functions of x."""
    rng = np.random.default_rng(inner)
    w = (rng.standard_normal((96, inner)) * inner**-0.5).astype(np.float32)
    codes, scale = jax.jit(quant.quantize_weight_fp8)(w)
    stored = {"weight": codes, "scale": scale}
    grouped = {"weight": w.reshape(192, inner // 2).astype(BF16)}
    return {
        "fp8": lambda x: linear(stored, x, RELEASED),
        "float32": lambda x: LinearF32(96).apply({"params": {"weight": w}}, x),
        "grouped": lambda x: GroupedLinear(2, 96, RELEASED).apply({"params": grouped}, x),
    }


def test_a_row_does_not_depend_on_its_neighbours():
    """Bit by bit: alone, in a batch, in another place, with another shape around it."""
    inner = 512
    x = np.random.default_rng(1).standard_normal((33, inner)).astype(BF16)
    functions = modules(inner)
    run = jax.jit(lambda x: {name: function(x) for name, function in functions.items()})
    whole = jax.tree.map(np.asarray, run(x))
    for name, alone in run(x[4:5]).items():
        assert_same_bits(np.asarray(alone)[0], whole[name][4])
    for name, shaped in run(x[1:33].reshape(4, 8, inner)).items():
        assert_same_bits(np.asarray(shaped).reshape(32, -1), whole[name][1:33])
    for name, moved in run(x[::-1]).items():
        assert_same_bits(np.asarray(moved)[::-1], whole[name])


def test_grouped_linear_is_block_diagonal():
    w = np.random.default_rng(0).standard_normal((2 * 3, 4)).astype(np.float32)
    x = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    got = jax.jit(lambda w, x: GroupedLinear(2, 3, FLOAT32).apply({"params": {"weight": w}}, x))(w, x)
    want = np.concatenate([x[:, :4] @ w[:3].T, x[:, 4:] @ w[3:].T], axis=1)
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize(
    "mistake", ["input_not_quantised", "scale_columns_swapped", "nibbles_swapped", "partial_sums_rounded"]
)
def test_wrong_matmuls_fail_the_golden_comparison(mistake):
    """Negative control."""
    want, packed = GOLD["gemm.out_fp4" if mistake == "nibbles_swapped" else "gemm.out_fp8"], FP4["weight"]

    def partial_sums_rounded(a):
        x, w = quant.fake_q8(a), quant.dequantize_weight(FP8)
        parts = [RELEASED.round_f32(project_rows(x[:, i : i + 32], w[:, i : i + 32])) for i in (0, 32)]
        return RELEASED.round(parts[0] + parts[1])

    wrong = {
        "input_not_quantised": lambda a: linear(FP8, a, RELEASED, quantized=False),
        "scale_columns_swapped": lambda a: linear({**FP8, "scale": FP8["scale"][:, ::-1]}, a, RELEASED),
        "nibbles_swapped": lambda a: expert_matmul({**FP4, "weight": packed << 4 | packed >> 4}, a),
        "partial_sums_rounded": partial_sums_rounded,
    }
    got = jax.jit(wrong[mistake])(A)
    assert got.dtype == BF16
    with pytest.raises(AssertionError):
        assert_close(got, want)
