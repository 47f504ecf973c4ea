"""The golden stack of four attention layers (ratios 0, 2, 1, 1; see golden/README.md): weights as a params tree, a run.

Each layer has its own recorded input, so that the error of one does not reach the next; keys and selections are shared
as in the model. Everything goes through one compiled block of 8 tokens: a prefill of 23 in three pieces, and 7 steps.
"""

import functools
import json
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from dsv41_jax import blocks, cache, quant
from dsv41_jax.cached_block import CachedBlock
from dsv41_jax.compressor import Compressor
from dsv41_jax.config import ModelConfig
from dsv41_jax.csa2 import Attention
from dsv41_jax.indexer import Indexer
from dsv41_jax.layer_loop import pick
from dsv41_jax.layer_plan import Run, layer_plan
from dsv41_jax.numerics import RELEASED
from module_golden import BF16, GOLDEN, assert_close, load, weights, wide

GOLD = load("attention")
LAYERS, MAX_LEN, BLOCK, PREFILL = 4, 30, 8, 23
CALLS = [f"prefill{PREFILL}", *(f"decode{p}" for p in range(PREFILL, MAX_LEN))]
# Names of the recorded config that differ from the released ones.
RENAMED = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
}
YARN = {"original_seq_len": "original_max_position_embeddings", "rope_factor": "factor"}


@functools.cache
def stack_config() -> ModelConfig:
    """Tiny model A's config with the stack's layers and widths, without Engram, drafts and images."""
    mapping = json.loads((GOLDEN / "tinyA_config.json").read_text())
    text = mapping["text_config"]
    text.update(num_hidden_layers=LAYERS, engram_layer_ids=[], engram_num_embeddings=[], dspark_target_layer_ids=[])
    text.update(num_nextn_predict_layers=0, vocab_size=1024)
    for key, value in json.loads(GOLD["layers.config"].tobytes()).items():
        if key in YARN or key in text["rope_scaling"]:
            text["rope_scaling"][YARN.get(key, key)] = value
        else:
            text[RENAMED.get(key, key)] = value
    del mapping["vision_config"]
    return ModelConfig.from_json(mapping)


CONFIG = stack_config()


@functools.cache
def stack_params() -> dict[str, Any]:
    """`layers` as a tuple of `attn` subtrees, compressors by ratio and indexers stacked as in the model."""
    layers = [weights(GOLD, f"layer{i}.w.") for i in range(LAYERS)]
    compressors, indexers = {}, []
    for layer in layers:
        compressor, indexer = layer.pop("compressor", None), layer.pop("indexer", None)
        if compressor:
            source = {**compressor, "wk": indexer["wk"], "k_norm": indexer["k_norm"]}
            compressors[f"r{1 + ('wgate' in compressor)}"] = jax.tree.map(lambda w: w[None], source)
        if indexer:
            indexers.append({name: indexer[name] for name in ("wq_b", "weights_proj")})
    return {
        "layers": tuple(layers),
        "compressors": compressors,
        "indexers": jax.tree.map(lambda *leaves: np.stack(leaves), *indexers),
    }


def runs() -> list[tuple[Run, int, int, int]]:
    """Run, layer, KV slot and index slot of each layer."""
    segments = layer_plan(CONFIG)
    assert all(s.repeats == s.size == 1 and len(s.runs) == 1 for s in segments)
    return [(s.runs[0], s.first, s.kv_slot, s.index_slot) for s in segments]


# What a module call leaves in the record: (module, method) -> name of the recorded value.
_WATCHED = {(Attention, "attend"): "o", (Attention, "output"): "out"}


def _watcher(record: dict[str, Any]):
    def intercept(call, args, kwargs, context):
        result = call(*args, **kwargs)
        kind = (type(context.module), context.method_name)
        if kind == (Attention, "window_rows"):
            record["window_kv"] = quant.fake_q8(result)  # as it is kept
        elif kind in _WATCHED:
            record[_WATCHED[kind]] = result
        elif kind == (Compressor, "entries"):
            record["latent_prerope"] = args[0]
            record["latent_cached"], record["index_k"] = quant.fake_q4_main(result[0]), quant.fake_q4_index(result[1])
        elif kind == (Indexer, "__call__"):
            record["index_q"], record["index_weights"] = result
        return result

    return nn.intercept_methods(intercept)


def run_stack(
    params: dict, state: cache.CacheArrays, xs: jax.Array, start: jax.Array, n_valid: jax.Array, layers=LAYERS
):
    """A block of tokens through every layer.

    Args:
        xs: bf16 [layers, B, t, D], one input for each layer. start, n_valid: int32 [B]. layers: how many to run.

    Returns:
        the new state, and per layer a dict of what it computed: out, window_kv, o, and where they exist latent_prerope,
        latent_cached, index_k, index_q, index_weights, score_raw, visible, topk, candidates.
    """
    block = CachedBlock(CONFIG, RELEASED, start, n_valid, xs.shape[2], state)
    shared, records = blocks.Sharing(), []
    for run, layer, kv_slot, index_slot in runs()[:layers]:
        record: dict[str, Any] = {}
        with _watcher(record):
            _, state = blocks.csa2_attention(
                CONFIG,
                RELEASED,
                run,
                params,
                params["layers"][layer],
                block,
                state,
                shared,
                layer,
                kv_slot,
                index_slot,
                pick,
                xs[layer],
            )
        if "index_q" in record:
            scores = block.scores(state, run.ratio, kv_slot, record["index_q"], record["index_weights"])
            record["score_raw"], record["visible"] = scores, block.visible(run.ratio, block.positions)
            record["topk"] = shared.selection
        if run.pool == "builds":
            n = record["score_raw"].shape[-1]
            record["candidates"] = blocks.index.pool_mask(shared.pool, n, None, CONFIG.candidate_block_size)
        records.append(record)
    return state, records


step = jax.jit(run_stack, static_argnames="layers")


def inputs(begin: int) -> np.ndarray:
    """Recorded inputs of the block that begins at a position: [layers, B, BLOCK, D], zero past the recording."""
    x = np.stack([GOLD[f"layer{i}.x"] for i in range(LAYERS)])[:, :, begin : begin + BLOCK]
    return np.pad(x, ((0, 0), (0, 0), (0, BLOCK - x.shape[2]), (0, 0)))


def empty_state(batch: int = 2) -> cache.CacheArrays:
    return cache.zero_arrays(CONFIG, RELEASED, batch, MAX_LEN)


def both(value: int) -> np.ndarray:
    """The same number for both rows of the batch."""
    return np.full(2, value, np.int32)


def entries(layer: int, tokens: int) -> int:
    """Complete groups of a layer after so many tokens."""
    return tokens // max(CONFIG.compress_ratios[layer], 1)


def feed(run, state: cache.CacheArrays, begin: int, end: int) -> tuple[cache.CacheArrays, list[dict[str, np.ndarray]]]:
    """Positions begin .. end - 1 in blocks through `run` (`step`, or a broken one); records without padding."""
    pieces = []
    for first in range(begin, end, BLOCK):
        n = min(BLOCK, end - first)
        state, records = run(stack_params(), state, inputs(first), both(first), both(n))
        for layer, record in enumerate(records):
            new = entries(layer, first + n) - entries(layer, first)
            kept = {"latent_prerope": new, "latent_cached": new, "index_k": new}
            for name in record:
                record[name] = np.asarray(record[name])[:, : kept.get(name, n)]
        pieces.append(records)
    joined = [
        {name: np.concatenate([p[layer][name] for p in pieces], axis=1) for name in first}
        for layer, first in enumerate(pieces[0])
    ]
    return state, joined


@functools.cache
def recorded() -> dict[str, list[dict[str, np.ndarray]]]:
    """Records of the prefill and of every step, by the golden name of the call."""
    state, found = empty_state(), {}
    for call in CALLS:
        state, found[call] = feed(step, state, *span(call))
    return found


def span(call: str) -> tuple[int, int]:
    """Positions of a golden call: first, and one past the last."""
    if call.startswith("prefill"):
        return 0, PREFILL
    position = int(call.removeprefix("decode"))
    return position, position + 1


def compare(records: list[dict[str, np.ndarray]], call: str, layer: int, names: tuple[str, ...]) -> set[str]:
    """Check what golden has of one layer in one call, as far as `names` go; returns the names found."""
    got, n, checked = records[layer], entries(layer, span(call)[1]), set()
    for name in names:
        want = GOLD.get(f"layer{layer}.own.{call}.{name}")
        if want is None:
            continue
        checked.add(name)
        if name == "topk":
            np.testing.assert_array_equal(got["topk"], want)
        elif name == "candidates":
            np.testing.assert_array_equal(got["candidates"][..., :n], want)
        elif name == "score":  # the raw scores, -inf where not visible or not in the pool
            allowed = got["visible"][..., :n]
            if layer == 3:
                allowed = allowed & records[2]["candidates"][..., :n]
            np.testing.assert_array_equal(np.isfinite(wide(want)), allowed)
            assert_close(got["score_raw"][..., :n][allowed].astype(BF16), want[allowed])
        else:
            assert_close(got[name], want)
    return checked
