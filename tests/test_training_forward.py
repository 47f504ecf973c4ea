"""The forward pass of training: packing, replay, images, tiles, remat, finite differences, quantisation points.

Gradients are compared tensor by tensor, in float32, as |difference| / |gradient|. Two orders of the same sums differ by
up to 4e-6 here (measured); 1e-4 leaves room for other machines and is far below any mistake.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import cache, model, quant
from dsv41_jax.checkpoint.names import flatten
from dsv41_jax.checkpoint.released import abstract_params
from dsv41_jax.config import ModelConfig
from dsv41_jax.forward_options import ForwardOptions
from dsv41_jax.numerics import (
    ACTIVATION_POINTS,
    FLOAT32,
    QUANTIZED_TRAINING,
    QUANTIZED_TRAINING_BF16,
    WEIGHT_POINTS,
    Numerics,
)
from dsv41_jax.training.balance import token_facts
from dsv41_jax.training.replay_floor import replay_floors
from tiny_golden import FLOAT32_ATOL, prompt, recording
from tiny_training import tiny_params, tiny_training_config, tiny_windows

SAME = 1e-4
CONFIG = tiny_training_config()
# Nothing is left to choose: every expert, entry and block is taken, so that a small step changes no choice.
OPEN = dataclasses.replace(CONFIG, num_experts_per_tok=CONFIG.n_routed_experts, index_topk=12, candidate_topk_blocks=12)
# Full, two Reuse layers in a row (a run), Reindex.
RUNS = dataclasses.replace(
    CONFIG,
    num_hidden_layers=4,
    compress_ratios=(2, 2, 2, 2, 0),
    index_source_layer_ids=(0, 3),
    dspark_target_layer_ids=(0, 3),
)
SELECTED = ForwardOptions(index_loss="selected")
LENGTHS = (11, 13)


@functools.cache
def parameters(config: ModelConfig = CONFIG) -> dict:
    params = jax.tree.map(jnp.asarray, tiny_params(config))
    return {name: part for name, part in params.items() if name != "mtp"}


def batch_of(rows: list[list[np.ndarray]], length: int) -> dict:
    """A batch from the samples of each row; what is left of a row is padding."""
    ids = np.full((len(rows), length), CONFIG.pad_token_id, np.int32)
    segments, weights = np.zeros_like(ids), np.zeros(ids.shape, np.float32)
    for row, samples in enumerate(rows):
        at = 0
        for number, sample in enumerate(samples):
            stop = at + len(sample)
            ids[row, at:stop], segments[row, at:stop] = sample, number
            weights[row, at : stop - 1] = 1
            at = stop
        segments[row, at:] = len(samples)
    starts = np.diff(segments, axis=1, prepend=-1) != 0
    windows = tiny_windows(CONFIG)
    rows_of_table, _ = windows.hasher(ids, starts=starts)
    memory = {f"l{layer}": rows_of_table[i] for i, layer in enumerate(CONFIG.engram_layer_ids)}
    targets = np.roll(ids, -1, axis=1)
    return dict(token_ids=ids, segment_ids=segments, weights=weights, targets=targets, memory=memory)


def samples() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(4, CONFIG.vocab_size - 4, n).astype(np.int32) for n in LENGTHS]


def loss_of(config: ModelConfig, numerics: Numerics, options: ForwardOptions, params: dict, batch: dict):
    """Sums of the three losses over the batch, and their parts."""
    facts = token_facts(batch["segment_ids"], batch["weights"])
    hidden, notes = model.forward(
        config,
        numerics,
        params,
        batch["token_ids"],
        batch["memory"],
        batch["segment_ids"],
        replay=batch.get("replay"),
        facts=facts,
        options=options,
    )
    logits = model.head(config, numerics, params, hidden)
    chosen = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    nats = jnp.sum((jax.nn.logsumexp(logits, axis=-1) - chosen) * batch["weights"])
    kl, queries = notes["index"]
    balance = jnp.sum(notes["router"].balance)
    # Weighted so that no part hides in the rounding of another.
    parts = {"nats": nats, "kl": kl, "queries": queries, "balance": balance, "loads": notes["router"].loads}
    return nats + jnp.sum(kl) + 0.1 * balance, parts


@functools.cache
def program(config: ModelConfig, options: ForwardOptions, numerics: Numerics = FLOAT32):
    return jax.jit(jax.value_and_grad(functools.partial(loss_of, config, numerics, options), has_aux=True))


def assert_same_gradients(actual: dict, expected: dict) -> None:
    for (path, a), (_, b) in zip(flatten(actual), flatten(expected), strict=True):
        norm = np.linalg.norm(b)
        assert np.linalg.norm(a - b) <= SAME * norm, (path, np.linalg.norm(a - b), norm)


def test_packed_samples_are_as_alone():
    first, second = samples()
    together, apart = batch_of([[first, second], []], 24), batch_of([[first], [second]], 24)
    (loss, parts), grads = program(CONFIG, SELECTED)(parameters(), together)
    (loss_apart, parts_apart), grads_apart = program(CONFIG, SELECTED)(parameters(), apart)
    np.testing.assert_allclose(loss, loss_apart, rtol=1e-6)
    for name, value in parts.items():
        np.testing.assert_allclose(value, parts_apart[name], rtol=1e-5, err_msg=name)
    assert parts["queries"].tolist() == [sum(LENGTHS) - 2] * 2  # of each sample, the first token sees no entry
    assert_same_gradients(grads, grads_apart)


def assert_same(options: ForwardOptions, batch: dict, plain: ForwardOptions) -> float:
    """Losses and gradients of the model with a run of layers, whichever way they are computed; the plain loss."""
    (loss, parts), grads = program(RUNS, plain)(parameters(RUNS), batch)
    (loss_now, parts_now), grads_now = program(RUNS, options)(parameters(RUNS), batch)
    np.testing.assert_allclose(loss, loss_now, rtol=1e-6)
    for name, value in parts.items():
        np.testing.assert_allclose(value, parts_now[name], rtol=1e-5, err_msg=name)
    assert_same_gradients(grads_now, grads)
    return float(loss)


def test_tiles_and_remat_change_nothing():
    batch = batch_of([[s] for s in samples()], 24)
    batch["replay"] = np.stack([np.pad(replay_floors(n, 0, n - 2, 8), (0, 24 - n)) for n in LENGTHS])
    plain = dataclasses.replace(SELECTED, rolled=False)
    tiled = ForwardOptions(remat="group", index_loss="selected", dense_tokens=1, temporary_bytes=1)
    loss = assert_same(tiled, batch, plain)
    (without, _), _ = program(RUNS, plain)(parameters(RUNS), {**batch, "replay": np.zeros_like(batch["replay"])})
    assert abs(loss - without) > 1e-3  # floors have an effect


@pytest.mark.slow
@pytest.mark.parametrize("index_loss", ["selected", "dense"])
@pytest.mark.parametrize("remat", ["none", "layer", "full", "group"])
@pytest.mark.parametrize("rolled", [False, True])
def test_every_choice_of_computing_gives_the_same(index_loss, remat, rolled):
    batch = batch_of([samples()], 24)
    long = ForwardOptions(remat, True, index_loss, rolled, dense_tokens=1, temporary_bytes=1)
    assert_same(long, batch, ForwardOptions(index_loss=index_loss, rolled=False))


def test_long_rows_keep_nothing_of_queries_times_keys():
    """Arrays of the gradient's program with 128 selected entries, for a row of 8,192 tokens. The largest are the
    streams of a run of layers; gathered entries would have 128 d numbers a token, scores and masks 4,096 and more.
    """
    config, t = dataclasses.replace(RUNS, index_topk=128, candidate_topk_blocks=128), 8192
    tokens = jax.ShapeDtypeStruct((1, t), jnp.int32)
    width = config.engram_head_dim
    rows = jax.ShapeDtypeStruct((1, t, (config.engram_max_ngram_size - 1) * config.engram_n_heads, width), jnp.float32)
    params = {name: part for name, part in abstract_params(config, FLOAT32).items() if name != "mtp"}
    options = ForwardOptions(remat="group", index_loss="selected", temporary_bytes=2**22)

    def loss(params: dict, ids: jax.Array, memory: dict) -> jax.Array:
        hidden, notes = model.forward(config, QUANTIZED_TRAINING_BF16, params, ids, memory, ids, options=options)
        return jnp.sum(hidden.astype(jnp.float32)) + jnp.sum(notes["index"][0])

    program = jax.make_jaxpr(jax.grad(loss))(params, tokens, {f"l{i}": rows for i in config.engram_layer_ids})
    shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"\w+\[(\d[\d,]*)\]", str(program))}
    of_weights = {leaf.shape for leaf in jax.tree.leaves(params)}
    largest = max(shapes - of_weights, key=math.prod)
    streams = t * config.hc_mult * config.hidden_size
    assert streams < math.prod(largest) < min(3 * streams, 128 * config.head_dim * t), largest


def test_finite_differences():
    """Every parameter kind along its gradient, by central differences in float32.

    The sum of nats is about 100 and carries rounding of some 1e-5. Of the curvature, Richardson's extrapolation takes
    out what two steps disagree by. What the index loss only follows is no part of its gradient, so each kind is held
    against the losses that teach it.
    """
    batch = batch_of([[s] for s in samples()], 24)
    run = program(OPEN, SELECTED)
    params = parameters()
    _, grads = run(params, batch)
    kinds = dict(flatten(grads))
    silent = {path for path, slope in kinds.items() if not np.any(slope)}
    assert {path[-1] for path in silent} == {"bias", "bias_vl"}  # of the router: they only choose
    for path in sorted(set(kinds) - silent):
        slope = kinds[path]
        norm = float(jnp.linalg.norm(slope))
        direction = slope / norm

        taught_alone = path[0] == "indexers" or path[0] == "compressors" and path[2] in ("wk", "k_norm")

        def loss_at(step: float, path=path, direction=direction, taught_alone=taught_alone) -> float:
            parts = run(moved(params, path, step * direction), batch)[0][1]
            return float(jnp.sum(parts["kl"]) if taught_alone else parts["nats"] + 0.1 * parts["balance"])

        def change(step: float, loss_at=loss_at) -> float:
            return (loss_at(step) - loss_at(-step)) / (2 * step)

        step = min(0.1 / norm, 0.02)
        estimate = (4 * change(step / 2) - change(step)) / 3
        # Rounding of the differences was at most 1.7% of a slope; a term left out of a gradient is far more.
        assert abs(estimate - norm) <= 0.04 * norm, (path, estimate, norm)


def moved(params: dict, path: tuple[str, ...], change) -> dict:
    name, *rest = path
    return {**params, name: moved(params[name], rest, change) if rest else params[name] + change}


# --- replay and images, against the forward that serves --------------------------------------------------------------


def test_replay_is_ced_prefill_and_decode(tiny):
    """Recorded: the last 16 tokens of a CED prefill of 200, and 12 decoded tokens."""
    loaded, g = tiny("float32"), recording("ced")
    ids = np.concatenate([prompt("long")[0, :200], g["ced.long.decode_tokens"][:-1]])[None].astype(np.int32)
    width = loaded.config.sliding_window
    floors = replay_floors(ids.shape[1], 0, 200, width)[None]
    assert floors[0, 199] == floors[0, -1] == 200 - width and not floors[0, 199 - width]
    params, ids, memory, _ = loaded._loss_arguments(ids, None)

    @jax.jit
    def logits(params: dict, ids: jax.Array, memory: dict, replay: jax.Array) -> jax.Array:
        hidden, _ = model.forward(loaded.config, FLOAT32, params, ids, memory, replay=replay)
        return model.head(loaded.config, FLOAT32, params, hidden[:, 199:])

    expected = np.concatenate([g["ced.long.logits"][-1:], g["ced.long.decode_logits"]])
    np.testing.assert_allclose(logits(params, ids, memory, floors)[0], expected, rtol=0, atol=FLOAT32_ATOL)
    exact = logits(params, ids, memory, np.zeros_like(floors))[0]
    assert np.abs(exact - expected).max() > 10 * FLOAT32_ATOL


def test_images_are_as_in_prefill():
    """Router biases of its own, no memory, given embeddings: whole samples against the cache."""
    rng = np.random.default_rng(2)
    params = parameters()
    gate = params["layers"]["ffn"]["gate"]
    gate = {**gate, "bias_vl": jnp.asarray(rng.standard_normal(gate["bias_vl"].shape), jnp.float32)}
    params = {**params, "layers": {**params["layers"], "ffn": {**params["layers"]["ffn"], "gate": gate}}}
    batch = batch_of([samples()[1:]], 13)
    mask = np.zeros((1, 13), bool)
    mask[0, 4:9] = True
    embeds = rng.standard_normal((1, 13, CONFIG.hidden_size)).astype(np.float32)
    whole = jax.jit(functools.partial(model.forward, CONFIG, FLOAT32))
    hidden, _ = whole(params, batch["token_ids"], batch["memory"], image_mask=mask, image_embeds=embeds)
    text, _ = whole(params, batch["token_ids"], batch["memory"], image_mask=np.zeros_like(mask), image_embeds=embeds)
    step = jax.jit(functools.partial(model.extend, CONFIG, FLOAT32, all_logits=True))
    arrays = cache.zero_arrays(CONFIG, FLOAT32, 1, 16)
    start, count = np.zeros(1, np.int32), np.full(1, 13, np.int32)
    params["mtp"] = tiny_params(CONFIG)["mtp"]
    logits, _ = step(params, arrays, batch["token_ids"], start, count, batch["memory"], mask, embeds)
    np.testing.assert_allclose(model.head(CONFIG, FLOAT32, params, hidden), logits, rtol=0, atol=2e-5)
    assert np.abs(np.asarray(hidden - text)[0, 4:]).max() > 0.1


# --- quantisation points ---------------------------------------------------------------------------------------------


def watch_points(monkeypatch) -> list[tuple[str, int]]:
    """(format, width) of everything that is quantised from now on, by whichever name it is called."""
    seen: list[tuple[str, int]] = []

    def watched(name: str, real):
        def fake(*args):
            seen.append((name if len(args) == 1 else args[0], args[-1].shape[-1]))
            return real(*args)

        return fake

    for name in ("fake_q8", "fake_q4_index", "fake_q4_main", "fake_quantize_weight"):
        monkeypatch.setattr(quant, name, watched(name, getattr(quant, name)))
    return seen


def traced_points(numerics: Numerics, monkeypatch) -> list[tuple[str, int]]:
    with monkeypatch.context() as patch:
        seen = watch_points(patch)
        batch = batch_of([samples()], 24)
        jax.eval_shape(functools.partial(loss_of, CONFIG, numerics, SELECTED), parameters(), batch)
    return sorted(seen)


# What each point quantises in the two layers (Full with Engram, Reindex), as (format, width): the release's points.
EXPECTED = {
    # Of a layer: wq_a, wkv, wo_b, experts; wq_b, the indexer's, the second matrices of experts. Once: Engram.
    "linear_inputs": 2 * (4 * [("fake_q8", 64)] + 4 * [("fake_q8", 32)]) + [("fake_q8", 64)],
    "window_kv": 2 * [("fake_q8", 32)],  # with its rotated tail
    "main_kv": [("fake_q4_main", 32)],
    "index": 3 * [("fake_q4_index", 32)],  # keys of a source, queries of two
    # Of a layer: wq_a, wkv, wo_b, shared w1 and w3; wq_b, wo_a, the indexer's, shared w2. Once: Engram.
    "dense_weights": 2 * (5 * [("fp8", 64)] + 4 * [("fp8", 32)]) + [("fp8", 64)],
    "expert_weights": 2 * (2 * [("fp4", 64)] + [("fp4", 32)]),
    "tables": [("fp8_rows", 32)],
}


@pytest.mark.parametrize("point", [*ACTIVATION_POINTS, *WEIGHT_POINTS])
def test_each_point_is_switched_alone(point, monkeypatch):
    everything = traced_points(QUANTIZED_TRAINING, monkeypatch)
    rest = traced_points(QUANTIZED_TRAINING.without([point]), monkeypatch)
    assert everything == sorted(call for calls in EXPECTED.values() for call in calls)
    assert sorted(rest + EXPECTED[point]) == everything


@pytest.mark.slow
def test_each_point_changes_the_loss():
    """Rows of Engram tables are the input of an FP8 matrix, which rounds them in the same way: once or twice is one."""
    batch = batch_of([samples()], 24)

    def loss(*points: str) -> float:
        return float(program(CONFIG, SELECTED, QUANTIZED_TRAINING.without(points))(parameters(), batch)[0][0])

    losses = {points: loss(*points) for points in [(), *((point,) for point in EXPECTED)]}
    assert losses["tables",] == losses[()]
    losses["tables",] = loss("tables", "linear_inputs")
    assert len(set(losses.values())) == len(losses)
