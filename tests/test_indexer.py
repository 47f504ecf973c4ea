"""Indexer: queries, weights and scores against the golden stack; selection and candidate pool, exactly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from attention_stack import CONFIG, stack_params
from dsv41_jax import indexer
from dsv41_jax.blocks import attention_module, indexer_module
from dsv41_jax.numerics import FLOAT32, RELEASED
from dsv41_jax.rope import angles, layer_frequencies
from module_golden import BF16, assert_close, assert_same_bits, load, wide

GOLD = load("attention")
SOURCES = {1: (0, 1), 2: (1, 2), 3: (2, 2)}  # index source -> its slot, the layer whose keys it scores
PREFILL, TOPK, BLOCK, BLOCKS = 23, CONFIG.index_topk, CONFIG.candidate_block_size, CONFIG.candidate_topk_blocks
score = jax.jit(indexer.index_scores, static_argnums=3)
select = jax.jit(indexer.select, static_argnums=2)
blocks_of = jax.jit(indexer.candidate_blocks, static_argnums=(4, 5))
mask_of = jax.jit(indexer.pool_mask, static_argnums=(1, 3))


def gold(layer: int, name: str, call: str = "prefill23") -> np.ndarray:
    return GOLD[f"layer{layer}.own.{call}.{name}"]


def ratio(layer: int) -> int:
    return CONFIG.compress_ratios[layer]


def visible(n: int, per: int, positions: np.ndarray) -> np.ndarray:
    """bool [t, n]: entries complete at each position."""
    return np.arange(n) < ((positions + 1) // per)[:, None]


@functools.cache
def index_queries() -> dict[int, tuple[jax.Array, jax.Array]]:
    """Queries and head weights of each index source, from the recorded layer inputs."""

    @jax.jit
    def run(params, xs):
        cos, sin = angles(jnp.broadcast_to(jnp.arange(PREFILL), (2, PREFILL)), layer_frequencies(CONFIG, True))
        found = {}
        for layer, (slot, _) in SOURCES.items():
            attention = attention_module(CONFIG, RELEASED)
            qr, _ = attention.apply({"params": params["layers"][layer]}, xs[layer], cos, sin, method="queries")
            weights = jax.tree.map(lambda w, slot=slot: w[slot], params["indexers"])
            found[layer] = indexer_module(CONFIG, RELEASED).apply({"params": weights}, qr, xs[layer], cos, sin)
        return found

    return run(stack_params(), {layer: GOLD[f"layer{layer}.x"][:, :PREFILL] for layer in SOURCES})


@pytest.mark.parametrize("layer", SOURCES)
def test_queries_and_head_weights_equal_golden(layer):
    queries, weights = index_queries()[layer]
    assert_close(queries, gold(layer, "index_q"))
    assert_close(weights, gold(layer, "index_weights"))


@pytest.mark.parametrize("layer", SOURCES)
def test_scores_of_golden_queries_equal_golden(layer):
    keys = gold(SOURCES[layer][1], "index_k")
    got = score(gold(layer, "index_q"), gold(layer, "index_weights"), keys, RELEASED)
    assert got.dtype == jnp.float32
    assert_same_bits(got, np.asarray(got).astype(BF16).astype(np.float32))  # rounded, kept wide
    assert_close(np.asarray(got).astype(BF16), gold(layer, "score_raw"))


def masked(layer: int, call: str) -> tuple[np.ndarray, np.ndarray]:
    """Golden scores and which of them may be chosen."""
    scores = wide(gold(layer, "score", call))
    return scores, np.isfinite(scores)


CALLS = ["prefill23", *(f"decode{p}" for p in range(PREFILL, 30))]


def call_positions(call: str) -> np.ndarray:
    return np.arange(PREFILL) if call == "prefill23" else np.array([int(call.removeprefix("decode"))])


@pytest.mark.parametrize("layer", SOURCES)
def test_selection_from_golden_scores_is_exact(layer):
    for call in CALLS:
        scores, allowed = masked(layer, call)
        np.testing.assert_array_equal(select(pad(scores), pad(allowed), TOPK), gold(layer, "topk", call), err_msg=call)
        if layer < 3:  # not restricted by a pool
            n = scores.shape[-1]
            np.testing.assert_array_equal(allowed[0], visible(n, ratio(layer), call_positions(call)), err_msg=call)


def pad(array: np.ndarray, n: int = 30) -> np.ndarray:
    """Entries that do not exist yet, as a cache has them: never allowed."""
    return np.pad(array, ((0, 0), (0, 0), (0, n - array.shape[-1])))


def pool_rows(scores: np.ndarray, seen: np.ndarray, newest: np.ndarray, block: int, topk: int) -> np.ndarray:
    """The candidate pool as a mask of entries."""
    pool = blocks_of(scores, seen, np.broadcast_to(newest, scores.shape[:2]), None, block, topk)
    return np.asarray(mask_of(pool, scores.shape[-1], None, block))


def test_candidates_of_the_stack_are_exact():
    for call in CALLS:
        scores, seen = masked(2, call)
        n = scores.shape[-1]
        got = pool_rows(pad(scores), pad(seen), call_positions(call) // BLOCK, BLOCK, BLOCKS)
        np.testing.assert_array_equal(got[..., :n], gold(2, "candidates", call), err_msg=call)
        restricted = wide(gold(3, "score", call)) > -np.inf
        np.testing.assert_array_equal(restricted, seen & gold(2, "candidates", call), err_msg=call)


@pytest.mark.parametrize(
    ("case", "per", "topk", "block"), [("prefill_r1", 1, 3, 4), ("prefill_r1", 1, 20, 4), ("prefill_r2", 2, 2, 4)]
)
def test_candidates_of_a_prefill_are_exact(case, per, topk, block):
    scores = wide(GOLD[f"cand.{case}.logits"])
    seen = scores > -np.inf
    count = (np.arange(scores.shape[1]) + 1) // per
    got = pool_rows(scores, seen, (count - 1) // block, block, topk)
    np.testing.assert_array_equal(got, GOLD[f"cand.{case}.mask_top{topk}_b{block}"])


def mixed_zeros() -> np.ndarray:
    """Blocks of four -0 and four +0 by turns."""
    return np.where(np.arange(24) % 8 < 4, np.float32(-0.0), np.float32(0.0))[None, None]


def test_candidates_of_a_step_and_of_equal_scores_are_exact():
    scores = wide(GOLD["cand.decode.logits"])
    n = int(GOLD["cand.decode.compress_len"])
    got = pool_rows(scores, np.ones_like(scores, bool), (n - 1) // 8, 8, 4)
    np.testing.assert_array_equal(got, GOLD["cand.decode.mask_top4_b8"])
    equal = np.zeros((1, 1, 24), np.float32)
    for signed in (equal, -equal, mixed_zeros()):  # the two zeros tie
        got = pool_rows(signed, np.ones_like(equal, bool), 23 // 4, 4, 2)
        np.testing.assert_array_equal(got, GOLD["cand.all_equal.mask_top2_b4_len24"])


scores_of_few_values = hnp.arrays(
    np.float32, (2, 3, 12), elements=st.sampled_from([-1.5, -0.0, 0.0, 0.25, 3.0]), fill=st.nothing()
)
masks = hnp.arrays(bool, (2, 3, 12), elements=st.booleans(), fill=st.nothing())


@settings(max_examples=60)
@given(scores_of_few_values, masks, st.sampled_from([1, 4, 20]))
def test_selection_is_the_stable_best_in_ascending_order(scores, allowed, k):
    got = np.asarray(select(scores, allowed, k))
    assert got.shape == (2, 3, k) and got.dtype == np.int32
    for row in np.ndindex(2, 3):
        order = [i for i in np.argsort(-scores[row], kind="stable") if allowed[row][i]]
        want = sorted(order[:k])
        np.testing.assert_array_equal(got[row], want + [-1] * (k - len(want)))


@settings(max_examples=40)
@given(scores_of_few_values, st.lists(st.integers(0, 12), min_size=3, max_size=3), st.sampled_from([1, 2]))
def test_pool_by_block_number_equals_pool_by_position(scores, counts, topk):
    """The packed form names each entry's block; with blocks in order it is the same pool."""
    seen = np.broadcast_to(np.arange(12) < np.array(counts)[:, None], scores.shape)
    newest = np.broadcast_to((np.array(counts) - 1) // 4, (2, 3))
    numbers = np.broadcast_to(np.arange(12) // 4, (2, 12))
    by_position = mask_of(blocks_of(scores, seen, newest, None, 4, topk), 12, None, 4)
    by_number = mask_of(blocks_of(scores, seen, newest, numbers, 4, topk), 12, numbers, 4)
    np.testing.assert_array_equal(np.asarray(by_number) & seen, np.asarray(by_position) & seen)
    for row in range(3):
        blocks = np.asarray(by_position)[:, row].reshape(2, 3, 4)
        assert (blocks.all(-1) == blocks.any(-1)).all()
        assert (blocks.any(-1).sum(-1) == min(topk, -(-counts[row] // 4))).all()
        assert counts[row] == 0 or blocks[:, newest[0, row]].all()


MISTAKES = ["bound_off_by_one", "another_sources_keys", "own_ratio_keys_late", "scores_not_rounded", "pool_ignored"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_indexing_fails_the_golden_comparison(mistake):
    """Negative control: the selections of the recorded scores notice."""
    layer = 3 if mistake == "pool_ignored" else 1 if mistake == "another_sources_keys" else 2
    queries, weights, keys = gold(layer, "index_q"), gold(layer, "index_weights"), gold(SOURCES[layer][1], "index_k")
    positions, numerics = np.arange(PREFILL), RELEASED
    if mistake == "bound_off_by_one":
        positions = positions + 1
    elif mistake == "another_sources_keys":  # the newest published ones, of layer 2
        keys = gold(2, "index_k")[:, : keys.shape[1]]
    elif mistake == "own_ratio_keys_late":
        keys = np.roll(keys, 1, axis=1)
    elif mistake == "scores_not_rounded":
        numerics = FLOAT32
    scores = np.asarray(score(queries, weights, keys, numerics))
    allowed = np.broadcast_to(visible(scores.shape[-1], ratio(layer), positions), scores.shape)
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(select(scores, allowed, TOPK), gold(layer, "topk"))
        if mistake == "scores_not_rounded":  # these ties happen to stand: the scores themselves differ
            assert_close(scores.astype(BF16), gold(layer, "score_raw"))


def test_the_selection_of_golden_inputs_equals_golden():
    """The same path as the mistakes above, without one."""
    for layer, (_, source) in SOURCES.items():
        scores = np.asarray(
            score(gold(layer, "index_q"), gold(layer, "index_weights"), gold(source, "index_k"), RELEASED)
        )
        allowed = np.broadcast_to(visible(scores.shape[-1], ratio(layer), np.arange(PREFILL)), scores.shape)
        if layer == 3:
            allowed = allowed & gold(2, "candidates")
        np.testing.assert_array_equal(select(scores, allowed, TOPK), gold(layer, "topk"))


@pytest.mark.parametrize("mistake", ["newest_block_not_kept", "zeros_do_not_tie"])
def test_wrong_pools_fail_the_golden_comparison(mistake, monkeypatch):
    """Negative control."""
    if mistake == "newest_block_not_kept":
        scores = wide(GOLD["cand.prefill_r1.logits"])
        got = pool_rows(scores, scores > -np.inf, np.full(30, -1), 4, 3)
        assert (got != GOLD["cand.prefill_r1.mask_top3_b4"]).any()
    else:
        monkeypatch.setattr(indexer.reference, "one_zero", lambda scores: scores)
        blocks = jax.jit(lambda s: indexer.candidate_blocks(s, s == 0, jnp.full((1, 1), 5), None, 4, 2))(mixed_zeros())
        assert sorted(np.asarray(blocks)[0, 0]) != [0, 5]
