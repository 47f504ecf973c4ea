"""Tiny model A computed by the TPU kernels, interpreted: the golden recordings hold for it too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax import dspark
from layer_by_layer import LayerByLayer, eager_layer, layers
from operations_apart import operations_apart  # noqa: F401 (a fixture)
from released_golden import check_every_block
from tiny_golden import assert_rms, prompt, recording

pytestmark = pytest.mark.usefixtures("operations_apart")


@pytest.fixture(scope="module")
def model(tiny) -> ds.Model:
    return tiny("released", "interpret")


def test_every_block_on_recorded_input(model):
    check_every_block(model, eager_layer)


def seeded(model: ds.Model, run: LayerByLayer, begin: int, end: int):
    """The run's cache with the draft windows of positions begin .. end - 1, which `LayerByLayer` leaves out."""
    taps = {layer: jnp.asarray(rows[begin:end])[None] for layer, rows in run.values["tap"].items()}
    at, count = jnp.full(1, begin, jnp.int32), jnp.full(1, end - begin, jnp.int32)
    return dspark.seed_windows(model.config, model._runner.numerics, model.params, run.arrays, taps, at, count)


def first_draft(model: ds.Model, run: LayerByLayer, anchor: int) -> np.ndarray:
    """Logits [V] of the first draft after the anchor."""
    static = (model.config, model._runner.numerics, model.params)
    start = jnp.full(1, len(run.tokens), jnp.int32)
    arguments = (run.arrays, jnp.full(1, anchor, jnp.int32), start, jnp.float32(0), jax.random.key(0))
    return np.asarray(dspark.draft(*static, *arguments)[1])[0, 0]


def test_short(model):
    """Prefill as a block of 64, decoding token by token, and the first draft after each."""
    g, config, numerics = recording("short"), model.config, model._runner.numerics
    run = LayerByLayer(model, {layer.number: eager_layer(config, numerics, layer.kind) for layer in layers(config)})
    ids, tokens = prompt("short")[0], g["ref.decode_tokens"]
    assert_rms(run.run(ids), g["ref.prefill_logits"], 0.01, argmax=1)
    run.arrays = seeded(model, run, 0, len(ids))
    drafts = [first_draft(model, run, tokens[0])]
    assert_rms(drafts[0], g["ref.dspark_after_prefill_logits"][0], 0.05, argmax=1)
    run.block, recorded, logits = 1, g["ref.dspark_logits"], []
    for step in range(24):
        logits.append(run.run(tokens[step : step + 1])[0])
        if step < len(recorded):
            run.arrays = seeded(model, run, len(run.tokens) - 1, len(run.tokens))
            drafts.append(first_draft(model, run, tokens[step + 1]))
    assert_rms(np.stack(logits), g["ref.decode_logits"], 0.08)
    assert_rms(np.stack(drafts[1:]), recorded[:, 0], 0.05)
