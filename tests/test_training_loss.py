"""Losses against numbers worked out by hand on a vocabulary of three tokens."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.index_loss import entry_attention, index_kl
from dsv41_jax.training.draft_rounds import DraftRounds
from dsv41_jax.training.loss import draft_loss, token_nats, weighted_mean
from tiny_training import tiny_training_config, tiny_windows

LOG = np.log


def test_token_nats():
    logits = jnp.asarray(LOG([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]]), jnp.float32) + 3.0
    nats = token_nats(logits, jnp.asarray([0, 1]))
    np.testing.assert_allclose(nats, [math.log(2), math.log(8)], rtol=1e-6)
    np.testing.assert_allclose(weighted_mean(nats, jnp.asarray([1.0, 0.0])), math.log(2), rtol=1e-6)


def test_draft_loss():
    # Two positions; the second counts exp(-1/2) in CE and L1.
    draft = jnp.asarray(LOG([[[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]]), jnp.float32)
    target = jnp.asarray(LOG([[[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]]]), jnp.float32)
    tokens = jnp.asarray([[0, 2]])
    raw = jnp.asarray([[0.0, math.log(3)]])  # confidence 1/2 and 3/4
    loss, parts = jax.jit(draft_loss)(draft, target, tokens, raw, jnp.ones((1, 2)))
    w = math.exp(-0.5)
    ce = (math.log(2) - w * math.log(0.6)) / (1 + w)
    l1 = 0.5 / (1 + w)  # |.5-.25| + |.25-.5| on probabilities, then 0
    accept = [0.75, 1.0]  # 1 - L1 / 2
    bce = 0.5 * (-(accept[0] * math.log(0.5) + 0.25 * math.log(0.5)) - math.log(0.75))
    np.testing.assert_allclose(parts["ce"], ce, rtol=1e-5)
    np.testing.assert_allclose(parts["l1"], l1, rtol=1e-5)
    np.testing.assert_allclose(parts["confidence"], bce, rtol=1e-5)
    np.testing.assert_allclose(parts["agree"], 0.875, rtol=1e-5)
    np.testing.assert_allclose(loss, 0.1 * ce + 0.9 * l1 + bce, rtol=1e-5)


def test_draft_loss_leaves_the_target_and_the_acceptance_alone():
    draft, target = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1, 2, 3), np.float32))
    tokens, raw, ones = jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2)), jnp.ones((1, 2))
    gradient = jax.grad(lambda d, t, r: draft_loss(d, t, tokens, r, ones)[0], (0, 1, 2))
    grads = jax.jit(gradient)(draft, target, raw)
    assert np.all(grads[1] == 0) and np.any(grads[0] != 0)
    np.testing.assert_allclose(grads[2], 0.5 * (0.5 - (1 - 0.5 * _distance(draft, target))), atol=1e-6)


def _distance(a, b):
    return jnp.sum(jnp.abs(jax.nn.softmax(a) - jax.nn.softmax(b)), axis=-1)


def test_rounds_predict_the_next_token_from_the_true_previous_one():
    config = tiny_training_config()
    windows = tiny_windows(config)
    ids = np.array([[config.bos_token_id, *range(10, 20)]])
    rounds = DraftRounds(config, windows.make(ids).arrays(), jnp.asarray([[2, 7]]))
    np.testing.assert_array_equal(rounds.previous, [[11, 12, 13], [16, 17, 18]])
    np.testing.assert_array_equal(rounds.targets, [[12, 13, 14], [17, 18, 19]])
    np.testing.assert_array_equal(rounds.start, [2, 7])
    np.testing.assert_array_equal(rounds.weights, np.ones((2, 3)))


def test_rounds_end_with_their_sample():
    config = tiny_training_config()
    ids = np.array([[config.bos_token_id, 10, 11, 12, config.bos_token_id, 13, 14, 15, 16]])
    rounds = DraftRounds(config, tiny_windows(config).make(ids).arrays(), jnp.asarray([[2, 5]]))
    np.testing.assert_array_equal(rounds.weights, [[1, 0, 0], [1, 1, 1]])  # token 4 is a BOS, the rest another sample
    np.testing.assert_array_equal(rounds.start, [2, 1])


def test_index_kl():
    # Even index scores against an attention of 3/4 and 1/4; the second query sees nothing.
    p = jnp.asarray([[[0.75, 0.25], [0.0, 0.0]]])
    mask = jnp.asarray([[[True, True], [False, False]]])
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    total = lambda p, scores: jnp.sum(index_kl(p, scores, mask))  # noqa: E731
    value, slopes = jax.jit(jax.value_and_grad(total, (0, 1)))(p, jnp.zeros((1, 2, 2)))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert np.all(slopes[0] == 0)  # the main attention is only followed
    np.testing.assert_allclose(slopes[1], [[[-0.25, 0.25], [0.0, 0.0]]], atol=1e-6)


def test_heads_count_as_much_as_they_look_at_entries():
    # Two heads over a window key and two entries. Head 0 gives them 1/2, 3/8, 1/8 (its sink takes nothing); head 1
    # gives 1/8 each, its sink the rest: p = (3/8 + 1/8, 1/8 + 1/8) / (3/4).
    window, entries = jnp.asarray([[[1.0, 0.0, 0.0]]]), jnp.asarray([[[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
    q = jnp.asarray(LOG([[[[0.5, 0.375, 0.125], [1.0, 1.0, 1.0]]]]) * math.sqrt(3), jnp.float32)
    ones = jnp.ones((1, 1, 2), bool)
    sink = jnp.asarray([-1e9, math.log(5.0)])
    p = jax.jit(entry_attention)(q, window, ones[..., :1], entries, ones, sink)
    np.testing.assert_allclose(p, [[[2 / 3, 1 / 3]]], rtol=1e-5)
    gathered = jax.jit(entry_attention)(q, window, ones[..., :1], entries[:, None], ones, sink)
    np.testing.assert_allclose(gathered, p, rtol=1e-6)
