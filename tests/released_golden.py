"""The recordings of tiny model A in `released`, and what a model must make of them; see `test_model_released`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import dsv41_jax as ds
from dsv41_jax.cache import zero_arrays
from dsv41_jax.hyper_connections import identity_mix
from dsv41_jax.layer_map import Mode
from dsv41_jax.model import embed
from dsv41_jax.pages import PageLayout
from layer_by_layer import BLOCK, MAX_LEN, layer_program, layers
from stored import stored_entries
from tiny_golden import (
    CANDIDATE_SOURCE,
    assert_near,
    assert_rms,
    changed_rows,
    pool_blocks,
    pool_rows,
    prompt,
    recorded_rows,
    recording,
)

N = 41  # tokens of `mid`


def padded(x: np.ndarray) -> jax.Array:
    """Recorded values [n, ...] as a block [1, BLOCK, ...]."""
    return jnp.asarray(np.pad(x, [(0, BLOCK - len(x))] + [(0, 0)] * (x.ndim - 1))[None])


def recorded_keys(model: ds.Model):
    """A cache that holds the recorded entries of every KV source."""
    g, config = recording("mid"), model.config
    arrays = zero_arrays(config, model._runner.numerics, 1, MAX_LEN)
    main_kv, index_key = dict(arrays.main_kv), dict(arrays.index_key)
    for layer in layers(config):
        if layer.kind.mode is Mode.FULL:
            name, at = f"r{layer.kind.ratio}", layer.kv_slot
            kv, key = g[f"ref.latent_cached.{layer.number}"], g[f"ref.index_k.{layer.number}"]
            layout = PageLayout.of(config, model._runner.numerics, layer.kind.ratio)
            number = np.arange(len(kv))[None]
            place = (number // layout.entries, number % layout.entries)  # row 0 owns the first pages
            main_kv[name] = layout.write_main(main_kv[name], at, *place, kv[None], number >= 0)
            index_key[name] = layout.write_index(index_key[name], at, *place, key[None], number >= 0)
    return arrays.replace(main_kv=main_kv, index_key=index_key)


def run_on_recorded_input(model: ds.Model, layer) -> dict[str, np.ndarray]:
    """What one layer makes of the recorded values it reads: streams, mix, shared entries, selection, pool."""
    g, config, numerics = recording("mid"), model.config, model._runner.numerics
    number = layer.number
    if layer.engram:
        x = padded(g[f"ref.block{number}.post_engram"])
    elif number:
        x = padded(g[f"ref.block{number - 1}.out"])
    else:
        embedded = np.asarray(embed(config, numerics, model.params, prompt("mid")[0], None, None))
        x = padded(np.repeat(embedded[:, None], config.hc_mult, axis=1))
    pre = padded(g[f"ref.block{number - 1}.pre_mix"]) if number else identity_mix((1, BLOCK), config.hc_mult)
    source = max((s for s in config.index_source_layer_ids if s <= number), default=None)
    reads = layer.kind.mode is Mode.REUSE
    rows = (
        recorded_rows("mid", f"ref.prefill_topk.{source}") if reads else np.full((N, config.index_topk), -1, np.int32)
    )
    candidates = recording("mid")[f"ref.prefill_candidates.{CANDIDATE_SOURCE}"]
    pool = pool_blocks(candidates, config.candidate_block_size, config.candidate_topk_blocks)
    result = layer_program(config, numerics, layer.kind)(
        model.params,
        recorded_keys(model),
        x,
        pre,
        padded(rows),
        padded(pool),
        jnp.zeros(1, jnp.int32),
        jnp.full(1, N, jnp.int32),
        jnp.zeros((1, BLOCK), bool),
        number,
        layer.kv_slot,
        layer.index_slot,
    )
    arrays = result.pop("arrays")
    result = {name: np.asarray(value)[0, :N] for name, value in result.items()}
    if layer.kind.mode is Mode.FULL:
        entries = stored_entries(config, numerics, arrays, layer.kind.ratio, layer.kv_slot)
        result["main_kv"], result["index_key"] = (x[: N // layer.kind.ratio] for x in entries)
    return result


def check_blocks(model: ds.Model, numbers: Sequence[int] | None = None) -> None:
    """Streams, mixes, selections and entries of layers (default: all) of `mid`, on the recorded values they read."""
    g, changed, rows = recording("mid"), 0, 0
    for layer in layers(model.config):
        number = layer.number
        if numbers is not None and number not in numbers:
            continue
        result = run_on_recorded_input(model, layer)
        assert_near(result["attn_in"], g[f"ref.attn{number}.in"])
        differs = changed_rows(result["experts"], g[f"ref.ffn{number}.indices"])
        rows += N
        changed += differs.sum()
        if layer.kind.mode in (Mode.FULL, Mode.REINDEX):
            selection = changed_rows(result["selection"], recorded_rows("mid", f"ref.prefill_topk.{number}"))
            rows += N
            changed += selection.sum()
            differs |= selection
        if layer.kind.mode is Mode.FULL:
            assert_near(result["main_kv"], g[f"ref.latent_cached.{number}"])
            assert_near(result["index_key"], g[f"ref.index_k.{number}"])
        if number == CANDIDATE_SOURCE:
            kept = pool_rows(result["pool"], model.config.candidate_block_size, N)
            np.testing.assert_array_equal(kept, g[f"ref.prefill_candidates.{number}"])
        same = ~differs
        assert_near(result["attn_out"][same], g[f"ref.attn{number}.out"][same])
        assert_near(result["out"][same], g[f"ref.block{number}.out"][same])
        np.testing.assert_allclose(result["pre"][same], g[f"ref.block{number}.pre_mix"][same], rtol=0, atol=2e-3)
    assert changed <= 0.01 * rows, f"{changed} of {rows} rows choose other experts or entries"


def decoded(model: ds.Model, cache: ds.Cache, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, n, V] after feeding tokens [B, n] one by one."""
    steps = []
    for step in range(tokens.shape[1]):
        logits, cache = model.decode(cache, tokens[:, step])
        steps.append(np.asarray(logits))
    return np.stack(steps, axis=1)


def check_short(model: ds.Model) -> None:
    g = recording("short")
    logits, cache = model.prefill(prompt("short"), all_logits=True)
    assert_rms(logits[0], g["ref.prefill_logits"], 0.01, argmax=1)
    tokens = g["ref.decode_tokens"]
    _, draft_logits, _ = model.draft(cache, tokens[:1])
    assert_rms(draft_logits[0, :1], g["ref.dspark_after_prefill_logits"][:1], 0.05, argmax=1)
    ours, first, recorded = [], [], g["ref.dspark_logits"]
    for step in range(24):
        logits, cache = model.decode(cache, tokens[step : step + 1])
        ours.append(np.asarray(logits)[0])
        if step < len(recorded):
            _, draft_logits, _ = model.draft(cache, tokens[step + 1 : step + 2])
            first.append(np.asarray(draft_logits)[0, 0])
    assert_rms(np.stack(ours), g["ref.decode_logits"], 0.08)
    assert_rms(np.stack(first), recorded[:, 0], 0.05)
