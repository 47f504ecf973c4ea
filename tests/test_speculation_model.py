"""Speculation on real models: a refused draft leaves no trace, and the text is the one of plain decoding."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax import runner
from dsv41_jax.cache import ring_size
from dsv41_jax.sampling import SamplingOptions
from dsv41_jax.speculation import SpeculationStats, speculative_loop
from dsv41_jax.token_loop import check_options, make_request, token_loop
from tiny_golden import assert_close, prompt, recording

BLOCK = 5
MAX_LEN = 512  # as the other tests of tiny A have it: the programs are the same


@pytest.mark.parametrize("start", [20, 21])
def test_a_refused_draft_leaves_no_trace(tiny, start):
    """Tiny A reads a recorded text in rounds, drafts refused at place 0, 1, .. 5, a plain token after each round.

    Every logit of a right token is the recorded one, whichever way the token was read; the two starts give each place
    both parities. The cache ends more than a ring of 32 rows from the first refusal.
    """
    model, g, rng = tiny("float32"), recording("mid"), np.random.default_rng(start)
    text = np.concatenate([prompt("mid")[0], g["fp32.decode_tokens"][:-1]]).astype(np.int32)
    expected = np.concatenate([g["fp32.prefill_logits"], g["fp32.decode_logits"]])
    _, cache = model.prefill(text[None, :start], max_len=MAX_LEN, all_logits=True)
    at = start

    def check(logits):
        right = expected[at : at + len(logits)]
        assert_close(logits, right)
        np.testing.assert_array_equal(np.asarray(logits).argmax(-1), right.argmax(-1))

    for accepted in [*range(BLOCK + 1), 2]:
        block = text[at : at + BLOCK + 1].copy()
        block[accepted + 1 :] = (block[accepted + 1 :] + rng.integers(1, 400, BLOCK - accepted)) % 490
        logits, cache = model.decode(cache, block[None])
        check(logits[0, : accepted + 1])
        at += accepted + 1
        cache = cache.rewind([at])
        logits, cache = model.decode(cache, text[at : at + 1])
        check(logits)
        at += 1
    logits, cache = model.decode(cache, text[None, at : at + 16])
    check(logits[0])
    assert at + 16 > start + ring_size(model.config)


def texts(loop, model: ds.Model, prompts: list[list[int]], count: int, *more) -> list[list[int]]:
    """Greedy tokens after each prompt."""
    options = check_options(model.config, max_new_tokens=count, sampling=SamplingOptions(temperature=0))
    found = [[] for _ in prompts]
    for token in loop(model, make_request(model.config, prompts, options), set(), *more):
        found[token.row].append(token.token_id)
    return found


def check_held_out(model: ds.Model, golden: Path, batches: int, count: int) -> None:
    """Text after prompts of BOS and 3 to 24 held-out tokens, in batches of 64."""
    tokens, rng = np.load(golden / "demo_heldout" / "heldout.npy"), np.random.default_rng(0)
    stats = SpeculationStats(BLOCK)
    for starts in np.array_split(np.linspace(0, len(tokens) - 25, 64 * batches).astype(int), batches):
        prompts = [[0, *tokens[at : at + rng.integers(3, 25)].tolist()] for at in starts]
        plain = texts(token_loop, model, prompts, count)
        assert texts(speculative_loop, model, prompts, count, stats) == plain
        assert len(set(map(tuple, plain))) > 50
    assert stats.mean_accepted > 1 and (stats.rounds > 0).all()


def test_the_text_equals_plain_decoding(golden):
    check_held_out(ds.load("demo", numerics="float32"), golden, batches=1, count=6)


@pytest.fixture
def optimised(monkeypatch):
    """Steps compiled as users compile them; elsewhere that is without optimisation (see conftest)."""
    options = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}
    static = ("config", "numerics")
    step, draft = runner._extend.__wrapped__, runner._draft.__wrapped__
    step = jax.jit(
        step, static_argnames=(*static, "layers", "all_logits"), donate_argnames=("arrays",), compiler_options=options
    )
    monkeypatch.setattr(runner, "_extend", step)
    monkeypatch.setattr(runner, "_draft", jax.jit(draft, static_argnames=static, compiler_options=options))


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["released", "float32"])
def test_long_texts_equal_plain_decoding(golden, optimised, numerics):
    """320 prompts."""
    check_held_out(ds.load("demo", numerics=numerics), golden, batches=5, count=24)


def test_a_block_of_drafts_gives_the_bits_of_single_tokens(tiny):
    """`released`, where one flipped code would change what comes after it: tiny A, blocks of 2 to 6 tokens."""
    model, rng = tiny("released"), np.random.default_rng(0)
    _, cache = model.prefill(prompt("mid")[:, :33], max_len=MAX_LEN)
    _, other = model.prefill(prompt("mid")[:, :33], max_len=MAX_LEN)
    for t in (6, 2, 3, 6, 5, 4):
        tokens = rng.integers(3, 490, t)
        block, cache = model.decode(cache, tokens[None])
        for i, token in enumerate(tokens):
            single, other = model.decode(other, [token])
            assert np.asarray(block)[0, i].tobytes() == np.asarray(single)[0].tobytes()
