"""Training steps of a tiny model: resume after a kill, rounds against the drafting model, straight-through points."""

from __future__ import annotations

import json
import os
import signal
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import cache, dspark, model
from dsv41_jax.checkpoint.names import flatten
from dsv41_jax.numerics import FLOAT32, QUANTIZED_TRAINING
from dsv41_jax.training.checkpoint import Checkpoints
from dsv41_jax.training.draft_rounds import DraftRounds
from dsv41_jax.training.loop import Log, run_stage
from dsv41_jax.training.demo_optimizer import learning_rate, make_optimizer
from dsv41_jax.training.step import backbone_step, drafter_step, new_state
from tiny_training import tiny_params, tiny_training_config, tiny_windows

CONFIG = tiny_training_config()
jit = jax.jit


@pytest.fixture
def params() -> dict:
    """Random parameters on the device; a step may consume them."""
    return jax.tree.map(jnp.asarray, tiny_params(CONFIG))


def _backbone(params: dict) -> dict:
    return {k: v for k, v in params.items() if k != "mtp"}


def test_a_killed_run_goes_on_bit_for_bit(tmp_path, params):
    schedule = learning_rate(1e-3, 6, 2, 4)
    optimizer = make_optimizer(schedule)
    step = jit(backbone_step(CONFIG, QUANTIZED_TRAINING, optimizer).__wrapped__)
    windows = tiny_windows(CONFIG)

    def run(folder: str, kill_at: int | None = None):
        def batch_at(number: int) -> dict:
            if number == kill_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return windows(number).arrays()

        state = new_state(_backbone(params), optimizer, seed=1)
        checkpoints, log = Checkpoints(tmp_path / folder), Log(tmp_path / f"{folder}.jsonl")
        return run_stage("test", state, 6, lambda _: step, batch_at, checkpoints, log, schedule, log_every=1)

    whole = run("whole")
    with pytest.raises(SystemExit) as stop:
        run("killed", kill_at=2)
    assert stop.value.code == 143
    resumed = run("killed")
    assert int(resumed.step) == 6
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
    lines = [[json.loads(line) for line in (tmp_path / f"{f}.jsonl").open()] for f in ("whole", "killed")]
    assert [line["step"] for line in lines[1]] == [1, 2, 3, 4, 5, 6]
    assert [line["nats"] for line in lines[0]] == [line["nats"] for line in lines[1]]
    assert run("whole").step == 6  # a finished stage is not run again
    # Straight through: rounding has no slope of its own, yet every parameter has learnt, the indexer's too.
    for (path, before), (_, after) in zip(flatten(_backbone(params)), flatten(whole.params), strict=True):
        assert np.isfinite(after).all(), path
        assert np.any(before != after) or path[-1] == "bias_vl", path


def test_rounds_draft_what_the_model_drafts(params):
    length, anchor = 20, 13
    windows = tiny_windows(CONFIG)
    ids = np.array(windows(0).token_ids[:1, :length])
    ids[0, 0], ids[0, 1:] = CONFIG.bos_token_id, np.maximum(ids[0, 1:], 4)
    memory = jax.tree.map(jnp.asarray, windows.make(np.pad(ids, ((0, 0), (0, 1)))).memory)
    arrays = cache.zero_arrays(CONFIG, FLOAT32, 1, 32)
    seen = {name: rows[:, :anchor] for name, rows in memory.items()}
    extend = jit(partial(model.extend, CONFIG, FLOAT32))
    start = jnp.full(1, anchor, jnp.int32)
    _, arrays = extend(params, arrays, jnp.asarray(ids[:, :anchor]), jnp.zeros(1, jnp.int32), start, seen)
    draft = jit(partial(dspark.draft, CONFIG, FLOAT32))
    first = jnp.asarray(ids[:, anchor])
    tokens, logits, confidence = draft(params, arrays, first, start, jnp.float32(0), jax.random.key(0))

    ids[:, anchor : anchor + CONFIG.dspark_block_size] = tokens[:, :-1]  # forced to what was drafted
    batch = windows.make(np.concatenate([ids, tokens[:, -1:]], axis=1)).arrays()

    @jit
    def train(params: dict, batch: dict):
        _, notes = model.forward(CONFIG, FLOAT32, params, batch["token_ids"], batch["memory"], batch["segment_ids"])
        return DraftRounds(CONFIG, batch, jnp.asarray([[anchor]])).draft(FLOAT32, params, notes["taps"])

    forced, raw = train(params, batch)
    np.testing.assert_allclose(forced, logits, atol=2e-5)
    np.testing.assert_allclose(raw, confidence, atol=2e-5)


@pytest.mark.slow
def test_the_drafter_learns_and_the_bias_stays(params):
    optimizer = make_optimizer(lambda step: 3e-3)
    step = jit(drafter_step(CONFIG, FLOAT32, optimizer, anchors_per_row=6).__wrapped__)
    state = new_state({"mtp": params["mtp"]}, optimizer, seed=0)
    batch = tiny_windows(CONFIG)(0).arrays()
    losses = []
    for _ in range(8):
        state, metrics = step(state, _backbone(params), batch)
        losses.append(float(metrics["loss"]))
    assert min(losses[-3:]) < losses[0] - 0.05
    before, after = (tree["mtp"]["layers"]["ffn"]["gate"]["bias"] for tree in (params, state.params))
    np.testing.assert_array_equal(before, after)
