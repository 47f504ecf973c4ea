"""Parameters in the forms of the kernels: the same values, and a clear refusal where FP8 cannot hold them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import moe, quant
from dsv41_jax.kernel_params import pack_params
from dsv41_jax.numerics import RELEASED
from pallas_kernels.implementation import KernelError

D, INTER, EXPERTS, LAYERS = 96, 32, 3, 2
SHAPES = {"w1": (INTER, D), "w3": (INTER, D), "w2": (D, INTER)}


def experts(rng: np.random.Generator, spread: float = 1.0) -> dict:
    """FP4 leaves stacked over layers; `spread` is the ratio of the largest to the smallest blocks of a row."""
    tree = {}
    for name, shape in SHAPES.items():
        w = rng.standard_normal((LAYERS, EXPERTS, *shape)) * spread ** rng.integers(
            0, 2, (1, 1, 1, shape[1] // 32)
        ).repeat(32, -1)
        weight, scale = quant.quantize_weight_fp4(jnp.asarray(w, jnp.float32))
        tree[name] = {"weight": weight, "scale": scale}
    return tree


def as_e4m3(leaf: dict) -> dict:
    """The form of expert_storage="fp8": the same values in E4M3 under the same scales."""
    codes = quant.unpack_fp4(leaf["weight"])
    return {"weight": quant.e2m1_values(codes).astype(jnp.float8_e4m3fn), "scale": leaf["scale"]}


@pytest.mark.parametrize("storage", ["fp4", "fp8", "bf16"])
def test_packed_experts_compute_the_same_in_plain_code(storage):
    """`loss` runs in plain code whatever the parameters were packed for."""
    rng = np.random.default_rng(0)
    tree = experts(rng)
    if storage == "fp8":
        tree = {name: as_e4m3(leaf) for name, leaf in tree.items()}
    if storage == "bf16":
        tree = {name: {"weight": quant.dequantize_weight(leaf)} for name, leaf in tree.items()}
    packed = pack_params({"layers": {"ffn": {"experts": tree, "gate": {"bias": jnp.zeros(3)}}}})["layers"]["ffn"]
    assert set(packed["gate"]) == {"bias"}
    assert (
        set(packed["experts"]["w1"])
        == {"fp4": {"words", "scales"}, "fp8": {"weight", "scale"}, "bf16": {"weight"}}[storage]
    )
    module = moe.MoE(EXPERTS, 2, INTER, "sigmoid", True, 1.0, 0.0, RELEASED)
    x = jnp.asarray(rng.standard_normal((5, D)), jnp.bfloat16)
    chosen = jnp.asarray(np.sort([rng.permutation(EXPERTS)[:2] for _ in range(5)]), jnp.int32)
    weights = jnp.asarray(rng.random((5, 2)), jnp.float32)

    @jax.jit
    def routed(leaves):
        rest = {"gate": {}, "shared_experts": {}}
        return module.apply({"params": {"experts": leaves, **rest}}, x, chosen, weights, method="_routed")

    want, got = (routed(jax.tree.map(lambda w: w[1], leaves)) for leaves in (tree, packed["experts"]))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_fp8_experts_that_are_not_exact_are_refused_by_name():
    tree = {name: as_e4m3(leaf) for name, leaf in experts(np.random.default_rng(1), spread=2.0**20).items()}
    with pytest.raises(KernelError, match=r"layers\.ffn\.experts\.w1: expert_storage='fp8' is not exact"):
        pack_params({"layers": {"ffn": {"experts": tree}}})
