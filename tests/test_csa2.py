"""CSA2's softmax over window and selected keys: golden sparse attention, the forms it is called in, and its edges."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_stack import CONFIG, empty_state, runs
from dsv41_jax import csa2
from dsv41_jax.cached_block import CachedBlock
from dsv41_jax.numerics import FLOAT32, RELEASED
from module_golden import BF16, assert_close, assert_within_one_ulp, load, wide

GOLD = load("attention")
Q, KV, SINK, INDEX = (GOLD[f"sparse.{name}"] for name in ("q", "kv", "sink", "idx"))
attend = jax.jit(csa2.attend, static_argnums=6)
NO_WINDOW = np.zeros((2, 5, 1), bool)


def gathered(index: np.ndarray, numerics, sink: np.ndarray = SINK) -> jax.Array:
    """Attention of the golden queries over rows of KV listed for each query, -1 for none."""
    dtype = numerics.dtype
    rows = np.take_along_axis(KV[:, None], np.maximum(index, 0)[..., None], axis=2)
    return attend(Q.astype(dtype), KV[:, :1].astype(dtype), NO_WINDOW, rows.astype(dtype), index >= 0, sink, numerics)


def test_sparse_attention_equals_golden():
    assert GOLD["sparse.scale"] == Q.shape[-1] ** -0.5
    assert_close(gathered(INDEX, RELEASED), GOLD["sparse.out_kernel"])
    assert_within_one_ulp(np.asarray(gathered(INDEX, FLOAT32)).astype(BF16), GOLD["sparse.out_fp32"], equal=0.99)


def test_a_query_without_keys_yields_zero():
    assert (INDEX[0, 1] == -1).all()
    for numerics in (RELEASED, FLOAT32):
        np.testing.assert_array_equal(wide(gathered(INDEX, numerics))[0, 1], 0.0)
    everything_empty = gathered(np.full_like(INDEX, -1), RELEASED)
    np.testing.assert_array_equal(wide(everything_empty), 0.0)


def test_one_key_is_weighed_against_the_sink():
    row = INDEX[0, 3][INDEX[0, 3] >= 0]
    assert len(row) == 1
    logits = wide(Q[0, 3]) @ wide(KV[0, row[0]]) / 8
    want = wide(KV[0, row[0]]) / (1 + np.exp(SINK - logits))[:, None]
    np.testing.assert_allclose(gathered(INDEX, FLOAT32)[0, 3], want, rtol=1e-5, atol=1e-6)


def test_the_order_of_the_list_does_not_matter():
    shuffled = np.random.default_rng(0).permuted(INDEX, axis=-1)
    np.testing.assert_allclose(gathered(shuffled, FLOAT32), gathered(INDEX, FLOAT32), rtol=1e-5, atol=1e-6)
    assert_close(gathered(shuffled, RELEASED), np.asarray(gathered(INDEX, RELEASED)))


@pytest.mark.parametrize("numerics", [RELEASED, FLOAT32], ids=lambda n: n.name)
def test_gathered_shared_and_windowed_keys_agree(numerics):
    """The same keys: all in the window; 40 in the window and 50 shared under a mask; 40 and a list for each query."""
    mask = np.random.default_rng(1).random((2, 5, 90)) < 0.4
    mask[0, 2], mask[1, 0, :40], mask[1, 1, 40:] = False, False, False  # no key at all, none left, none right
    q, kv = Q.astype(numerics.dtype), KV.astype(numerics.dtype)
    order = np.argsort(~mask[..., 40:], axis=-1, kind="stable")
    rows = np.take_along_axis(kv[:, None, 40:], order[..., None], axis=2)
    rows_mask = np.take_along_axis(mask[..., 40:], order, axis=-1)
    windowed = attend(q, kv, mask, None, None, SINK, numerics)
    shared = attend(q, kv[:, :40], mask[..., :40], kv[:, 40:], mask[..., 40:], SINK, numerics)
    listed = attend(q, kv[:, :40], mask[..., :40], rows, rows_mask, SINK, numerics)
    np.testing.assert_array_equal(wide(windowed)[0, 2], 0.0)
    for other in (shared, listed):
        assert other.dtype == numerics.dtype
        np.testing.assert_array_equal(wide(other)[0, 2], 0.0)
        if numerics is RELEASED:
            assert_close(other, np.asarray(windowed))
        else:
            np.testing.assert_allclose(other, windowed, rtol=1e-5, atol=1e-6)


def test_gradients_reach_the_keys_that_are_seen_and_no_others():
    def loss(q, kv, sink):
        return jnp.sum(csa2.attend(q, kv, jnp.asarray(mask), None, None, sink, FLOAT32) ** 2)

    mask = np.random.default_rng(1).random((2, 5, 90)) < 0.2
    mask[..., 7] = True  # every query sees a key, as in the model
    mask[..., 8] = False
    of_q, of_kv, of_sink = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*(jnp.asarray(wide(a)) for a in (Q, KV, SINK)))
    for gradient in (of_q, of_kv, of_sink):
        assert np.isfinite(gradient).all()
    assert (np.abs(of_sink) > 0).all()
    np.testing.assert_array_equal((np.asarray(of_kv) != 0).any(axis=-1), mask.any(axis=1))


@functools.cache
def window_of(t: int):
    """The window mask of a block of t tokens, over the W - 1 positions before it and its own."""

    def run(start):
        block = CachedBlock(CONFIG, RELEASED, start, jnp.full_like(start, t), t, empty_state(1))
        masks = []
        run, q = runs()[0][0], jnp.zeros((1, t, 1, CONFIG.head_dim))
        attention = SimpleNamespace(window_rows=lambda y, *_: y, attend=lambda q, kv, mask, *_: masks.append(mask) or q)
        _, window = block.window(empty_state(1), run, 0, attention, q[:, :, 0])
        block.attend(empty_state(1), run, 0, attention, q, window, None)
        return masks[0]

    return jax.jit(run)


@pytest.mark.parametrize(("t", "start"), [(5, 0), (20, 0), (1, 3), (1, 7), (1, 8), (1, 21)])
def test_window_masks_equal_the_golden_lists(t, start):
    """Golden lists name rows of the call in a prefill, slots of a ring of 8 in a step: compared as positions."""
    window_mask = window_of(t)(np.array([start]))
    width = CONFIG.sliding_window
    golden = GOLD[f"window_idx.win8_s{t}_p{start}"]
    for i, (mask, listed) in enumerate(zip(np.asarray(window_mask[0]), golden, strict=True)):
        # Blocks of few queries have each query's own window, longer ones the keys of all.
        first = start - width + 1 + (i if len(mask) == width else 0)
        positions = first + np.arange(len(mask))
        listed = listed[listed >= 0]
        if t == 1:
            listed = start - (start - listed) % 8
        assert sorted(positions[mask]) == sorted(listed), f"query {i}"


@pytest.mark.parametrize("mistake", ["sink_dropped", "scale_left_out", "sink_as_a_value", "rounded_probabilities"])
def test_wrong_attention_fails_the_golden_comparison(mistake):
    """Negative control."""
    with pytest.raises(AssertionError):
        if mistake == "sink_dropped":
            assert_close(gathered(INDEX, RELEASED, np.full_like(SINK, -np.inf)), GOLD["sparse.out_kernel"])
        elif mistake == "sink_as_a_value":
            assert_close(gathered(INDEX, RELEASED, np.exp(SINK)), GOLD["sparse.out_kernel"])
        elif mistake == "scale_left_out":
            rows = np.take_along_axis(KV[:, None], np.maximum(INDEX, 0)[..., None], axis=2)
            out = attend((Q * 8).astype(BF16), KV[:, :1], NO_WINDOW, rows, INDEX >= 0, SINK, RELEASED)
            assert_close(out, GOLD["sparse.out_kernel"])
        else:  # probabilities in bf16 against the float32 result
            out = np.asarray(gathered(INDEX, RELEASED))
            assert_within_one_ulp(out, GOLD["sparse.out_fp32"], equal=0.99)
