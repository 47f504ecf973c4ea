"""Tiny model A in float32 against the recorded reference: numbers within 1e-4 and choices equal at every length."""

import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax.cache import ring_size
from dsv41_jax.vision import embed_span, merge_images
from layer_by_layer import LayerByLayer
from neighbours import alone_and_together
from tiny_golden import (
    CANDIDATE_SOURCE,
    EDGES,
    INDEX_SOURCES,
    assert_close,
    check_block_output,
    check_first_draft,
    check_prefill_logits,
    check_selection,
    image_inputs,
    pool_rows,
    prompt,
    recorded_rows,
    recording,
)

MAX_LEN = 512  # one length for the tests of this numerics with one row: a program each less
DRAFTS = 5  # of a round


@pytest.fixture(scope="module")
def model(tiny) -> ds.Model:
    return tiny("float32")


def draft_bias(model: ds.Model, tokens: np.ndarray) -> np.ndarray:
    """What the Markov head adds after each of tokens [n]: float32 [n, V]."""
    head = model.params["mtp"]["markov_head"]
    return np.asarray(head["embed"]["weight"])[tokens] @ np.asarray(head["head"]["weight"]).T


@pytest.mark.parametrize("case", ["short", "mid", "long"])
def test_prefill_decode_and_drafts(model, case):
    g = recording(case)
    logits, cache = model.prefill(prompt(case), max_len=MAX_LEN, all_logits=True)
    check_prefill_logits(logits[0], case)
    tokens = g["fp32.decode_tokens"]
    assert np.argmax(logits[0, -1]) == tokens[0]

    check_first_draft(model.draft(cache, tokens[:1]), case)
    for step in range(24):
        logits, cache = model.decode(cache, tokens[step : step + 1])
        assert_close(logits[0], g["fp32.decode_logits"][step])
        assert np.argmax(logits[0]) == tokens[step + 1]
        drafts, draft_logits, confidence = model.draft(cache, tokens[step + 1 : step + 2])
        np.testing.assert_array_equal(drafts[0], g["fp32.dspark_tokens"][step])
        assert_close(confidence[0], g["fp32.dspark_confidence"][step])
        if step < len(g["fp32.dspark_logits"]):
            assert_close(draft_logits[0], g["fp32.dspark_logits"][step])
        if case == "short" and step < len(g["fp32.dspark_base_logits"]):
            base = np.asarray(draft_logits[0]) - draft_bias(model, np.asarray(drafts[0, :-1]))
            assert_close(base, g["fp32.dspark_base_logits"][step])


@pytest.mark.parametrize("case", ["short", "mid", "long"])
def test_choices_and_inner_values(model, case):
    g, ids = recording(case), prompt(case)[0]
    n = len(ids)
    layers = LayerByLayer(model)
    logits = layers.run(np.concatenate([ids, g["fp32.decode_tokens"][:-1]]))
    assert_close(logits, np.concatenate([g["fp32.prefill_logits"], g["fp32.decode_logits"]]))
    for source in INDEX_SOURCES:
        check_selection(layers.values, case, source)
        decode = layers.values["selection"][source][n:]
        np.testing.assert_array_equal(decode, recorded_rows(case, f"fp32.decode_topk.{source}"))
    pool = layers.values["pool"][CANDIDATE_SOURCE][:n]
    kept = pool_rows(pool, model.config.candidate_block_size, n)
    np.testing.assert_array_equal(kept, g[f"fp32.prefill_candidates.{CANDIDATE_SOURCE}"])
    taps = np.concatenate([layers.values["tap"][layer][:n] for layer in model.config.taps], axis=-1)
    assert_close(taps[-len(g["fp32.prefill_main_hidden"]) :], g["fp32.prefill_main_hidden"])
    for layer in range(model.config.num_hidden_layers):
        if case == "short":
            check_block_output(layers.values, layer)
        elif case == "mid":
            assert_close(layers.values["pre"][layer][:n], g[f"fp32.block{layer}.pre_mix"])


@pytest.mark.parametrize("case", ["short", "mid", "long", "image"])
def test_engram_rows(model, case):
    g = recording(case)
    mask = g["token_types"][None] >= 0 if case == "image" else None
    rows, _ = model._runner.hasher(prompt(case), mask)
    for i, layer in enumerate(model.config.engram_layer_ids):
        np.testing.assert_array_equal(rows[i, 0], g[f"engram_hash.{layer}"])


@pytest.mark.parametrize("n", EDGES)
def test_window_and_group_edges(model, n):
    g = recording("edges")
    logits, cache = model.prefill(g[f"len{n}.input_ids"][None], max_len=MAX_LEN, all_logits=True)
    assert_close(logits[0], g[f"len{n}.fp32.prefill_logits"])
    for token, expected in zip(g[f"len{n}.decode_tokens"], g[f"len{n}.fp32.decode_logits"], strict=False):
        logits, cache = model.decode(cache, token[None])
        assert_close(logits[0], expected)


def test_batch(model):
    """The recorded pair, beside itself in the other order; decoded in tiles of 4 and 2 rows."""
    g = recording("batch")
    order = [0, 1, 1, 0, 0, 1]
    logits, cache = model.prefill(g["input_ids"][order], all_logits=True)
    assert_close(logits, g["fp32.prefill_logits"][order])
    tokens = g["fp32.decode_tokens"][order]
    for step in range(12):
        logits, cache = model.decode(cache, tokens[:, step])
        assert_close(logits, g["fp32.decode_logits"][order, step])
        np.testing.assert_array_equal(np.argmax(logits, -1), tokens[:, step + 1])
        drafts, _, confidence = model.draft(cache, tokens[:, step + 1])
        np.testing.assert_array_equal(drafts, g["fp32.dspark_tokens"][step, order])
        assert_close(confidence, g["fp32.dspark_confidence"][step, order])


def test_image(model):
    g, ids = recording("image"), prompt("image")
    images = image_inputs()
    for i, image in enumerate(images):
        span = np.asarray(embed_span(model.params, image, model.config, model._runner.numerics))
        types = g["token_types"][image.start : image.end(model.config.vision)]
        rows = span.reshape(-1, span.shape[-1])[: len(types)]
        assert_close(rows[types == 1], g[f"fp32.image{i}.aligner"])
    embeds = np.asarray(model.params["embed"]["weight"])[ids]
    merged = merge_images(model.params, embeds, [images], model.config, model._runner.numerics)
    assert_close(merged[0], g["fp32.embed"])

    logits, cache = model.prefill(ids, images=[images], max_len=MAX_LEN, all_logits=True)
    check_prefill_logits(logits[0], "image")
    tokens = g["fp32.decode_tokens"]
    for step in range(12):
        logits, cache = model.decode(cache, tokens[step : step + 1])
        assert_close(logits[0], g["fp32.decode_logits"][step])
        drafts, _, _ = model.draft(cache, tokens[step + 1 : step + 2])
        np.testing.assert_array_equal(drafts[0], g["fp32.dspark_tokens"][step])

    layers = LayerByLayer(model)
    check_prefill_logits(layers.run(ids[0], g["token_types"][None] >= 0, np.asarray(merged)), "image")
    for source in INDEX_SOURCES:
        check_selection(layers.values, "image", source)


def test_prefill_and_300_decode_steps(model):
    ids = np.random.default_rng(300).integers(3, 500, (1, 317)).astype(np.int32)
    whole, _ = model.prefill(ids, max_len=MAX_LEN, all_logits=True)
    whole = np.asarray(whole[0])
    logits, cache = model.prefill(ids[:, :17], max_len=MAX_LEN, all_logits=True)
    assert_close(logits[0], whole[:17])
    for position in range(17, 317):
        logits, cache = model.decode(cache, ids[:, position])
        assert_close(logits[0], whole[position])


@pytest.mark.parametrize("seed", range(4))
def test_any_cut_gives_the_recorded_numbers(model, seed):
    """Prefill of some tokens, then decode in blocks of 1 to 16."""
    rng = np.random.default_rng(seed)
    ids, expected = prompt("long"), recording("long")["fp32.prefill_logits"]
    at = int(rng.integers(1, 60))
    logits, cache = model.prefill(ids[:, :at], max_len=MAX_LEN, all_logits=True)
    assert_close(logits[0], expected[:at])
    while at < 90:
        n = int(rng.integers(1, 17))
        logits, cache = model.decode(cache, ids[:, at : at + n])
        assert_close(logits[0], expected[at : at + n])
        at += n


@pytest.mark.parametrize("start", [20, 21])
def test_a_refused_draft_leaves_no_trace(model, start):
    """The model reads a recorded text in rounds, drafts refused at place 0, 1, .. 5, a plain token after each round.

    Every logit of a right token is the recorded one, whichever way the token was read; the two starts give each place
    both parities. The cache ends more than a ring of 32 rows from the first refusal.
    """
    g, rng = recording("mid"), np.random.default_rng(start)
    text = np.concatenate([prompt("mid")[0], g["fp32.decode_tokens"][:-1]]).astype(np.int32)
    expected = np.concatenate([g["fp32.prefill_logits"], g["fp32.decode_logits"]])
    _, cache = model.prefill(text[None, :start], max_len=MAX_LEN, all_logits=True)
    at = start

    def check(logits):
        right = expected[at : at + len(logits)]
        assert_close(logits, right)
        np.testing.assert_array_equal(np.asarray(logits).argmax(-1), right.argmax(-1))

    for accepted in [*range(DRAFTS + 1), 2]:
        block = text[at : at + DRAFTS + 1].copy()
        block[accepted + 1 :] = (block[accepted + 1 :] + rng.integers(1, 400, DRAFTS - accepted)) % 490
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


def test_a_row_does_not_depend_on_its_neighbours(model):
    """The ids are equal. Not every bit is: XLA on CPU adds up a row of a larger array in another order."""
    for alone, together in alone_and_together(model, MAX_LEN, 6):
        assert_close(alone, together)
