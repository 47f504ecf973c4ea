"""Choosing tokens: penalties and filters against a plain numpy version, greedy limits, distributions, streams, refused
options.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41_jax.sampling import (
    SamplingOptions,
    TokenCounts,
    filtered_logits,
    penalized_logits,
    prompt_counts,
    row_settings,
    sample,
    token_logprobs,
)

VOCAB = 12


def no_counts(rows, vocab):
    return prompt_counts(np.zeros((rows, 0), np.int32), np.zeros(rows, int), vocab)


def draw(logits, step=0, stream=None, **options):
    """`sample` with Python options for all rows: int array [B]."""
    logits = jnp.asarray(logits, jnp.float32)
    rows, vocab = logits.shape
    settings = row_settings([SamplingOptions(**options)] * rows, range(rows) if stream is None else stream, vocab)
    return np.asarray(sample(logits, settings, no_counts(rows, vocab), jnp.full(rows, step, jnp.int32))[0])


@jax.jit
def _filtered(logits, temperature, top_k, top_p, min_p):
    return filtered_logits(logits, temperature, top_k, top_p, min_p)


def filtered(logits, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0):
    logits = np.asarray(logits, np.float32)
    rows, vocab = logits.shape

    def column(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), rows))

    options = (column(temperature, np.float32), column(vocab if top_k is None else top_k, np.int32))
    return np.asarray(_filtered(logits, *options, column(top_p, np.float32), column(min_p, np.float32)))


def kept_tokens(logits, temperature, top_k, top_p, min_p):
    """Which tokens of one row may be drawn, in float64; None where rounding decides."""
    warm = logits.astype(np.float64) / temperature
    ordered = np.sort(warm)[::-1]
    kept = warm >= ordered[min(top_k, len(warm)) - 1]
    if min_p > 0:
        ratio = np.exp(warm - warm.max())
        if np.abs(ratio - min_p).min() < 1e-5:
            return None
        relative = ratio >= min_p
    else:
        relative = np.ones(len(warm), bool)
    if top_p < 1:
        ordered = np.sort(warm[kept])[::-1]
        p = np.exp(ordered - ordered[0])
        before = np.cumsum(p / p.sum()) - p / p.sum()
        if np.abs(before - top_p).min() < 1e-5:
            return None
        kept &= warm >= ordered[before < top_p].min()
    return kept & relative


# Halves, so that ties are common and divisions by the temperatures below are exact.
rows = st.lists(st.integers(-8, 8).map(lambda x: x / 2), min_size=VOCAB, max_size=VOCAB)


@given(
    rows,
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(1, VOCAB + 3),
    st.sampled_from([1e-6, 0.13, 0.5, 0.77, 0.99, 1.0]),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_filters_equal_a_plain_version(row, temperature, top_k, top_p, min_p):
    """Each row has options of its own: the second row's are looser."""
    logits = np.array([row, row[::-1]], np.float32)
    options = [(temperature, top_k, top_p, min_p), (1.0, VOCAB, max(top_p, 0.5), 0.0)]
    found_rows = filtered(logits, *map(list, zip(*options, strict=True)))
    for given_row, found, option in zip(logits, found_rows, options, strict=True):
        wanted = kept_tokens(given_row, *option)
        if wanted is None:
            continue
        np.testing.assert_array_equal(found > -np.inf, wanted)
        np.testing.assert_array_equal(found[wanted], given_row[wanted] / np.float32(option[0]))


def test_ties_at_the_border_are_kept():
    logits = np.array([[3, 1, 2, 2, 0, 2]], np.float32)
    for top_k, wanted in ((1, [0]), (2, [0, 2, 3, 5]), (4, [0, 2, 3, 5]), (5, [0, 1, 2, 3, 5])):
        assert np.flatnonzero(filtered(logits, top_k=top_k)[0] > -np.inf).tolist() == wanted
    assert (filtered(np.zeros((1, 4)), top_k=4, top_p=0.3) > -np.inf).all()
    assert (filtered(np.zeros((1, 4)), min_p=1.0) > -np.inf).all()


def test_a_row_is_filtered_by_its_own_options():
    """The neighbour that needs the sort does not change the row that does not."""
    logits = np.random.default_rng(1).standard_normal((2, 50)).astype(np.float32)
    mixed = filtered(logits, top_k=[50, 3], top_p=[1.0, 0.9], min_p=[0.1, 0.0])
    np.testing.assert_array_equal(mixed[:1], filtered(logits[:1], min_p=0.1))
    np.testing.assert_array_equal(mixed[1:], filtered(logits[1:], top_k=3, top_p=0.9))


counts_rows = st.lists(st.integers(0, 3), min_size=VOCAB, max_size=VOCAB)


@given(
    rows,
    counts_rows,
    st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.sampled_from([-2.0, 0.0, 0.5]),
    st.sampled_from([-1.5, 0.0, 2.0]),
)
def test_penalties_equal_a_plain_version(row, output, prompt, repetition, presence, frequency):
    bias = {2: -100, 5: 7.5}
    options = SamplingOptions(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias
    )
    settings = row_settings([options, SamplingOptions()], [0, 1], VOCAB)
    counts = TokenCounts(jnp.array([prompt] * 2), jnp.array([output] * 2, jnp.int32))
    found = np.asarray(penalized_logits(jnp.array([row] * 2, jnp.float32), settings, counts))
    wanted = []
    for i, logit in enumerate(row):
        if output[i] or prompt[i]:
            logit = logit / repetition if logit > 0 else logit * repetition
        wanted.append(logit - frequency * output[i] - presence * (output[i] > 0) + bias.get(i, 0))
    np.testing.assert_allclose(found[0], wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found[1], np.float32(row))  # the other row's options do nothing


def test_tokens_are_counted():
    counts = prompt_counts(np.array([[3, 3, 1], [0, 2, 2]]), np.array([3, 1]), VOCAB)
    assert [np.flatnonzero(row).tolist() for row in np.asarray(counts.in_prompt)] == [[1, 3], [0]]
    options = SamplingOptions(temperature=0, frequency_penalty=1.0, repetition_penalty=2.0)
    logits = jnp.asarray(np.tile(np.arange(VOCAB, dtype=np.float32), (2, 1)))
    settings, drawn = row_settings([options] * 2, [0, 1], VOCAB), []
    for step in range(6):
        token, counts = sample(logits, settings, counts, jnp.full(2, step, jnp.int32))
        drawn.append(np.asarray(token))
    # 11, 10, .. each halved after it was drawn once; at 5.5 - 1 the first ones are not yet the likeliest again.
    assert np.array(drawn).T.tolist() == [[11, 10, 9, 8, 7, 6]] * 2
    assert np.asarray(counts.in_output).sum(axis=1).tolist() == [6, 6]


def test_the_cold_limits_are_greedy():
    logits = np.random.default_rng(0).standard_normal((64, VOCAB)).astype(np.float32)
    best = logits.argmax(-1)
    for options in ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}, {"temperature": 1e-5}):
        for seed in (0, 2**32 - 1):
            np.testing.assert_array_equal(draw(logits, seed=seed, **options), best)
    # The lowest id of equal ones; filters do not matter at temperature 0, a bias does.
    assert draw([[1, 5, 5, 2]], temperature=0, top_k=3, top_p=0.5).tolist() == [1]
    assert draw([[1, 5, 5, 2]], temperature=0, logit_bias={3: 4}).tolist() == [3]


def test_log_probabilities_are_the_models_own():
    logits = np.random.default_rng(2).standard_normal((3, 30)).astype(np.float32)
    chosen, best, ids = map(np.asarray, token_logprobs(jnp.asarray(logits), jnp.array([4, 0, 29])))
    wanted = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(chosen, wanted[np.arange(3), [4, 0, 29]], atol=1e-5)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=-1)[:, :20])
    np.testing.assert_allclose(best, np.take_along_axis(wanted, ids, -1), atol=1e-5)
    assert token_logprobs(jnp.zeros((2, 5)), jnp.zeros(2, int))[1].shape == (2, 5)


def chi_square(counts, p):
    """Pearson's statistic of counts [n] against probabilities [n]."""
    wanted = counts.sum() * p
    return float(((counts - wanted) ** 2 / wanted).sum())


# Exceeded by chance once in a million, by degrees of freedom: of ten such checks, a failing one should be a fault.
# With this many draws, a token that comes 10% too often is found nearly always.
LIMIT = {2: 27.6, 4: 33.4, 24: 72.2}
DRAWS = 20_000
LOGITS = np.array([0.0, 1.5, -1.0, 0.7, 0.2], np.float32)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_rows_and_steps_follow_the_distribution(temperature):
    p = softmax(LOGITS / temperature)
    by_row = draw(np.tile(LOGITS, (DRAWS, 1)), temperature=temperature, seed=3)
    assert chi_square(np.bincount(by_row, minlength=5), p) < LIMIT[4]
    # Two rows over many steps, jointly: the streams of rows are independent.
    settings = row_settings([SamplingOptions(temperature=temperature, seed=3)] * 2, [0, 1], 5)
    steps = jax.vmap(lambda step: sample(jnp.tile(LOGITS, (2, 1)), settings, no_counts(2, 5), jnp.full(2, step))[0])(
        jnp.arange(DRAWS)
    )
    pairs = np.asarray(steps[:, 0]) * 5 + np.asarray(steps[:, 1])
    assert chi_square(np.bincount(pairs, minlength=25), np.outer(p, p).ravel()) < LIMIT[24]


@pytest.mark.parametrize("options", [{"top_k": 3}, {"min_p": 0.2}, {"top_p": 0.8}])
def test_filtered_tokens_are_never_drawn_and_the_rest_is_renormalised(options):
    drawn = draw(np.tile(LOGITS, (DRAWS, 1)), seed=5, **options)
    counts = np.bincount(drawn, minlength=5)
    kept = [1, 3, 4, 0] if "min_p" in options else [1, 3, 4]
    assert set(np.flatnonzero(counts)) == set(kept)
    assert chi_square(counts[kept], softmax(LOGITS[kept])) < LIMIT[4]


def test_a_row_is_a_stream_of_its_own():
    logits = np.tile(np.linspace(0, 1, 50, dtype=np.float32), (8, 1))
    alone, batch = draw(logits[:1], seed=7, step=4), draw(logits, seed=7, step=4)
    assert alone[0] == batch[0]
    np.testing.assert_array_equal(batch, draw(logits, seed=7, step=4))
    assert len(set(batch)) > 3
    for other in (
        draw(logits, seed=8, step=4),
        draw(logits, seed=7, step=5),
        draw(logits, seed=7, step=4, stream=[9] * 8),
    ):
        assert (batch != other).any()
    # Where a row stands in the batch does not matter, only its stream.
    np.testing.assert_array_equal(draw(logits[:3], seed=7, step=4, stream=[5, 0, 7]), batch[[5, 0, 7]])


def test_options_of_any_value_share_a_program():
    logits = np.zeros((2, 9), np.float32)
    draw(logits)
    before = sample._cache_size()
    draw(logits, temperature=0.3, top_k=4, top_p=0.9, min_p=0.1, seed=5, step=7, logit_bias={3: 1})
    draw(logits, temperature=0, repetition_penalty=1.2, presence_penalty=-1, frequency_penalty=0.5)
    assert sample._cache_size() == before


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("temperature", [-0.1, float("nan"), float("inf"), "warm", None, True], [0, 0.7, 2, np.float32(1.5)]),
        ("top_k", [0, -1, 1.5, "all", False], [None, 1, 10**6, np.int64(4)]),
        ("top_p", [0, -0.5, 1.01, float("nan"), "all"], [None, 1e-9, 0.5, 1, np.float64(0.9)]),
        ("min_p", [-0.1, 1.1, float("nan"), "all"], [None, 0, 0.05, 1]),
        ("repetition_penalty", [0, -1, float("nan"), float("inf"), None, "x"], [0.5, 1, 1.3]),
        ("presence_penalty", [-2.1, 2.5, float("nan"), None], [-2, 0, 2]),
        ("frequency_penalty", [-2.1, 2.5, float("inf"), "x"], [-2, 0, 2]),
        ("seed", [-1, 2**32, 0.5, None, True], [0, 2**32 - 1, np.uint32(9)]),
    ],
)
def test_options_are_checked(name, bad, good):
    for value in bad:
        with pytest.raises(ValueError, match=f"^{name}=.*needed"):
            SamplingOptions(**{name: value})
    for value in good:
        assert getattr(SamplingOptions(**{name: value}), name) == value


def test_biases_are_checked():
    for bad, message in (
        ({1: 101}, r"^logit_bias\[1\]=101"),
        ({1: float("nan")}, r"^logit_bias\[1\]=nan"),
        ({"the": 1}, "key 'the'"),
        ({1.0: 1}, "key 1.0"),
        ([1], r"^logit_bias=\[1\]"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            SamplingOptions(logit_bias=bad)
    SamplingOptions(logit_bias={np.int64(11): -100}).check_vocabulary(12)
    for bad in (-1, 12):
        with pytest.raises(ValueError, match=r"must lie in 0\.\.11"):
            SamplingOptions(logit_bias={bad: 1}).check_vocabulary(12)
