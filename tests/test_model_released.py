"""Tiny model A in the bf16 numerics against the recorded reference.

Block by block on recorded inputs the arithmetic is held to a few flipped bits. End to end, one flipped bit can flip an
FP8 code and then a choice, so whole-model numbers are held to the noise that perturbed twins of the reference show.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax import runner
from dsv41_jax.model import embed
from dsv41_jax.vision import merge_images
from layer_by_layer import BLOCK, MAX_LEN, LayerByLayer, engram_step
from neighbours import alone_and_together
from released_golden import N, check_blocks, check_short, decoded, padded
from tiny_golden import (
    EDGES,
    assert_near,
    assert_rms,
    changed_rows,
    image_inputs,
    prompt,
    recording,
)


@pytest.fixture(scope="module")
def model(tiny) -> ds.Model:
    return tiny("released")


def test_every_block_on_recorded_input(model):
    check_blocks(model)


def test_engram_on_recorded_input(model):
    g, static = recording("mid"), dict(config=model.config, numerics=model._runner.numerics)
    numbers, _ = model._runner.hasher(prompt("mid"))
    for i, layer in enumerate(model.config.engram_layer_ids):
        weights = dict(model.params["engram"][f"l{layer}"])
        x = padded(g[f"ref.block{layer - 1}.out"])
        mask = jnp.zeros((1, BLOCK), bool)
        out = engram_step(weights.pop("embed"), weights, x, padded(numbers[i, 0]), mask, **static)
        assert_near(np.asarray(out)[0, :N], g[f"ref.block{layer}.post_engram"])


def test_short(model):
    check_short(model)


@pytest.mark.slow
def test_short_in_optimised_code(tiny, monkeypatch):
    """What users run: elsewhere the steps are compiled without optimisation (see conftest)."""
    options = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}
    step = functools.partial(jax.jit, static_argnames=("config", "numerics", "layers", "all_logits"))
    step = step(runner._extend.__wrapped__, donate_argnames=("arrays",), compiler_options=options)
    draft = jax.jit(runner._draft.__wrapped__, static_argnames=("config", "numerics"), compiler_options=options)
    monkeypatch.setattr(runner, "_extend", step)
    monkeypatch.setattr(runner, "_draft", draft)
    check_short(tiny("released"))
    check_neighbours(tiny("released"))


def test_mid(model):
    g = recording("mid")
    logits, cache = model.prefill(prompt("mid"), all_logits=True)
    assert_rms(logits[0], g["ref.prefill_logits"], 0.09, argmax=0.9)
    _, draft_logits, _ = model.draft(cache, g["ref.decode_tokens"][:1])
    assert_rms(draft_logits[0, :1], g["ref.dspark_after_prefill_logits"][:1], 0.05)
    assert_rms(decoded(model, cache, g["ref.decode_tokens"][None, :24])[0], g["ref.decode_logits"], 0.09, argmax=0.9)


def test_long(model):
    g = recording("long")
    logits, cache = model.prefill(prompt("long"), max_len=MAX_LEN, all_logits=True)
    assert_rms(logits[0, -64:], g["ref.prefill_logits_last64"], 0.11, argmax=0.88)
    assert_rms(decoded(model, cache, g["ref.decode_tokens"][None, :24])[0], g["ref.decode_logits"], 0.11, argmax=0.88)


def test_window_and_group_edges(model):
    """Over all lengths: a flipped bit moves one prompt of a few tokens by more than the limit, or not at all."""
    g, prefill, decode = recording("edges"), [], []
    for n in EDGES:
        logits, cache = model.prefill(g[f"len{n}.input_ids"][None], all_logits=True)
        if f"len{n}.ref.prefill_logits" in g:
            prefill.append((np.asarray(logits[0]), g[f"len{n}.ref.prefill_logits"]))
        steps = decoded(model, cache, g[f"len{n}.decode_tokens"][None, :4])[0]
        decode.append((steps, g[f"len{n}.ref.decode_logits"]))
    for pairs, limit in ((prefill, 0.03), (decode, 0.09)):
        ours, recorded = (np.concatenate(side) for side in zip(*pairs, strict=True))
        assert_rms(ours, recorded, limit)


def test_batch(model):
    g = recording("batch")
    order = [0, 1, 1, 0, 0, 1, 1, 0]  # as many rows as neighbours below: the programs are the same
    logits, cache = model.prefill(g["input_ids"][order], all_logits=True)
    tokens = g["ref.decode_tokens"][order]
    np.testing.assert_array_equal(np.argmax(logits[:, -1], -1), tokens[:, 0])
    assert_rms(decoded(model, cache, tokens[:, :12]), g["ref.decode_logits"][order], 0.09)


def test_ragged(model):
    """The reference's scheme: prefill to the shorter prompt, then a position a step; the longer feeds its own text."""
    g = recording("batch")
    tokens, start = g["ragged.ref.tokens"], g["ragged.prompt_lens"].min()
    order = [0, 1, 1, 0, 0, 1, 1, 0]
    logits, cache = model.prefill(tokens[order, :start], all_logits=True)
    rest = decoded(model, cache, tokens[order, start:-1])
    assert_rms(np.concatenate([np.asarray(logits)[:, -1:], rest], axis=1), g["ragged.ref.logits"][order], 0.09)


def check_neighbours(model: ds.Model) -> None:
    for alone, together in alone_and_together(model, MAX_LEN, 8):
        np.testing.assert_array_equal(alone, together)


def test_a_row_does_not_depend_on_its_neighbours(model):
    """To the bit: sums that differ in the last bit of float32 are equal after rounding to bf16, but for rare cases."""
    check_neighbours(model)


def test_a_block_of_drafts_gives_the_bits_of_single_tokens(model):
    """One flipped code would change what comes after it. Blocks of 2 to 6 tokens."""
    rng = np.random.default_rng(0)
    _, cache = model.prefill(prompt("mid")[:, :33], max_len=MAX_LEN, all_logits=True)
    _, other = model.prefill(prompt("mid")[:, :33], max_len=MAX_LEN, all_logits=True)
    for t in (6, 2, 3, 6, 5, 4):
        tokens = rng.integers(3, 490, t)
        block, cache = model.decode(cache, tokens[None])
        for i, token in enumerate(tokens):
            single, other = model.decode(other, [token])
            assert np.asarray(block)[0, i].tobytes() == np.asarray(single)[0].tobytes()


def test_image(model):
    g, ids, numerics = recording("image"), prompt("image"), model._runner.numerics
    embedded = embed(model.config, numerics, model.params, ids, None, None)
    merged = np.asarray(merge_images(model.params, embedded, [image_inputs()], model.config, numerics))
    image = g["token_types"] >= 0
    np.testing.assert_array_equal(merged[0, ~image], g["ref.embed"][~image])
    difference = (merged[0] - g["ref.embed"])[image].astype(np.float32)
    assert np.linalg.norm(difference) <= 0.015 * np.linalg.norm(g["ref.embed"][image].astype(np.float32))
    run = LayerByLayer(model)
    assert_rms(run.run(ids[0], image[None], merged), g["ref.prefill_logits"], 0.09)
    for number in (0, 1):  # later layers inherit the noise
        changed = changed_rows(run.values["experts"][number], g[f"ref.ffn{number}.indices"])
        assert changed.mean() <= 0.03
    assert_rms(run.run(g["ref.decode_tokens"][:12]), g["ref.decode_logits"], 0.09)


def test_noquant(tiny):
    run, g = LayerByLayer(tiny("noquant")), recording("mid")
    assert_rms(run.run(prompt("mid")[0]), g["noquant.prefill_logits"], 0.09, argmax=0.9)
    assert_rms(run.run(g["ref.decode_tokens"][:24]), g["noquant.decode_logits"], 0.09, argmax=0.9)
