"""Experts in training: their gradient, balance, loads by modality, the bias rule, gradients across devices."""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.aot import compile_for
from dsv41_jax.moe import MoE
from dsv41_jax.numerics import FLOAT32, QUANTIZED_TRAINING, QUANTIZED_TRAINING_BF16
from dsv41_jax.router_notes import IMAGE, TEXT, TokenFacts, modality_loads, sequence_balance
from dsv41_jax.training.balance import balanced_bias, load_peaks, token_facts
from fake_devices import run_case
from pallas_kernels.moe import training, training_tpu

TOKENS, TOPK, EXPERTS, WIDTH, INTER, LIMIT = 300, 3, 5, 128, 128, 7.0


def arguments(dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, training.Matrices, jax.Array, jax.Array]:
    """x, weights, matrices, chosen (with experts of other devices, and expert 3 without tokens), direction."""
    rng = np.random.default_rng(0)
    shapes = [(EXPERTS, INTER, WIDTH), (EXPERTS, INTER, WIDTH), (EXPERTS, WIDTH, INTER)]
    matrices = training.Matrices(*(jnp.asarray(rng.standard_normal(s, np.float32) * 0.1) for s in shapes))
    others = np.setdiff1d(np.arange(EXPERTS + 1), [3])
    chosen = np.sort([rng.permutation(others)[:TOPK] for _ in range(TOKENS)]).astype(np.int32)
    x = jnp.asarray(rng.standard_normal((TOKENS, WIDTH)) * 4, dtype)
    weights = jnp.asarray(rng.random((TOKENS, TOPK)), jnp.float32)
    return x, weights, matrices, jnp.asarray(chosen), jnp.asarray(rng.standard_normal((TOKENS, WIDTH)), jnp.float32)


def value_and_grads(function, options: training.Options):
    """Of the sum of outputs along a direction, by x, weights and matrices; and how many pairs were computed."""
    x, weights, matrices, chosen, direction = arguments(options.numerics.dtype)

    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    def run(x, weights, matrices):
        y = function(options, x, chosen, weights, matrices)
        y, computed = y if isinstance(y, tuple) else (y, None)
        return jnp.sum(y * direction), computed

    (value, computed), grads = jax.jit(run)(x, weights, matrices)
    if computed is not None:
        np.testing.assert_array_equal(computed, jnp.sum(chosen < EXPERTS, axis=1))
    return value, jax.tree.leaves(grads)


def assert_near(got, wanted, noise: float) -> None:
    """Every gradient within `noise` of its largest entry."""
    np.testing.assert_allclose(got[0], wanted[0], rtol=noise)
    for one, other in zip(got[1], wanted[1], strict=True):
        one, other = (np.asarray(leaf, np.float32) for leaf in (one, other))
        np.testing.assert_allclose(one, other, rtol=0, atol=noise * np.abs(other).max())


@pytest.mark.parametrize("numerics", [FLOAT32, QUANTIZED_TRAINING], ids=lambda n: n.name)
def test_the_gradient_of_grouped_experts_is_that_of_every_expert_on_every_row(numerics):
    options = training.Options(LIMIT, numerics)
    got, wanted = (value_and_grads(f, options) for f in (training.experts, training.reference))
    assert_near(got, wanted, 1e-5)  # float32 sums of 128 and of 180 terms in another order
    assert not np.any(got[1][2][3]) and np.any(got[1][2][2])  # expert 3 has no tokens, 2 has
    with pytest.raises(AssertionError):  # negative control: another clamp
        assert_near(value_and_grads(training.reference, training.Options(LIMIT / 2, numerics)), wanted, 1e-5)


def test_the_kernels_of_tpus_compute_the_same():
    """JAX's grouped matmuls, interpreted, in bf16."""
    options = training.Options(LIMIT, QUANTIZED_TRAINING_BF16)
    wanted = value_and_grads(training.reference, options)
    interpreted = {
        name: functools.partial(getattr(training_tpu, name), interpret=True) for name in ("forward", "backward")
    }
    with mock.patch.multiple(training, _loop_forward=interpreted["forward"], _loop_backward=interpreted["backward"]):
        # bf16 gradients have steps of 2^-8 of their value; the two sum and round at different points.
        assert_near(value_and_grads(training.experts, options), wanted, 2.0**-6)


def test_the_kernels_compile_for_a_tpu():
    options, spec = training.Options(LIMIT, QUANTIZED_TRAINING_BF16), jax.ShapeDtypeStruct
    matrices = training.Matrices(*(spec((2, *shape), jnp.float32) for shape in ((128, 256), (128, 256), (256, 128))))
    inputs = spec((512, 256), jnp.bfloat16), spec((512, 1), jnp.int32), spec((512, 1), jnp.float32), matrices
    gradient = jax.grad(lambda *a: jnp.sum(training.experts(options, *a)[0]), argnums=(0, 2, 3))
    text = compile_for("v5e", gradient, *inputs).as_text()
    assert (
        text.count('custom_call_target="tpu_custom_call"') == 5
    )  # gate and up again, and two gradients of each product


def test_matrices_are_not_copied_for_each_tile():
    n, experts, width = 2048, 2, 128
    options = training.Options(LIMIT, QUANTIZED_TRAINING)
    spec = jax.ShapeDtypeStruct
    matrices = training.Matrices(*(spec((experts, width, width), jnp.float32) for _ in range(3)))
    inputs = spec((n, width), jnp.float32), spec((n, 2), jnp.int32), spec((n, 2), jnp.float32), matrices
    with mock.patch.object(training, "_MOST_HEIGHT", 8):
        gradient = jax.grad(lambda *a: jnp.sum(training.experts(options, *a)[0]), argnums=(0, 3))
        compiled = jax.jit(gradient).lower(*inputs).compile()
    tiles = n * 2 // 8
    assert compiled.memory_analysis().temp_size_in_bytes < tiles * width * width * 4 / 4  # of the copies of one matrix


def routed(rng: np.random.Generator, rows: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores [rows, tokens, E] and experts [rows, tokens, k]."""
    scores = rng.random((rows, tokens, EXPERTS)).astype(np.float32) + 0.1
    return scores, np.sort(np.argsort(-scores, axis=-1)[..., :TOPK], axis=-1).astype(np.int32)


def plain_balance(scores: np.ndarray, experts: np.ndarray) -> float:
    """One sample's f_i P_i, times its tokens; scores [T, E]."""
    tokens = len(scores)
    frequency = [EXPERTS / TOPK / tokens * np.sum(experts == i) for i in range(EXPERTS)]
    share = np.mean(scores / scores.sum(-1, keepdims=True), axis=0)
    return tokens * float(np.dot(frequency, share))


SAMPLES = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2, 3], [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]], np.int32)
REAL = np.array([[1, 1, 1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1, 0, 0]], np.float32)


def test_balance_equals_numpy_and_packing_equals_apart():
    scores, experts = routed(np.random.default_rng(1), 2, 10)
    balance = jax.jit(jax.value_and_grad(sequence_balance))
    packed, packed_grads = balance(scores, experts, SAMPLES, REAL)
    wanted = 0.0
    for row, sample in ((0, 0), (0, 1), (0, 2), (1, 0)):
        place = SAMPLES[row] == sample
        one, chosen = scores[row][place], experts[row][place]
        wanted += plain_balance(one, chosen)
        alone = np.zeros((1, len(one)), np.int32), np.ones((1, len(one)), np.float32)
        _, grads = jax.value_and_grad(sequence_balance)(one[None], chosen[None], *alone)
        np.testing.assert_allclose(packed_grads[row][place], grads[0], atol=1e-6)  # float32 noise of numbers about 1
    np.testing.assert_allclose(packed, wanted, rtol=1e-6)
    assert not np.any(packed_grads[REAL == 0])  # padding
    together, _ = balance(scores, experts, np.zeros_like(SAMPLES), REAL)
    assert abs(together - wanted) > 1e-3  # negative control: samples not told apart


def test_even_routing_has_the_least_balance_and_the_frequency_has_no_gradient():
    scores = np.ones((1, EXPERTS, EXPERTS), np.float32)
    even = np.sort((np.arange(EXPERTS)[:, None] + np.arange(TOPK)) % EXPERTS, axis=-1)[None].astype(np.int32)
    samples, real = np.zeros((1, EXPERTS), np.int32), np.ones((1, EXPERTS), np.float32)
    np.testing.assert_allclose(sequence_balance(scores, even, samples, real), EXPERTS, rtol=1e-6)
    uneven = scores.copy()
    uneven[..., :TOPK] = 5.0
    chosen = np.broadcast_to(np.arange(TOPK, dtype=np.int32), even.shape)
    assert sequence_balance(uneven, chosen, samples, real) > EXPERTS * 1.2
    gradient = jax.grad(sequence_balance)(uneven, chosen, samples, real)
    assert np.all(gradient[..., :TOPK] > 0) and np.all(gradient[..., TOPK:] < 0)  # descent moves to the idle ones


def test_loads_are_counted_by_modality_without_padding():
    _, experts = routed(np.random.default_rng(2), 2, 10)
    image = np.zeros((2, 10), bool)
    image[1, 3:9] = True
    loads = modality_loads(experts, image, REAL, EXPERTS)
    for modality, mask in ((TEXT, ~image), (IMAGE, image)):
        wanted = np.bincount(experts[mask & (REAL > 0)].reshape(-1), minlength=EXPERTS)
        np.testing.assert_array_equal(loads[modality], wanted)
    text = modality_loads(experts, None, REAL, EXPERTS)
    np.testing.assert_array_equal(text[TEXT], np.sum(loads, axis=0))
    assert not np.any(text[IMAGE])
    np.testing.assert_allclose(load_peaks(loads[None]), [np.max(text[TEXT]) / np.mean(text[TEXT])])


def test_each_modality_moves_its_own_bias():
    gate = {name: jnp.full((2, 4), 0.5) for name in ("weight", "bias", "bias_vl")}
    loads = jnp.asarray([[[4, 0, 2, 2], [0, 0, 0, 8]], [[1, 1, 1, 1], [0, 0, 0, 0]]], jnp.float32)
    moved = balanced_bias(gate, loads, 0.25)
    np.testing.assert_array_equal(moved["bias"], [[0.25, 0.75, 0.5, 0.5], [0.5] * 4])
    np.testing.assert_array_equal(moved["bias_vl"], [[0.75, 0.75, 0.75, 0.25], [0.5] * 4])  # no image tokens: alone
    assert moved["weight"] is gate["weight"]


def test_facts_of_a_packed_batch():
    weights = np.array([[1, 1, 0, 1, 0, 0, 0.0]], np.float32)  # the last token of a sample is not trained
    facts = jax.jit(token_facts)(np.array([[0, 0, 0, 1, 1, 2, 2]], np.int32), weights)
    np.testing.assert_array_equal(facts.weights, [[1, 1, 1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(facts.samples, [[0, 0, 0, 1, 1, 2, 2]])


def test_notes_of_a_layer():
    """The training form computes what the plain one does, and its notes are those of its own choice."""
    module = MoE(EXPERTS, TOPK, 32, "sqrtsoftplus", True, 1.5, 10.0, FLOAT32)
    x = jax.random.normal(jax.random.key(3), (2, 10, 64))
    params = jax.jit(module.init)(jax.random.key(4), x)

    @jax.jit
    def both(params, x):
        notes = module.apply(params, x, None, TokenFacts(jnp.asarray(SAMPLES), jnp.asarray(REAL)))
        return notes, module.apply(params, x)

    (y, notes), (plain, experts) = both(params, x)
    np.testing.assert_allclose(y, plain, atol=1e-6 * float(jnp.abs(plain).max()))  # float32 sums of 64 terms
    np.testing.assert_array_equal(notes.experts, experts)
    np.testing.assert_array_equal(notes.loads, modality_loads(experts, None, REAL, EXPERTS))
    assert notes.dropped == 0 and REAL.sum() <= notes.balance < 3 * REAL.sum()


def test_gradients_across_devices_and_lost_pairs_are_counted():
    run_case("training_experts_mesh", "all_to_all")
