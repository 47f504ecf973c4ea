"""Rows that share the pages of a prefix: none disturbs another, and none rewinds into what is shared.

A small random model; every cache has two rows, so all tests run the same three programs.
"""

import numpy as np
import pytest

import dsv41_jax as ds
from random_models import load_random
from tiny_golden import assert_close

MAX_LEN = 256
WINDOW = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ds.Model:
    """Sources of both ratios, selections that are used again, a candidate pool, Engram."""
    loaded = load_random(tmp_path_factory.mktemp("sharing") / "model", 110)
    config = loaded.config
    assert {config.compress_ratios[i] for i in config.kv_source_layer_ids} == {1, 2}
    assert config.supports_ced and config.candidate_source_layer_id is not None and config.engram_layer_ids
    assert config.sliding_window == WINDOW
    return loaded


@pytest.fixture(scope="module")
def text(model) -> np.ndarray:
    """int32 [200] tokens."""
    return np.random.default_rng(0).integers(3, model.config.vocab_size, 200).astype(np.int32)


def read(model: ds.Model, text: np.ndarray, n: int = 132) -> ds.Cache:
    """Row 0 has read n tokens, row 1 three."""
    return model.prefill(np.tile(text[:n], (2, 1)), lengths=[n, 3], mode="ced", max_len=MAX_LEN)[1]


def shared(model: ds.Model, text: np.ndarray, hit: int, n: int, ids: np.ndarray) -> tuple[np.ndarray, ds.Cache]:
    """Row 0 has read 132 tokens; row 1 resumes after `hit` of them with ids [n]."""
    cache = read(model, text)
    return model.resume(cache, 1, cache.pages(0)[: -(-hit // 128)], hit, ids[:n])


def test_rows_that_share_pages_go_on_as_if_alone(model, text):
    """Row 1 goes on with other tokens than row 0: row 0 gives what it gives beside a row that shares nothing."""
    other = np.concatenate([text[:129], 3 + (text[129:] * 7) % (model.config.vocab_size - 3)]).astype(np.int32)
    logits, cache = shared(model, text, 129, 150, other)
    single = read(model, text)
    assert np.isfinite(logits).all()
    for at in range(132, 140):
        pair, cache = model.decode(cache, [text[at], other[at + 18]])
        alone, single = model.decode(single, [text[at], 5])
        assert_close(pair[0], np.asarray(alone)[0])
        assert np.abs(np.asarray(pair[1]) - np.asarray(alone)[1]).max() > 0.01


def test_a_shared_prefix_is_not_rewound_into(model, text):
    """Neither by the row that adopted it nor by the one that wrote it: both would write into the same pages."""
    _, cache = shared(model, text, 129, 140, text)
    assert cache.floor.tolist() == [128, 129] and cache.lengths.tolist() == [132, 140]
    assert cache.pages(1)[0] == cache.pages(0)[0] and cache.pages(1)[1] != cache.pages(0)[1]
    for wrong in ([127, 140], [132, 128], [132, 125]):
        with pytest.raises(ValueError, match="prefix that is shared"):
            cache.rewind(wrong)
    assert cache.rewind([128, 129]).lengths.tolist() == [128, 129]


def test_a_row_is_used_again_for_an_unrelated_prompt_of_the_same_prefix(model, text):
    """Twice into the same row: the second finds no trace of the first."""
    _, cache = shared(model, text, 128, 150, np.concatenate([text[:128], text[10:60]]))
    assert cache.floor.tolist() == [128, 150 - WINDOW]
    again, cache = model.resume(cache, 1, cache.pages(0)[:1], 128, text[:160])
    fresh, _ = shared(model, text, 128, 160, text)
    np.testing.assert_array_equal(again, fresh)
    assert cache.lengths.tolist() == [132, 160]


def test_a_row_goes_on_from_its_own_pages(model, text):
    """As the next turn of a conversation does: the page that the prefix fills in part is written on, not copied."""
    cache = read(model, text)
    pages = cache.pages(0)
    logits, cache = model.resume(cache, 0, pages, 129, text[:160])
    assert cache.pages(0) == pages
    fresh, other = shared(model, text, 129, 160, text)
    assert_close(logits, np.asarray(fresh))
    own, _ = model.decode(cache, [text[160], 5])
    assert_close(own[0], np.asarray(model.decode(other, [5, text[160]])[0])[1])


def test_the_decoder_sees_its_own_window_after_going_back(model, text):
    """A length before the decoder's windows is refused: a query there would not even see its own row."""
    cache = read(model, text, 60)
    assert cache.floor.tolist() == [60 - WINDOW, 0]
    with pytest.raises(ValueError, match="before the decoder's windows"):
        cache.rewind([59 - WINDOW, 3])
    assert cache.rewind([60 - WINDOW, 3]).lengths.tolist() == [60 - WINDOW, 3]
