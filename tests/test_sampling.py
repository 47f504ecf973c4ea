"""Choosing tokens: filters against a plain numpy version, greedy limits, distributions, streams, refused options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41_jax.sampling import SamplingOptions, filtered_logits, sample

VOCAB = 12


@jax.jit
def _filtered(logits, temperature, top_k, top_p):
    return filtered_logits(logits, temperature, top_k, top_p)


def draw(logits, temperature=1.0, top_k=None, top_p=None, seed=0, step=0):
    """`sample` with Python options: int array [B]."""
    logits = jnp.asarray(logits, jnp.float32)
    settings = (
        jnp.float32(temperature),
        jnp.int32(logits.shape[-1] if top_k is None else top_k),
        jnp.float32(1.0 if top_p is None else top_p),
        jnp.uint32(seed),
    )
    return np.asarray(sample(logits, *settings, jnp.int32(step)))


def kept_tokens(logits, temperature, top_k, top_p):
    """Which tokens of one row may be drawn, in float64; None where rounding decides."""
    warm = logits.astype(np.float64) / temperature
    ordered = np.sort(warm)[::-1]
    kept = warm >= ordered[min(top_k, len(warm)) - 1]
    if top_p >= 1:
        return kept
    ordered = np.sort(warm[kept])[::-1]
    p = np.exp(ordered - ordered[0])
    before = np.cumsum(p / p.sum()) - p / p.sum()
    if np.abs(before - top_p).min() < 1e-5:
        return None
    return kept & (warm >= ordered[before < top_p].min())


# Halves, so that ties are common and divisions by the temperatures below are exact.
rows = st.lists(st.integers(-8, 8).map(lambda x: x / 2), min_size=VOCAB, max_size=VOCAB)


@given(
    rows,
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(1, VOCAB + 3),
    st.sampled_from([1e-6, 0.13, 0.5, 0.77, 0.99, 1.0]),
)
def test_filters_equal_a_plain_version(row, temperature, top_k, top_p):
    logits = np.array([row, row[::-1]], np.float32)
    filtered = np.asarray(_filtered(logits, jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p)))
    for given_row, found in zip(logits, filtered, strict=True):
        wanted = kept_tokens(given_row, temperature, top_k, top_p)
        if wanted is None:
            continue
        np.testing.assert_array_equal(found > -np.inf, wanted)
        np.testing.assert_array_equal(found[wanted], given_row[wanted] / np.float32(temperature))


def test_ties_at_the_border_are_kept():
    logits = np.array([[3, 1, 2, 2, 0, 2]], np.float32)
    one, all_of_it = jnp.float32(1), jnp.float32(1)
    for top_k, wanted in ((1, [0]), (2, [0, 2, 3, 5]), (4, [0, 2, 3, 5]), (5, [0, 1, 2, 3, 5])):
        filtered = np.asarray(_filtered(logits, one, jnp.int32(top_k), all_of_it))
        assert np.flatnonzero(filtered[0] > -np.inf).tolist() == wanted
    filtered = np.asarray(_filtered(np.zeros((1, 4), np.float32), one, jnp.int32(4), jnp.float32(0.3)))
    assert (filtered > -np.inf).all()


def test_the_cold_limits_are_greedy():
    logits = np.random.default_rng(0).standard_normal((64, VOCAB)).astype(np.float32)
    best = logits.argmax(-1)
    for options in ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-5}):
        for seed in (0, 2**32 - 1):
            np.testing.assert_array_equal(draw(logits, seed=seed, **options), best)
    # The lowest id of equal ones; other options do not matter at temperature 0.
    assert draw([[1, 5, 5, 2]], temperature=0, top_k=3, top_p=0.5).tolist() == [1]


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
    by_row = draw(np.tile(LOGITS, (DRAWS, 1)), temperature, seed=3)
    assert chi_square(np.bincount(by_row, minlength=5), p) < LIMIT[4]
    # Two rows over many steps, jointly: the streams of rows are independent.
    steps = jax.vmap(
        lambda step: sample(
            jnp.tile(LOGITS, (2, 1)), jnp.float32(temperature), jnp.int32(5), jnp.float32(1), jnp.uint32(3), step
        )
    )(jnp.arange(DRAWS))
    pairs = np.asarray(steps[:, 0]) * 5 + np.asarray(steps[:, 1])
    assert chi_square(np.bincount(pairs, minlength=25), np.outer(p, p).ravel()) < LIMIT[24]


def test_filtered_tokens_are_never_drawn_and_the_rest_is_renormalised():
    drawn = draw(np.tile(LOGITS, (DRAWS, 1)), top_k=3, seed=5)
    counts = np.bincount(drawn, minlength=5)
    assert set(np.flatnonzero(counts)) == {1, 3, 4}
    assert chi_square(counts[[1, 3, 4]], softmax(LOGITS[[1, 3, 4]])) < LIMIT[2]


def test_a_row_is_a_stream_of_its_own():
    logits = np.tile(np.linspace(0, 1, 50, dtype=np.float32), (8, 1))
    alone, batch = draw(logits[:1], seed=7, step=4), draw(logits, seed=7, step=4)
    assert alone[0] == batch[0]
    np.testing.assert_array_equal(batch, draw(logits, seed=7, step=4))
    assert len(set(batch)) > 3
    for other in (draw(logits, seed=8, step=4), draw(logits, seed=7, step=5)):
        assert (batch != other).any()


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("temperature", [-0.1, float("nan"), float("inf"), "warm", None, True], [0, 0.7, 2, np.float32(1.5)]),
        ("top_k", [0, -1, 1.5, "all", False], [None, 1, 10**6, np.int64(4)]),
        ("top_p", [0, -0.5, 1.01, float("nan"), "all"], [None, 1e-9, 0.5, 1, np.float64(0.9)]),
        ("seed", [-1, 2**32, 0.5, None, True], [0, 2**32 - 1, np.uint32(9)]),
    ],
)
def test_options_are_checked(name, bad, good):
    for value in bad:
        with pytest.raises(ValueError, match=f"^{name}=.*needed"):
            SamplingOptions(**{name: value})
    for value in good:
        assert getattr(SamplingOptions(**{name: value}), name) == value
