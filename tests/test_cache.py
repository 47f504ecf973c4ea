"""The cache: rings against a plain python model, padding, any split of a prompt, going back, donation.

One small model with a source of each ratio, a candidate pool, Engram and a draft block runs everything in blocks of one
static length that is longer than its rings, so one step and one draft program are compiled.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dsv41_jax as ds
from dsv41_jax import numerics
from dsv41_jax.cache import (
    MAX_REWIND,
    abstract_arrays,
    ring_size,
    zero_arrays,
)
from dsv41_jax.config import ModelConfig, load_config
from dsv41_jax.rings import ring_positions, write_rows
from random_configs import random_legal_config
from random_models import random_token_map, write_model
from stored import rows_of

SEED = 25
BLOCK = 32
MAX_LEN = 96
# float32: other splits sum in another order.
ATOL = 1e-4


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    config, folder = random_legal_config(SEED), tmp_path_factory.mktemp("cache") / "model"
    write_model(folder, config, SEED)
    return ds.load(folder, numerics="float32", token_map=random_token_map(config, SEED))


@pytest.fixture(scope="module")
def prompt(loaded):
    """int32 [2, 96] tokens."""
    return np.random.default_rng(0).integers(3, loaded.config.vocab_size, (2, MAX_LEN)).astype(np.int32)


def new_cache(loaded):
    return loaded._runner.new_cache(2, MAX_LEN)


def read(loaded, cache, ids, n_valid, padding=2):
    """One block that reads the next n_valid [2] tokens of ids [2, any]: logits [2, BLOCK, V] and the cache."""
    n_valid = np.asarray(n_valid, np.int32)
    block = np.full((2, BLOCK), padding, np.int32)
    for row, n in enumerate(n_valid):
        block[row, :n] = ids[row, cache.lengths[row] : cache.lengths[row] + n]
    logits, cache = loaded._runner.extend(cache, block, n_valid, all_logits=True)
    return np.asarray(logits), cache


def read_all(loaded, cache, ids, steps):
    """`read` for each of steps [(n, n), ...]: logits of each row's tokens, two arrays [sum of n, V]; and the cache."""
    logits = [[], []]
    for n_valid in steps:
        out, cache = read(loaded, cache, ids, n_valid)
        for row in range(2):
            logits[row].append(out[row, : n_valid[row]])
    return [np.concatenate(row) for row in logits], cache


def snapshot(cache):
    """Copies of all arrays, batch axis first."""
    return rows_of(cache.arrays)


def assert_same_state(cache, other):
    np.testing.assert_array_equal(cache.lengths, other.lengths)
    for a, b in zip(snapshot(cache), snapshot(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=ATOL)


def test_the_model_has_every_kind_of_state(loaded):
    config, arrays = loaded.config, new_cache(loaded).arrays
    assert sorted(arrays.main_kv) == ["r1", "r2"] and sorted(arrays.tail_values) == ["r2"]
    assert config.n_draft and config.engram_layer_ids and config.candidate_source_layer_id is not None
    assert ring_size(config) == config.sliding_window + MAX_REWIND < BLOCK


# --- rings -----------------------------------------------------------------------------------------------------------

SIZE, LONG = 5, 8  # a ring, and blocks longer than it


@jax.jit
def _write(ring, rows, start, n_valid):
    return write_rows(ring, 1, rows, start, n_valid), ring_positions(start + n_valid, SIZE)


@given(st.lists(st.tuples(st.integers(0, LONG), st.integers(0, LONG)), min_size=1, max_size=6))
def test_ring_equals_a_python_model(blocks):
    ring = np.full((3, 2, SIZE, 2), -1.0, np.float32)  # [layers, B, size, d]
    model = [[-1] * SIZE, [-1] * SIZE]  # position held by each slot
    start = np.zeros(2, np.int32)
    for block in blocks:
        n_valid = np.array(block, np.int32)
        positions = start[:, None] + np.arange(LONG)
        rows = np.where(np.arange(LONG) < n_valid[:, None], positions, -99).astype(np.float32)
        ring, held = _write(ring, np.stack([rows, rows + 0.5], axis=-1), start, n_valid)
        for row in range(2):
            for position in range(start[row], start[row] + n_valid[row]):
                model[row][position % SIZE] = position
        start = start + n_valid
        np.testing.assert_array_equal(np.where(np.asarray(held) >= 0, held, -1), model)
        np.testing.assert_array_equal(np.asarray(ring[1, ..., 0]), model)
    assert (np.asarray(ring[jnp.array([0, 2])]) == -1).all()  # the other layers


# --- padding ---------------------------------------------------------------------------------------------------------


def test_padding_writes_nothing(loaded, prompt):
    _, cache = read(loaded, new_cache(loaded), prompt, (30, 7))
    before, lengths, history = snapshot(cache), cache.lengths, cache.history
    _, cache = read(loaded, cache, prompt, (0, 0))
    for old, new in zip(before, snapshot(cache), strict=True):
        assert old.tobytes() == new.tobytes()
    np.testing.assert_array_equal(cache.lengths, lengths)
    np.testing.assert_array_equal(cache.history, history)
    logits, cache = read(loaded, cache, prompt, (0, 5))
    after = snapshot(cache)
    for old, new in zip(before, after, strict=True):
        assert old[0].tobytes() == new[0].tobytes()
        assert old[1].tobytes() != new[1].tobytes() or new.dtype == np.int32  # page table and floors stay
    # Whatever tokens stand in the padding.
    _, other = read(loaded, new_cache(loaded), prompt, (30, 7), padding=9)
    others, other = read(loaded, other, prompt, (0, 5), padding=11)
    for new, same in zip(after, snapshot(other), strict=True):
        assert new.tobytes() == same.tobytes()
    assert logits[1, :5].tobytes() == others[1, :5].tobytes()
    np.testing.assert_array_equal(cache.history, other.history)


# --- splits ----------------------------------------------------------------------------------------------------------


def test_any_split_gives_the_same_logits_and_state(loaded, prompt):
    """51 and 46 tokens: blocks longer than a ring, single tokens, odd and even cuts, a row that waits for the other."""
    splits = [
        [(32, 32), (19, 14)],
        [(17, 1), (1, 32), (32, 0), (1, 13)],
        [(1, 2), (1, 2), (1, 1), (0, 31), (29, 3), (19, 7)],
        [(28, 9), (23, 27), (0, 10)],
        [(13, 14), (13, 3), (13, 17), (12, 12)],
    ]
    expected, cache = read_all(loaded, new_cache(loaded), prompt, splits[0])
    for steps in splits[1:]:
        logits, other = read_all(loaded, new_cache(loaded), prompt, steps)
        for a, b in zip(logits, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=ATOL)
        assert_same_state(other, cache)
        np.testing.assert_array_equal(other.history, cache.history)


# --- going back ------------------------------------------------------------------------------------------------------


def detour(loaded, cache, ahead):
    """Read `ahead` [2] tokens that are not those of the prompt."""
    rng = np.random.default_rng(1)
    return read(loaded, cache, rng.integers(3, loaded.config.vocab_size, (2, MAX_LEN)), ahead)[1]


def assert_continues(loaded, prompt, cache, fresh):
    """The same drafts, the same logits from here on, and after more than a ring of tokens the same state."""
    lookback = loaded._runner.hasher.lookback
    np.testing.assert_array_equal(cache.lengths, fresh.lengths)
    np.testing.assert_array_equal(cache.history[:, -lookback:], fresh.history[:, -lookback:])
    next_tokens = prompt[np.arange(2), cache.lengths]
    for a, b in zip(loaded.draft(cache, next_tokens), loaded.draft(fresh, next_tokens), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=ATOL)
    steps = [(1, 1), (1, 2), (32, 32)]
    logits, cache = read_all(loaded, cache, prompt, steps)
    expected, fresh = read_all(loaded, fresh, prompt, steps)
    for a, b in zip(logits, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=ATOL)
    assert_same_state(cache, fresh)
    np.testing.assert_array_equal(cache.history, fresh.history)


@pytest.mark.parametrize("lengths", [(29, 4), (32, 7), (1, 16)], ids=str)
@pytest.mark.parametrize("ahead", [(16, 16), (15, 2), (1, 0)], ids=str)
def test_going_back_leaves_no_trace(loaded, prompt, lengths, ahead):
    _, cache = read(loaded, new_cache(loaded), prompt, lengths)
    cache = detour(loaded, cache, ahead).rewind(lengths)
    _, fresh = read(loaded, new_cache(loaded), prompt, lengths)
    assert_continues(loaded, prompt, cache, fresh)


def test_going_back_twice_and_in_between(loaded, prompt):
    _, cache = read(loaded, new_cache(loaded), prompt, (24, 19))
    cache = detour(loaded, cache, (16, 10))
    cache = cache.rewind([33, 22])
    cache = detour(loaded, cache, (3, 0))  # not as far as before: the oldest reachable length stays
    cache = cache.rewind([30, 21]).rewind([24, 19])
    _, fresh = read(loaded, new_cache(loaded), prompt, (24, 19))
    assert_continues(loaded, prompt, cache, fresh)


def test_random_walk_ends_like_a_straight_line(loaded, prompt):
    """As speculative decoding does: read a few tokens, some of them wrong, and go back to the last right one."""
    rng, cache = np.random.default_rng(2), new_cache(loaded)
    for _ in range(12):
        right, wrong = rng.integers(0, 4, 2), rng.integers(0, 5, 2)
        lengths = cache.lengths + right
        ids = prompt.copy()
        for row in range(2):
            ids[row, lengths[row] :] = rng.integers(3, loaded.config.vocab_size, MAX_LEN - lengths[row])
        cache = read(loaded, cache, ids, right + wrong)[1].rewind(lengths)
    fresh = read(loaded, new_cache(loaded), prompt, cache.lengths)[1]
    assert (cache.lengths > 10).all()
    assert_continues(loaded, prompt, cache, fresh)


def test_how_far_back_is_an_error(loaded, prompt):
    _, cache = read(loaded, new_cache(loaded), prompt, (30, 5))
    assert cache.max_rewind == MAX_REWIND == 16
    for wrong in ([13, 5], [31, 5], [30, -1], [30, 6]):
        with pytest.raises(ValueError, match=r"cannot rewind from \[30, 5\] to"):
            cache.rewind(wrong)
    with pytest.raises(ValueError, match="one length for each of 2 rows"):
        cache.rewind([30])
    cache = cache.rewind([14, 0])  # an error spends nothing
    with pytest.raises(ValueError, match="cannot rewind"):
        cache.rewind([13, 0])  # written up to 30: the ring no longer holds what 13 needs
    assert cache.rewind([14, 0]).lengths.tolist() == [14, 0]


# --- donation and shapes ---------------------------------------------------------------------------------------------


def test_a_spent_cache_is_refused(loaded, prompt):
    _, cache = read(loaded, new_cache(loaded), prompt, (3, 3))
    _, after = read(loaded, cache, prompt, (1, 2))
    for use in (
        lambda: read(loaded, cache, prompt, (3, 3)),
        lambda: loaded.decode(cache, [3, 3]),
        lambda: loaded.draft(cache, [3, 3]),
        lambda: cache.rewind([3, 3]),
    ):
        with pytest.raises(RuntimeError, match="donated to an earlier call"):
            use()
    newest = after.rewind([2, 5])
    with pytest.raises(RuntimeError, match="donated to an earlier call"):
        after.rewind([2, 5])
    assert read(loaded, newest, prompt, (1, 1))[1].lengths.tolist() == [3, 6]


def test_a_full_cache_is_an_error_and_not_spent(loaded, prompt):
    _, cache = read_all(loaded, new_cache(loaded), prompt, [(32, 1), (32, 1), (31, 1)])
    with pytest.raises(ValueError, match="max_len=96"):
        read(loaded, cache, np.zeros((2, 200), np.int32), (2, 1))
    _, cache = read(loaded, cache, prompt, (1, 1))
    assert cache.lengths.tolist() == [96, 4]


@pytest.mark.parametrize(("seed", "kind"), [(SEED, numerics.RELEASED), (11, numerics.FLOAT32)], ids=["all", "windows"])
def test_zero_arrays_are_what_the_abstract_ones_say(seed, kind):
    config = ModelConfig.from_json(random_legal_config(seed))
    specs, arrays = abstract_arrays(config, kind, 3, 37), zero_arrays(config, kind, 3, 37)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), specs) == jax.tree.map(lambda x: (x.shape, x.dtype), arrays)
    leaves = jax.tree.leaves(arrays)
    assert not any(np.asarray(leaf).any() for leaf in leaves if leaf is not arrays.page_table)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)  # so each can be donated


def test_released_cache_shapes():
    config = load_config(Path(__file__).parent.parent / "configs/flash.py")
    arrays = abstract_arrays(config, numerics.RELEASED, 1, 1 << 20)
    assert arrays.window["codes"].shape == (40, 1, 128 + MAX_REWIND, config.head_dim)
    assert arrays.window["scales"].shape == (40, 1, config.head_dim // 32, 128 + MAX_REWIND)
    assert arrays.draft_window["codes"].shape[0] == 3
    pages = (1 << 20) // 128
    assert arrays.page_table.shape == (1, pages)
    assert {name: pool["words"].shape for name, pool in arrays.main_kv.items()} == {
        "r1": (1, 72 * pages, 128),
        "r2": (3, 36 * pages, 128),
    }
    assert arrays.index_key["r2"]["codes"].shape == (3, pages, 8, 128)
    assert arrays.index_key["r2"]["scales"].shape == (3, pages // 2, 128)
    assert arrays.tail_values["r2"].shape == (3, 1, 1 + MAX_REWIND, config.head_dim)
    assert arrays.tail_gates["r2"].dtype == jnp.float32
