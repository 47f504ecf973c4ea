"""Random legal layer maps against the slow float64 oracle: exact prefill in ragged pieces, decode, choices and drafts.

Each model is loaded from a released-format folder, so reading and dequantising are compared too. Every step is a block
of the same static length, so a model compiles one step and one draft program. The loop is unrolled here, to see every
layer's choices; `test_layer_plan` shows that the rolled loop computes the same.
"""

import functools
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax import cache, model, runner
from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_map import Mode, layer_map
from dsv41_jax.layer_plan import layer_plan
from oracle import Oracle
from oracle_weights import dequantise
from random_configs import random_legal_config
from random_models import random_token_map, write_model

BLOCK = 16
# A float32 model makes the oracle's choice only where the scores of the two sides differ by more than its rounding.
MARGIN = 1e-5
# Not scaled: logits are about 2 in size, the largest of all these models is below 9.
ATOL = 1e-4
# Small models that meet every kind of map, weight and draft head that 150 seeds meet.
SEEDS = (84, 29, 56, 122, 99)
SLOW_SEEDS = (104, 82, 57, 5, 67, 124, 86, 25, 65, 49, *range(200, 250))


@functools.partial(jax.jit, static_argnames=("config", "numerics", "layers", "all_logits"))
def _recorded(params, arrays, row, ids, start, n_valid, floor, memory, mask, embeds, *, config, numerics, **static):
    """As the step of `runner` for one row, and what each layer chose."""
    notes, own = {}, cache.take_rows(arrays, row)
    step = functools.partial(model.extend, config, numerics, record=notes, **static)
    logits, own = step(params, own, ids, start, n_valid, memory, mask, embeds, floor)
    wanted = ("selection", "pool", "experts")
    chosen = {i: {k: note[k] for k in wanted if k in note} for i, note in notes.items()}
    return logits, cache.put_rows(arrays, own, row), chosen


@functools.partial(jax.jit, static_argnames=("config", "numerics"))
def _packed_logits(params, ids, memory, segment_ids, *, config, numerics):
    hidden, notes = model.forward(config, numerics, params, ids, memory, segment_ids)
    return model.head(config, numerics, params, hidden), notes["experts"]


def prepare(seed, folder):
    """The same random weights as a loaded model and as an oracle."""
    config, token_map = random_legal_config(seed), random_token_map(random_legal_config(seed), seed)
    oracle = Oracle(config, dequantise(write_model(folder, config, seed)), token_map)
    return ds.load(folder, numerics="float32", token_map=token_map), oracle


def sure_length(result):
    """Tokens before the first choice that rounding may turn: from there on the two may rightly differ."""
    margins = [m for name in ("topk_margin", "candidate_margin", "expert_margin") for m in result[name].values()]
    unsure = np.flatnonzero(np.min(margins, axis=0) < MARGIN)
    return len(result["logits"]) if unsure.size == 0 else int(unsure[0])


def schedule(rng, lengths):
    """Blocks [steps, 2] that read rows of `lengths`: pieces of 0..BLOCK tokens, ragged, then five single tokens."""
    steps, at = [], np.zeros(2, int)
    while (at < lengths - 5).any():
        low = 1 if not steps else 0  # a draft needs one token
        n = np.minimum(rng.integers(low, BLOCK + 1, 2), lengths - 5 - at)
        steps.append(n)
        at = at + n
    return [*steps, *np.ones((5, 2), int)]


def check_choices(share, config, note, expected, at, count):
    """Layer `share.layer`: the first `count` tokens of a block that begins at `at`."""
    layer, tokens = share.layer, slice(at, at + count)
    np.testing.assert_array_equal(note["experts"][0, :count], np.sort(expected["experts"][layer][tokens], axis=-1))
    if share.mode in (Mode.FULL, Mode.REINDEX):
        np.testing.assert_array_equal(note["selection"][0, :count], expected["topk"][layer][tokens])
    if share.pool == "builds":
        wanted = expected["candidates"][layer][tokens]
        blocks = np.arange(wanted.shape[1]) // config.candidate_block_size
        got = (note["pool"][0, :count, :, None] == blocks).any(axis=1)
        visible = np.arange(wanted.shape[1]) < (np.arange(at, at + count)[:, None] + 1) // share.ratio
        np.testing.assert_array_equal(got & visible, wanted & visible)


def check_draft(oracle, result, length, next_token, tokens, logits, confidence):
    """One row's draft after `length` tokens; False where a choice inside it is too close."""
    expected = oracle.draft(result, length - 1, next_token)
    if min(expected["margin"].min(), *(m.min() for m in expected["expert_margin"].values())) < MARGIN:
        return False
    np.testing.assert_array_equal(tokens, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=ATOL)
    np.testing.assert_allclose(confidence, expected["confidence"], rtol=0, atol=ATOL)
    return True


def kinds(seed):
    """What a random configuration exercises, as words."""
    config = ModelConfig.from_json(random_legal_config(seed))
    shares = layer_map(config)[: config.num_hidden_layers]
    ratios = [config.compress_ratios[i] for i in config.kv_source_layer_ids]
    found = {f"{s.mode.name} at ratio {s.ratio}, pool {s.pool}" for s in shares}
    found |= {f"sources of ratio {a}, then {b}" for a, b in pairwise(ratios)}
    found |= {f"window layer before {b.mode.name}" for a, b in pairwise(shares) if a.mode is Mode.WINDOW and a.layer}
    found |= {"equal layers in a row" for segment in layer_plan(config) for run in segment.runs if run.count > 1}
    found |= {f"{name}={getattr(config, name)}" for name in ("n_draft", "hc_mult", "scoring_func", "norm_topk_prob")}
    found |= {f"{len(ratios[:2])} sources", f"YaRN {bool(config.rope_scaling)}", f"clamp {config.swiglu_limit > 0}"}
    found |= {f"{len(config.engram_layer_ids[:2])} Engram layers", f"first layer {shares[0].mode.name}"}
    if config.engram_layer_ids:
        found |= {f"n-grams to {config.engram_max_ngram_size}", f"Engram at 0: {0 in config.engram_layer_ids}"}
    if config.candidate_source_layer_id is not None:
        found |= {f"blocks of one: {config.candidate_block_size == 1}"}
    return found


def test_the_few_meet_every_kind():
    assert set().union(*map(kinds, SEEDS)) >= set().union(*map(kinds, range(150)))


@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(s, marks=pytest.mark.slow) for s in SLOW_SEEDS)])
def test_prefill_decode_and_drafts_equal_the_oracle(seed, tmp_path, monkeypatch):
    loaded, oracle = prepare(seed, tmp_path / "model")
    config, rng = loaded.config, np.random.default_rng(seed)
    lengths = rng.integers(36, 50, 2)
    ids = rng.integers(3, config.vocab_size, (2, lengths.max() + 1)).astype(np.int32)
    results = [oracle.forward(ids[row, : lengths[row]]) for row in range(2)]
    sure = np.array([sure_length(result) for result in results])
    notes = []

    def extend(*args, **options):
        static = {name: options[name] for name in ("config", "numerics", "layers", "all_logits")}  # no mesh here
        logits, arrays, note = _recorded(*args, **static)
        notes.append(note)
        return logits, arrays

    monkeypatch.setattr(runner, "_extend", extend)
    state = loaded._runner.new_cache(2, int(lengths.max()))
    compared = drafts = 0
    for n_valid in schedule(rng, lengths):
        at = state.lengths
        block = rng.integers(3, config.vocab_size, (2, BLOCK)).astype(np.int32)  # padding may be any token
        for row in range(2):
            block[row, : n_valid[row]] = ids[row, at[row] : at[row] + n_valid[row]]
        logits, state = loaded._runner.extend(state, block, n_valid, all_logits=True)
        chosen = jax.tree.map(np.asarray, notes[-2:])  # rows run one after the other
        draft = None
        if config.n_draft:
            following = ids[np.arange(2), state.lengths]
            draft = [np.asarray(x) for x in loaded.draft(state, following)]
        for row in range(2):
            count = min(n_valid[row], max(sure[row] - at[row], 0))
            expected = results[row]
            wanted = expected["logits"][at[row] : at[row] + count]
            np.testing.assert_allclose(logits[row, :count], wanted, rtol=0, atol=ATOL)
            for share in loaded.layer_map[: config.num_hidden_layers]:
                check_choices(share, config, chosen[row][share.layer], expected, at[row], count)
            compared += count
            if draft and state.lengths[row] <= sure[row]:
                drafts += check_draft(
                    oracle, expected, int(state.lengths[row]), int(following[row]), *(x[row] for x in draft)
                )
    assert (state.lengths == lengths).all()
    assert compared > 0.6 * lengths.sum()
    assert drafts >= 5 or not config.n_draft


@pytest.mark.parametrize("seed", [25, 124])
def test_packed_samples_equal_the_oracle(seed, tmp_path):
    """The cacheless forward: three samples in a row, of odd lengths, one of them a single token."""
    loaded, oracle = prepare(seed, tmp_path / "model")
    rng = np.random.default_rng(seed)
    lengths = [17, 1, 22]
    ids = rng.integers(3, loaded.config.vocab_size, (1, sum(lengths))).astype(np.int32)
    segment_ids = np.repeat([5, 6, 5], lengths)[None].astype(np.int32)
    _, _, memory, segments = loaded._loss_arguments(ids, segment_ids)
    logits, experts = _packed_logits(
        loaded.params, jnp.asarray(ids), memory, segments, config=loaded.config, numerics=loaded._runner.numerics
    )
    at = compared = 0
    for result, length in zip(oracle.forward_packed(ids[0], lengths), lengths, strict=True):
        count = sure_length(result)
        np.testing.assert_allclose(logits[0, at : at + count], result["logits"][:count], rtol=0, atol=ATOL)
        for layer, chosen in experts.items():
            wanted = np.sort(result["experts"][layer][:count], axis=-1)
            np.testing.assert_array_equal(chosen[0, at : at + count], wanted)
        at, compared = at + length, compared + count
    assert compared > 0.5 * at
