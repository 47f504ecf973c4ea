"""MoE: router, experts and whole layers against the golden numbers; no token is dropped by any routing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dsv41_jax import moe, quant
from dsv41_jax.numerics import FLOAT32, RELEASED
from module_golden import assert_close, load, weights, wide
from oracle_parts import silu

GOLD = load("moe")
X, IMAGE = GOLD["x"], GOLD["image_mask"]
TOPK, ROUTE_SCALE, LIMIT = int(GOLD["params"][0]), float(GOLD["params"][1]), float(GOLD["params"][2])
EXPERTS, INTER, HIDDEN = 8, 32, 64


@functools.cache
def params() -> dict:
    tree = weights(GOLD, "moe.w.")
    one_by_one = [tree["experts"][str(e)] for e in range(EXPERTS)]
    return {**tree, "experts": jax.tree.map(lambda *leaves: np.stack(leaves), *one_by_one)}


def module(numerics=RELEASED, topk: int = TOPK, scoring: str = "sqrtsoftplus") -> moe.MoE:
    return moe.MoE(EXPERTS, topk, INTER, scoring, True, ROUTE_SCALE, LIMIT, numerics)


@functools.partial(jax.jit, static_argnames=("numerics", "topk"))
def layer(tree, x, image_mask=None, numerics=RELEASED, topk=TOPK):
    return module(numerics, topk).apply({"params": tree}, x, image_mask)


GATES = {"text": "sqrtsoftplus", "mixed": "sqrtsoftplus", "softmax": "softmax", "sigmoid": "sigmoid"}


@functools.partial(jax.jit, static_argnums=3)
def route_jitted(gate, rows, image, scoring):
    logits, bias = moe.Router(EXPERTS).apply({"params": gate}, rows, image)
    return moe.route(logits, bias, TOPK, scoring, True, ROUTE_SCALE)


def route(case: str, bias: np.ndarray | None = None) -> tuple[jax.Array, jax.Array]:
    gate = params()["gate"] if bias is None else {**params()["gate"], "bias": bias, "bias_vl": bias}
    image = IMAGE.reshape(-1) if case == "mixed" else np.zeros(IMAGE.size, bool)
    return route_jitted(gate, X.reshape(-1, HIDDEN), image, GATES[case])


def assert_gate(case: str, experts: jax.Array, gate_weights: jax.Array) -> None:
    """Golden lists the choice by descending score; the module lists it ascending."""
    order = np.argsort(GOLD[f"gate_{case}.indices"], axis=-1)
    np.testing.assert_array_equal(experts, np.take_along_axis(GOLD[f"gate_{case}.indices"], order, axis=-1))
    want = np.take_along_axis(GOLD[f"gate_{case}.weights"], order, axis=-1)
    assert gate_weights.dtype == jnp.float32
    np.testing.assert_allclose(gate_weights, want, rtol=0, atol=2e-6)  # a float32 sum of 64 terms in another order


def test_router_scores_equal_golden():
    run = jax.jit(
        lambda gate, rows: moe._SCORES["sqrtsoftplus"](moe.Router(EXPERTS).apply({"params": gate}, rows, None)[0])
    )
    scores = run(params()["gate"], X.reshape(-1, HIDDEN))
    np.testing.assert_allclose(scores, GOLD["scores"], rtol=0, atol=2e-6)


@pytest.mark.parametrize("case", GATES)
def test_gates_equal_golden(case):
    assert_gate(case, *route(case))


def test_image_tokens_use_their_own_bias():
    assert IMAGE.any() and not IMAGE.all()
    with pytest.raises(AssertionError):  # negative control: image bias ignored
        assert_gate("mixed", *route("text"))
    with pytest.raises(AssertionError):
        assert_gate("mixed", *route("mixed", params()["gate"]["bias_vl"]))


def test_the_bias_is_no_part_of_the_weight():
    """Negative control."""
    biased = np.take_along_axis(
        GOLD["scores"] + params()["gate"]["bias"], np.sort(GOLD["gate_text.indices"], axis=-1), axis=-1
    )
    wrong = biased / biased.sum(-1, keepdims=True) * ROUTE_SCALE
    with pytest.raises(AssertionError):
        assert_gate("text", np.sort(GOLD["gate_text.indices"], axis=-1), jnp.asarray(wrong))
    with pytest.raises(AssertionError):  # and without it other experts are chosen
        assert_gate("text", *route("text", np.zeros(EXPERTS, np.float32)))


@functools.cache
def one_expert() -> dict[str, jax.Array]:
    """Expert 2 alone on all tokens, and wrong without its clamps."""
    leaves = jax.tree.map(lambda w: jnp.asarray(w[2:3]), params()["experts"])

    def tile(bound, rows, weight):
        return bound._expert_tiles(rows[None], leaves, weight[None], jnp.zeros(1, jnp.int32))[0]

    @jax.jit
    def run(rows, weight):
        rows = quant.fake_q8(rows)
        matmuls = [moe.project_rows(rows, moe.weight_matrix(leaves[w], RELEASED, "fp4")[0]) for w in ("w1", "w3")]
        bound = module().bind({})
        return {
            "w1_out": RELEASED.round(matmuls[0]),
            "w3_out": RELEASED.round(matmuls[1]),
            "out_unweighted": tile(bound, rows, jnp.ones_like(weight)),
            "out_weighted": tile(bound, rows, weight),
            "unclamped": tile(module().clone(limit=0.0).bind({}), rows, weight),
        }

    return run(X.reshape(-1, HIDDEN), GOLD["expert2.route_w"])


def test_one_routed_expert_equals_golden():
    for name in ("w1_out", "w3_out", "out_unweighted", "out_weighted"):
        assert_close(one_expert()[name], GOLD[f"expert2.{name}"])


def test_clamps_and_an_early_weight_matter():
    """Negative control: clamps left out; the routing weight applied after w2 instead of before it."""
    want = GOLD["expert2.out_weighted"]
    late = RELEASED.round(one_expert()["out_unweighted"].astype(jnp.float32) * GOLD["expert2.route_w"])
    for wrong in (one_expert()["unclamped"], late):
        with pytest.raises(AssertionError):
            assert_close(wrong, want)


def test_the_shared_expert_equals_golden():
    leaves = jax.tree.map(jnp.asarray, params()["shared_experts"])
    bound = module().bind({"params": {"shared_experts": leaves}})
    run = jax.jit(lambda rows: bound._shared(quant.fake_q8(rows)))
    assert_close(run(X.reshape(-1, HIDDEN)), GOLD["shared.out"])


@pytest.mark.parametrize("case", ["text", "mixed"])
def test_whole_layers_equal_golden(case):
    out, experts = layer(params(), X, IMAGE if case == "mixed" else np.zeros_like(IMAGE))
    assert_close(out, GOLD[f"out_{case}"])
    np.testing.assert_array_equal(experts.reshape(-1, TOPK), np.sort(GOLD[f"gate_{case}.indices"], axis=-1))


def dense_layer(tree: dict, x: np.ndarray, topk: int) -> np.ndarray:
    """Every token through its experts one by one, float64; weights dequantised, tree as in `params`."""

    def expert(leaves: dict, row: np.ndarray, weight: float) -> np.ndarray:
        w1, w2, w3 = (leaves[name]["weight"].astype(np.float64) for name in ("w1", "w2", "w3"))
        gate, up = np.minimum(w1 @ row, LIMIT), np.clip(w3 @ row, -LIMIT, LIMIT)
        return w2 @ (weight * silu(gate) * up)

    out = np.zeros(x.shape)
    for n, row in enumerate(x.astype(np.float64)):
        scores = np.sqrt(np.logaddexp(0, tree["gate"]["weight"].astype(np.float64) @ row))
        chosen = np.argsort(-(scores + tree["gate"]["bias"]), kind="stable")[:topk]
        total = scores[chosen].sum() if topk > 1 else 1.0
        out[n] = expert(tree["shared_experts"], row, 1.0)
        for e in chosen:
            one = jax.tree.map(lambda w, e=e: w[e], tree["experts"])
            out[n] += expert(one, row, ROUTE_SCALE * scores[e] / total)
    return out


@functools.cache
def dequantised() -> dict:
    """The golden weights in float32, as the `float32` numerics hold them."""

    @jax.jit
    def plain(tree):
        return {
            kind: {name: {"weight": quant.dequantize_weight(leaf, jnp.float32)} for name, leaf in tree[kind].items()}
            for kind in ("experts", "shared_experts")
        }

    gate = {name: w.astype(np.float32) for name, w in params()["gate"].items()}
    return {"gate": gate, **jax.tree.map(np.asarray, plain(params()))}


@pytest.mark.parametrize("topk", [1, 3])
def test_random_and_extreme_routings_equal_a_dense_loop(topk):
    """Nothing is dropped, also when all tokens choose one expert; one compiled program for all routings."""
    rng = np.random.default_rng(topk)
    x = rng.standard_normal((40, HIDDEN)).astype(np.float32)
    for bias in [
        np.zeros(8),
        *rng.standard_normal((4, 8)),
        np.eye(8)[5] * 100,
        np.arange(8) * 10.0,
        -np.arange(8) * 10.0,
    ]:
        tree = {**dequantised(), "gate": {**dequantised()["gate"], "bias": bias.astype(np.float32)}}
        out, experts = layer(tree, x, numerics=FLOAT32, topk=topk)
        np.testing.assert_allclose(out, dense_layer(tree, x, topk), rtol=0, atol=2e-5)
        if bias[5] == 100:
            assert (np.asarray(experts) == 5).any(axis=-1).all()


def test_a_token_alone_equals_the_token_in_a_batch():
    whole, _ = layer(params(), X, IMAGE)
    for b, t in ((0, 0), (1, 8)):
        alone, _ = layer(params(), X[b : b + 1, t : t + 1], IMAGE[b : b + 1, t : t + 1])
        np.testing.assert_array_equal(wide(alone[0, 0]), wide(whole[b, t]))


SHAPES = [(1, 1, 8), (5, 3, 8), (33, 2, 4), (64, 1, 3)]
grouped = jax.jit(lambda experts, n: moe.group_rows(experts, n)[:2], static_argnums=1)


@given(st.data(), st.sampled_from(SHAPES))
def test_every_row_has_its_own_place_in_a_tile_of_its_expert(data, shape):
    rows, k, n = shape
    favourite = data.draw(st.integers(0, n - 1))
    elements = st.one_of(st.just(favourite), st.integers(0, n - 1))
    experts = data.draw(hnp.arrays(np.int32, (rows, k), elements=elements))
    position, tile_expert = (np.asarray(a) for a in grouped(experts, n))
    height = moe._tile_rows(rows * k, n)
    assert height >= 2  # a matmul of one row would sum in another order
    assert position.shape == experts.shape
    assert len(np.unique(position)) == position.size  # nothing dropped, nothing doubled
    assert position.min() >= 0 and position.max() < len(tile_expert) * height
    np.testing.assert_array_equal(tile_expert[position // height], experts)
    for e in range(n):  # tokens of an expert keep their order
        assert (np.diff(position[experts == e]) > 0).all()
