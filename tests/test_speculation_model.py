"""Speculation on the demo model: the text is the one of plain decoding.

That a refused draft leaves no trace, and a block has the bits of single tokens: `test_model_float32`,
`test_model_released`.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax import runner
from dsv41_jax.sampling import SamplingOptions
from dsv41_jax.speculation import SpeculationStats, speculative_loop
from dsv41_jax.token_loop import check_options, make_request, token_loop

BLOCK = 5


def texts(loop, model: ds.Model, prompts: list[list[int]], count: int, *more) -> list[list[int]]:
    """Greedy tokens after each prompt."""
    options = check_options(model.config, max_new_tokens=count, sampling=SamplingOptions(temperature=0))
    found = [[] for _ in prompts]
    for token in loop(model, make_request(model.config, prompts, options), set(), *more):
        found[token.row].append(token.token_id)
    return found


def check_held_out(model: ds.Model, golden: Path, batches: int, rows: int, count: int) -> None:
    """Text after prompts of BOS and 3 to 24 held-out tokens."""
    tokens, rng = np.load(golden / "demo_heldout" / "heldout.npy"), np.random.default_rng(0)
    stats = SpeculationStats(BLOCK)
    for starts in np.array_split(np.linspace(0, len(tokens) - 25, rows * batches).astype(int), batches):
        prompts = [[0, *tokens[at : at + rng.integers(3, 25)].tolist()] for at in starts]
        plain = texts(token_loop, model, prompts, count)
        assert texts(speculative_loop, model, prompts, count, stats) == plain
        assert len(set(map(tuple, plain))) > 0.8 * rows
    assert stats.mean_accepted > 1 and (stats.rounds > 0).all()


def test_the_text_equals_plain_decoding(golden):
    check_held_out(ds.load("demo", numerics="float32"), golden, batches=1, rows=20, count=6)


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
    check_held_out(ds.load("demo", numerics=numerics), golden, batches=5, rows=64, count=24)
