"""Parameters in the forms of the kernels: the same values, and a clear refusal where FP8 cannot hold them."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax import moe, quant
from dsv41_jax.config import load_config
from dsv41_jax.kernel_params import check_config, pack_params
from dsv41_jax.numerics import RELEASED
from pallas_kernels.implementation import KernelError, automatic

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
        return module.apply({"params": {"experts": leaves, **rest}}, x, chosen, weights, 1, method="_by_reference")

    want, got = (routed(jax.tree.map(lambda w: w[1], leaves)) for leaves in (tree, packed["experts"]))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_fp8_experts_that_are_not_exact_are_refused_by_name():
    tree = {name: as_e4m3(leaf) for name, leaf in experts(np.random.default_rng(1), spread=2.0**20).items()}
    with pytest.raises(KernelError, match=r"layers\.ffn\.experts\.w1: expert_storage='fp8' is not exact"):
        pack_params({"layers": {"ffn": {"experts": tree}}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 32}, r"head_dim=32 \(kernels take a multiple of 32 from 64 to 512\)"),
        ({"index_head_dim": 160}, "index_head_dim=160"),
        ({"candidate_block_size": 3}, r"candidate_block_size=3 \(kernels take a divisor of 64\)"),
        ({"hc_mult": 5, "head_dim": 576}, "head_dim=576.*hc_mult=5"),
    ],
)
def test_a_model_that_kernels_do_not_take_is_refused_before_it_is_loaded(change, message):
    config = dataclasses.replace(load_config(Path(__file__).parent.parent / "configs/tiny.py"), **change)
    with pytest.raises(KernelError, match=message + r'.*implementation="reference"'):
        check_config(config, "tpu")


def test_sizes_that_only_a_gpu_refuses():
    config = load_config(Path(__file__).parent.parent / "configs/tiny.py")
    config = dataclasses.replace(config, head_dim=96)
    check_config(config, "tpu")
    with pytest.raises(KernelError, match="head_dim=96 .kernels take a power of two on a GPU"):
        check_config(config, "gpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "cuda"}, "load: implementation='cuda' is unknown; choose one of auto, reference, tpu"),
        ({"implementation": "gpu"}, "needs a GPU, and JAX sees only"),
        ({"implementation": "interpret", "numerics": "float32"}, "numerics='float32' has no kernels"),
    ],
)
def test_choices_are_refused_clearly(tiny_folder, options, message):
    with pytest.raises(KernelError, match=message):
        ds.load(tiny_folder, **options)


def test_auto_says_once_what_it_chose(golden, tiny_folder, caplog):
    automatic.cache_clear()
    token_map = np.load(golden / "tinyA_token_map.npz")["token_map"]
    with caplog.at_level("INFO"):
        models = [ds.load(tiny_folder, token_map=token_map) for _ in range(2)]
    assert [model.implementation for model in models] == ["reference"] * 2
    assert [r.message for r in caplog.records if "implementation auto" in r.message] == [
        "implementation auto: reference, because the default backend is cpu"
    ]
