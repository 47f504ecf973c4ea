"""Tiny model A computed by the TPU kernels, interpreted: the golden recording `short` holds for it too.

Layer by layer: interpreted kernels are large programs, and one for the whole model compiles for many minutes.
"""

import jax
import jax.numpy as jnp
import numpy as np

import dsv41_jax as ds
from dsv41_jax import dspark
from layer_by_layer import LayerByLayer
from tiny_golden import assert_rms, prompt, recording

FEW = 8  # tokens of a block that reads the rings themselves, as decoding does


def seed_drafts(model: ds.Model, run: LayerByLayer, begin: int) -> None:
    """Add the positions from `begin` on to the draft windows, which `LayerByLayer` leaves out."""
    taps = {layer: jnp.asarray(rows[begin:])[None] for layer, rows in run.values["tap"].items()}
    at, count = jnp.full(1, begin, jnp.int32), jnp.full(1, len(run.tokens) - begin, jnp.int32)
    static = (model.config, model._runner.numerics, model.params)
    run.arrays = dspark.seed_windows(*static, run.arrays, taps, at, count)


def first_draft(model: ds.Model, run: LayerByLayer, anchor: int) -> np.ndarray:
    """Logits [V] of the first draft after the anchor."""
    start = jnp.full(1, len(run.tokens), jnp.int32)
    inputs = (run.arrays, jnp.full(1, anchor, jnp.int32), start, jnp.float32(0), jax.random.key(0))
    static = (model.config, model._runner.numerics)
    draft = jax.jit(dspark.draft, static_argnums=(0, 1))
    return np.asarray(draft(*static, model.params, *inputs)[1])[0, 0]


def test_short(tiny):
    """The prompt in blocks of 8, then token by token, with the first draft after the prompt and after some tokens."""
    model, g = tiny("released", "interpret"), recording("short")
    run = LayerByLayer(model, block=FEW)
    ids, tokens = prompt("short")[0], g["ref.decode_tokens"]
    assert_rms(run.run(ids), g["ref.prefill_logits"], 0.01, argmax=1)
    seed_drafts(model, run, 0)
    draft = first_draft(model, run, tokens[0])
    assert_rms(draft, g["ref.dspark_after_prefill_logits"][0], 0.05, argmax=1)
    logits, drafts, recorded = [], [], g["ref.dspark_logits"]
    for step in range(24):
        logits.append(run.run(tokens[step : step + 1])[0])
        if step < len(recorded):
            seed_drafts(model, run, len(run.tokens) - 1)
            drafts.append(first_draft(model, run, tokens[step + 1]))
    assert_rms(np.stack(logits), g["ref.decode_logits"], 0.08)
    assert_rms(np.stack(drafts), recorded[:, 0], 0.05)
