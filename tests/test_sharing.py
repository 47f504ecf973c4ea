"""Rows that share the pages of a prefix: none disturbs another, and none rewinds into what is shared."""

import numpy as np
import pytest

import dsv41_jax as ds
from tiny_golden import assert_close, prompt

MAX_LEN = 256


@pytest.fixture(scope="module")
def model(tiny) -> ds.Model:
    return tiny("float32")


def shared(model: ds.Model, hit: int, n: int, ids: np.ndarray) -> tuple[np.ndarray, ds.Cache]:
    """Row 0 has read 132 tokens of `long`; row 1 resumes after `hit` of them with ids [n]."""
    first = np.tile(prompt("long")[:, :132], (2, 1))
    _, cache = model.prefill(first, lengths=[132, 3], mode="ced", max_len=MAX_LEN)
    return model.resume(cache, 1, cache.pages(0)[: -(-hit // 128)], hit, ids[:n])


def test_rows_that_share_pages_go_on_as_if_alone(model):
    """Row 1 goes on with other tokens than row 0: row 0 gives what it gives without a row beside it."""
    text = prompt("long")[0]
    other = np.concatenate([text[:129], (text[129:] * 7 + 3) % 490]).astype(np.int32)
    logits, cache = shared(model, 129, 150, other)
    alone, single = model.prefill(text[None, :132], mode="ced", max_len=MAX_LEN)
    assert np.isfinite(logits).all()
    for at in range(132, 140):
        pair, cache = model.decode(cache, [text[at], other[at + 18]])
        alone, single = model.decode(single, [text[at]])
        assert_close(pair[0], np.asarray(alone)[0])


def test_a_shared_prefix_is_not_rewound_into(model):
    """Neither by the row that adopted it nor by the one that wrote it: both would write into the same pages."""
    _, cache = shared(model, 129, 140, prompt("long")[0])
    assert cache.floor.tolist() == [128, 129] and cache.lengths.tolist() == [132, 140]
    assert cache.pages(1)[0] == cache.pages(0)[0] and cache.pages(1)[1] != cache.pages(0)[1]
    for wrong in ([127, 140], [132, 128], [132, 125]):
        with pytest.raises(ValueError, match="prefix that is shared"):
            cache.rewind(wrong)
    assert cache.rewind([128, 129]).lengths.tolist() == [128, 129]


def test_a_row_is_used_again_for_an_unrelated_prompt_of_the_same_prefix(model):
    """Twice into the same row: the second finds no trace of the first."""
    text = prompt("long")[0]
    _, cache = shared(model, 128, 150, np.concatenate([text[:128], text[10:60]]))
    assert cache.floor.tolist() == [128, 134]
    again, cache = model.resume(cache, 1, cache.pages(0)[:1], 128, text[:160])
    fresh, _ = shared(model, 128, 160, text)
    np.testing.assert_array_equal(again, fresh)
    assert cache.lengths.tolist() == [132, 160]


def test_a_row_goes_on_from_its_own_pages(model):
    """As the next turn of a conversation does: the page that the prefix fills in part is written on, not copied."""
    text = prompt("long")[0]
    _, cache = model.prefill(text[None, :132], mode="ced", max_len=MAX_LEN)
    pages = cache.pages(0)
    logits, cache = model.resume(cache, 0, pages, 129, text[:160])
    assert cache.pages(0) == pages
    fresh, other = shared(model, 129, 160, text)
    assert_close(logits, np.asarray(fresh))
    assert_close(model.decode(cache, text[160:161])[0][0], np.asarray(model.decode(other, [5, text[160]])[0])[1])


def test_the_decoder_sees_its_own_window_after_going_back(model):
    """A length before the decoder's windows is refused: a query there would not even see its own row."""
    _, cache = model.prefill(prompt("long")[:, :60], mode="ced", max_len=MAX_LEN)
    assert cache.floor.tolist() == [44]
    with pytest.raises(ValueError, match="before the decoder's windows"):
        cache.rewind([43])
    assert cache.rewind([44]).lengths.tolist() == [44]
