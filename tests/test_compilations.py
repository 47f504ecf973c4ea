"""Few programs: a call whose lengths fall into buckets that were seen compiles nothing, not even a slice."""

import jax
import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax.serving.compiled import programs_asked_for
from random_models import load_random


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ds.Model:
    """Which programs there are does not depend on the size. Sources of both ratios, a candidate pool, Engram, a draft
    block.
    """
    loaded = load_random(tmp_path_factory.mktemp("compilations") / "model", 45)
    assert loaded.config.supports_ced and loaded.config.n_draft and loaded.config.engram_layer_ids
    return loaded


def use(model: ds.Model, n: int, seed: int, mode: str) -> None:
    """A prompt of n tokens and everything that can follow it."""
    ids = np.random.default_rng(seed).integers(3, model.config.vocab_size, (1, n)).astype(np.int32)
    _, cache = model.prefill(ids, mode=mode, max_len=256)
    _, cache = model.decode(cache, [seed + 3])
    tokens, *_ = model.draft(cache, [5])
    _, cache = model.decode(cache, np.asarray(tokens)[:, : 2 + seed % 5])
    cache = cache.rewind(cache.lengths - seed % 3)
    model.decode(cache, [7])


@pytest.mark.parametrize("mode", ["ced", "exact"])
def test_a_second_call_of_any_length_compiles_nothing(model, mode):
    use(model, 50, 0, mode)
    counted, asked_for = ds.compilations(), programs_asked_for()
    for seed, n in enumerate((1, 2, 15, 16, 17, 31, 49, 64, 65, 130, 200), start=1):
        use(model, n, seed, mode)
    assert programs_asked_for() == asked_for and ds.compilations() == counted


def test_the_counter_counts():
    """Negative control."""
    before = programs_asked_for()
    jax.jit(lambda x: x * 3 + np.random.default_rng().random())(1.5)
    assert programs_asked_for() >= before + 1
