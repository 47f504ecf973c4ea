"""Which rule each parameter gets, the schedule, and the router-bias rule."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.checkpoint.names import flatten
from dsv41_jax.checkpoint.released import abstract_params
from dsv41_jax.numerics import FLOAT32
from dsv41_jax.training.demo_optimizer import labels, learning_rate, make_optimizer
from dsv41_jax.training.init import init_params
from dsv41_jax.training.step import balanced_bias, expert_loads
from tiny_training import tiny_training_config


def test_labels():
    found = {".".join(path): label for path, label in flatten(labels(abstract_params(tiny_training_config(), FLOAT32)))}
    expected = {
        "matrix": ["layers.attn.wq_b.weight", "layers.ffn.experts.w2.weight", "layers.ffn.shared_experts.w1.weight"]
        + ["compressors.r2.wkv.weight", "indexers.wq_b.weight", "engram.l0.wkv.weight", "mtp.main_proj.weight"],
        "embedding": ["embed.weight", "head.weight", "mtp.markov_head.embed.weight"],
        "table": ["engram.l0.embed.weight"],
        "other": ["norm.weight", "layers.hc_attn.fn", "layers.attn.attn_sink", "layers.ffn.gate.weight"]
        + ["mtp.layers.hc_ffn.base", "mtp.main_norm.weight", "compressors.r2.k_norm.weight", "engram.l0.q_weight"],
        "frozen": ["layers.ffn.gate.bias", "layers.ffn.gate.bias_vl", "mtp.layers.ffn.gate.bias"],
    }
    for label, names in expected.items():
        assert {name: found[name] for name in names} == dict.fromkeys(names, label)
    with pytest.raises(ValueError, match="params.surprise: no optimizer rule"):
        labels({"surprise": jnp.zeros(2)})


def test_each_matrix_of_a_stack_is_orthogonalised_by_itself():
    params = {"wq_a": {"weight": jnp.zeros((3, 8, 16))}, "gate": {"bias": jnp.zeros((3, 4))}}
    grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(0), p.shape), params)
    grads["wq_a"]["weight"] *= jnp.asarray([1.0, 10.0, 0.1])[:, None, None]
    optimizer = make_optimizer(lambda step: 1.0)
    update = jax.jit(optimizer.update)
    updates, _ = update(grads, optimizer.init(params), params)
    for matrix in updates["wq_a"]["weight"]:
        singular = np.linalg.svd(matrix, compute_uv=False) / (0.18 * np.sqrt(16))
        assert singular.min() > 0.5 and singular.max() < 1.4  # five Newton-Schulz steps end near 1, not at it
    assert np.all(updates["gate"]["bias"] == 0)


def test_schedule():
    rate = learning_rate(0.5, steps=100, warmup=10, decay_from=60)
    np.testing.assert_allclose(
        [rate(s) for s in (0, 5, 10, 59, 80, 100)], [0, 0.25, 0.5, 0.5, 0.2525, 0.005], rtol=1e-5
    )


def test_router_bias_moves_towards_the_mean_load():
    experts = {0: jnp.asarray([[[0, 1], [0, 2], [0, 1]]]), 3: jnp.asarray([[[0, 1], [2, 1], [0, 2]]])}
    loads = expert_loads(experts, 3)
    np.testing.assert_array_equal(loads, [[3, 2, 1], [2, 2, 2]])
    moved = balanced_bias(jnp.full((2, 3), 0.5), loads)
    np.testing.assert_allclose(moved, [[0.499, 0.5, 0.501], [0.5, 0.5, 0.5]], rtol=1e-6)


def test_fresh_parameters_fit_the_manifest_and_repeat():
    config = tiny_training_config()
    make = jax.jit(partial(init_params, config))
    one, two = (dict(flatten(make(jax.random.key(3, impl="unsafe_rbg")))) for _ in range(2))
    expected = dict(flatten(abstract_params(config, FLOAT32)))
    assert {p: (w.shape, w.dtype) for p, w in one.items()} == {p: (w.shape, w.dtype) for p, w in expected.items()}
    for path, weight in one.items():
        np.testing.assert_array_equal(weight, two[path])
        assert np.isfinite(weight).all()
    assert np.all(one["layers", "attn", "wo_b", "weight"] == 0)
