"""Speculation without a model: what is accepted is distributed as if drawn token by token, and the loop keeps books."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from dsv41_jax.sampling import SamplingOptions, TokenCounts, count_tokens, prompt_counts, row_settings, sampling_logits
from dsv41_jax.speculation import SpeculationStats, accept, speculative_loop
from dsv41_jax.token_loop import token_loop
from toy_model import ToyModel, toy_request

VOCAB, DRAWS = 8, 20_000
SAMPLING = {
    "plain": {},
    "filtered": {"temperature": 0.7, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
    "penalised": {
        "temperature": 1.3,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "logit_bias": {1: 1.0},
    },
}


def p_value(counts: np.ndarray, p: np.ndarray) -> float:
    """Of Pearson's test of counts [n] against probabilities [n]; cells of fewer than 5 expected are put together."""
    wanted = counts.sum() * p
    assert counts[wanted == 0].sum() == 0, "a token was drawn that cannot be"
    small = wanted < 5
    counts = np.append(counts[~small], counts[small].sum())
    wanted = np.append(wanted[~small], wanted[small].sum())
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    return float(chi2.sf(((counts - wanted) ** 2 / wanted).sum(), len(counts) - 1))


def assert_distributed(texts: np.ndarray, joint: np.ndarray) -> None:
    """Token ids [draws, places] against the exact joint distribution [V] * places: every place, pair and the whole."""
    places = texts.shape[1]
    for size in (1, 2, places):
        for kept in itertools.combinations(range(places), size):
            flat = np.ravel_multi_index(texts[:, kept].T, (VOCAB,) * size)
            p = joint.sum(axis=tuple(set(range(places)) - set(kept))).ravel()
            value = p_value(np.bincount(flat, minlength=VOCAB**size), p)
            assert value > (0.01 if size == 1 else 0.001), f"places {kept}: p = {value:.2g}"


def exact_joint(model: ToyModel, prompt: list[int], places: int, options: SamplingOptions) -> np.ndarray:
    """Probability of each text of `places` tokens after a prompt, drawn token by token: [V] * places."""
    texts = np.array(list(itertools.product(range(VOCAB), repeat=places)))
    settings = row_settings([options] * len(texts), [0] * len(texts), VOCAB)
    context = np.concatenate([np.tile(prompt, (len(texts), 1)), texts], axis=1)
    counts = prompt_counts(context, np.full(len(texts), len(prompt)), VOCAB)
    p = np.ones(len(texts))
    for place in range(places):
        end = len(prompt) + place
        logits = jnp.asarray(model.table[model.entry(context[:, end - 2], context[:, end - 1], end)])
        q = np.asarray(jax.nn.softmax(sampling_logits(logits, settings, counts)), np.float64)
        p *= q[np.arange(len(texts)), texts[:, place]]
        counts = count_tokens(counts, jnp.asarray(texts[:, place]))
    return (p / p.sum()).reshape((VOCAB,) * places)


# --- the acceptance rule ---------------------------------------------------------------------------------------------


def draw_texts(seed: int, claimed: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Texts of k + 1 tokens [draws, 4], and their exact distribution. Drafts come from a table of their own.

    Args:
        claimed: factor on the draft logits that `accept` is told; other than 1 it is told wrong.

    A target that looks at the token before. Places that a round does not reach are drawn from the target.
    """
    k, rng = 3, np.random.default_rng(seed)
    target, draft = rng.standard_normal((2, VOCAB, VOCAB)).astype(np.float32) * 1.5
    p, q = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (target.astype(np.float64), draft))

    def draw(table: np.ndarray, before: np.ndarray) -> np.ndarray:
        return (table[before].cumsum(axis=1) < rng.random((len(before), 1))).sum(axis=1).clip(max=VOCAB - 1)

    anchor = 4
    read = [np.full(DRAWS, anchor)]
    for _ in range(k):
        read.append(draw(q, read[-1]))
    read = np.stack(read, axis=1)
    counts = TokenCounts(jnp.zeros((DRAWS, VOCAB), bool), jnp.zeros((DRAWS, VOCAB), jnp.int32))
    settings = row_settings([SamplingOptions(seed=seed)] * DRAWS, range(DRAWS), VOCAB)
    step = jnp.ones(DRAWS, jnp.int32)
    verdict = accept(target[read], claimed * draft[read[:, :-1]], jnp.asarray(read[:, 1:]), settings, counts, step)
    texts, accepted = np.array(verdict.tokens), np.asarray(verdict.accepted)
    assert set(accepted) == set(range(k + 1))
    for place in range(1, k + 1):
        texts[:, place] = np.where(place <= accepted, texts[:, place], draw(p, texts[:, place - 1]))
    joint = np.einsum("a,ab,bc,cd->abcd", p[anchor], p, p, p)
    return texts, joint


def test_accepted_tokens_are_distributed_as_the_target():
    assert_distributed(*draw_texts(seed=0))


@pytest.mark.parametrize("claimed", [0.7, 1.4])
def test_drafts_from_another_distribution_are_noticed(claimed):
    """Negative control: the rule needs the distribution that drafts were drawn from."""
    with pytest.raises(AssertionError, match="p = "):
        assert_distributed(*draw_texts(seed=0, claimed=claimed))


def greedy_accept(target_logits, drafts, **options):
    """`accept` of one row at temperature 0 with an empty history: (accepted, new tokens, counts in the output)."""
    target_logits = jnp.asarray(target_logits, jnp.float32)[None]
    vocab = target_logits.shape[-1]
    settings = row_settings([SamplingOptions(temperature=0, **options)], [0], vocab)
    counts = TokenCounts(jnp.zeros((1, vocab), bool), jnp.zeros((1, vocab), jnp.int32))
    draft_logits = jnp.zeros((1, len(drafts), vocab))
    verdict = accept(target_logits, draft_logits, jnp.array([drafts], jnp.int32), settings, counts, jnp.ones(1, int))
    n = int(verdict.accepted[0])
    return n, np.asarray(verdict.tokens)[0, : n + 1].tolist(), np.asarray(verdict.counts.in_output)[0].tolist()


def test_greedy_accepts_while_the_draft_is_the_likeliest():
    logits = [[0, 5, 1, 0], [0, 0, 6, 1], [7, 0, 0, 1]]
    assert greedy_accept(logits, [1, 2]) == (2, [1, 2, 0], [1, 1, 1, 0])
    assert greedy_accept(logits, [1, 3]) == (1, [1, 2], [0, 1, 1, 0])
    assert greedy_accept(logits, [2, 2]) == (0, [1], [0, 1, 0, 0])  # right at a later place is of no use
    assert greedy_accept(logits[:1], []) == (0, [1], [0, 1, 0, 0])
    # The lowest id of equal ones, as `sample` takes it.
    assert greedy_accept([[3, 5, 5, 0], [0, 0, 1, 0]], [2]) == (0, [1], [0, 1, 0, 0])


def test_penalties_see_the_drafts_before():
    """The same token is the likeliest at both places, and no longer once it has been accepted."""
    logits = [[0, 5, 4, 0]] * 3
    assert greedy_accept(logits, [1, 1])[:2] == (2, [1, 1, 1])
    assert greedy_accept(logits, [1, 1], presence_penalty=1.5)[:2] == (1, [1, 2])
    assert greedy_accept(logits, [1, 2], presence_penalty=1.5)[:2] == (2, [1, 2, 1])
    assert greedy_accept(logits, [1, 2], frequency_penalty=1.5) == (2, [1, 2, 1], [0, 2, 1, 0])


# --- the loop --------------------------------------------------------------------------------------------------------


def collect(loop, rows: int) -> list[list[int]]:
    texts = [[] for _ in range(rows)]
    for token in loop:
        texts[token.row].append(token.token_id)
    return texts


@pytest.mark.parametrize("name", SAMPLING)
def test_sampled_texts_are_distributed_as_without_drafts(name):
    """Four tokens: the first from the prompt, the others from rounds of three drafts that start and end anywhere."""
    model, prompt, options = ToyModel(), [3, 5], SAMPLING[name]
    stats = SpeculationStats(3)
    request = toy_request(model, [prompt] * DRAWS, 4, seed=7, **options)
    texts = np.array(collect(speculative_loop(model, request, set(), stats), DRAWS))
    assert_distributed(texts, exact_joint(model, prompt, 4, SamplingOptions(**options)))
    assert 0.5 < stats.mean_accepted < 2.5 and (stats.rounds > 100).all()


PROMPTS = [[0, 3, 4], [0], [0, 6, 5, 1, 2, 4], [0, 3]]


@pytest.mark.parametrize("block", [1, 2, 3, 5])
def test_greedy_text_equals_plain(block):
    accepted = []
    for agreement, options in ((0.0, {}), (0.8, SAMPLING["penalised"]), (1.0, {})):
        model, stats = ToyModel(block=block, agreement=agreement), SpeculationStats(block)
        request = toy_request(model, PROMPTS, 23, **options | {"temperature": 0})
        texts = collect(speculative_loop(model, request, set(), stats), 4)
        assert texts == collect(token_loop(model, request, set()), 4)
        assert [len(text) for text in texts] == [23] * 4
        accepted.append(stats.mean_accepted)
    assert accepted[0] < accepted[1] < accepted[2] == block


def test_statistics():
    """A drafter that is always right, and one that is never."""
    for agreement, rounds in ((1.0, [0, 0, 0, 3]), (-1.0, [12, 0, 0, 0])):
        model, stats = ToyModel(agreement=agreement, vocab=2), SpeculationStats(3)
        model.draft_table = agreement * model.table
        assert len(list(speculative_loop(model, toy_request(model, [[0, 1]], 13, temperature=0), set(), stats))) == 13
        assert stats.rounds.tolist() == rounds
        assert stats.mean_accepted == (3 if agreement > 0 else 0)
        assert stats.accepted_by_place.tolist() == [stats.mean_accepted / 3] * 3
        assert model.calls == [4] * sum(rounds)
    assert SpeculationStats(5).mean_accepted == 0 and SpeculationStats(5).accepted_by_place.tolist() == [0] * 5


@pytest.mark.parametrize("count", range(1, 9))
def test_rows_end_where_plain_rows_end(count):
    """At max_new_tokens, at a stop id (drafted, accepted or drawn), or where the caller says."""
    model = ToyModel(agreement=0.9)
    request = toy_request(model, PROMPTS, count, temperature=0, stop_ids=[6, 2])
    texts = collect(speculative_loop(model, request, set()), 4)
    assert texts == collect(token_loop(model, request, set()), 4)
    assert not any({6, 2} & set(text) for text in texts)

    def cut(loop_of):
        ended, texts = set(), [[] for _ in range(4)]
        for token in loop_of(ended):
            texts[token.row].append(token.token_id)
            if len(texts[token.row]) == token.row + 1:
                ended.add(token.row)
        return texts

    request = toy_request(model, PROMPTS, count, temperature=0)
    assert cut(lambda ended: speculative_loop(model, request, ended)) == cut(
        lambda ended: token_loop(model, request, ended)
    )


def test_the_last_rounds_before_the_limit_are_shorter():
    """No position past max_position_embeddings is ever read, and rows that have ended do not stop the others."""
    last = set()
    for limit in range(24, 31):
        model = ToyModel(block=5, agreement=0.9, limit=limit)
        for stop_ids in ([6], []):
            request = toy_request(model, PROMPTS, limit - 6, temperature=0, stop_ids=stop_ids)
            plain = collect(token_loop(model, request, set()), 4)
            model.calls.clear()
            assert collect(speculative_loop(model, request, set()), 4) == plain
            assert model.calls[0] == 6
            last.add(model.calls[-1])
    assert last == {1, 2, 3, 4, 5, 6}


def test_blocks_are_no_longer_than_the_cache_can_rewind():
    model = ToyModel(block=5, agreement=0.9, max_rewind=4)
    request = toy_request(model, PROMPTS, 20, temperature=0)
    assert collect(speculative_loop(model, request, set()), 4) == collect(token_loop(model, request, set()), 4)
    assert max(model.calls) == 4


def test_log_probabilities_are_those_of_plain_text():
    model = ToyModel(agreement=0.9)
    request = toy_request(model, PROMPTS, 11, temperature=0, logprobs=3)
    by_row = [sorted(loop(model, request, set()), key=lambda t: t.row) for loop in (speculative_loop, token_loop)]
    for ours, plain in zip(*by_row, strict=True):
        assert (ours.row, ours.token_id) == (plain.row, plain.token_id) == (plain.row, ours.logprob.token_id)
        assert ours.logprob.logprob == pytest.approx(plain.logprob.logprob, abs=1e-6)
        assert [i for i, _ in ours.logprob.top] == [i for i, _ in plain.logprob.top]


def test_seeds_reproduce_and_rows_keep_their_streams():
    model = ToyModel()

    def run(prompts, seed):
        return collect(speculative_loop(model, toy_request(model, prompts, 12, seed=seed), set()), len(prompts))

    assert run(PROMPTS, 1) == run(PROMPTS, 1) != run(PROMPTS, 2)
    assert run(PROMPTS[:1], 1) == run(PROMPTS, 1)[:1]
    assert len(set(map(tuple, run([PROMPTS[0]] * 4, 1)))) == 4


def test_a_model_without_draft_blocks_is_refused():
    model = ToyModel()
    model.config.n_draft = 0
    with pytest.raises(ValueError, match="has none"):
        next(speculative_loop(model, toy_request(model, PROMPTS, 3), set()))
