"""Bytes of HBM that a step must move on one device: which weights it reads, and what of the cache.

What must move, not what a program does move: every byte once, activations left out. Of routed experts only those count
that a batch is expected to touch, if routing is uniform.
"""

import dataclasses
import math
from typing import Any

import jax

from dsv41_jax import quant
from dsv41_jax.accounting import touched_experts
from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_map import Mode, layer_map
from dsv41_jax.numerics import Numerics
from dsv41_jax.pages import PageLayout
from dsv41_jax.plan.request import Request

_TAPPED = ("main_proj", "main_norm")  # what draft windows are seeded with, beside a layer's wkv


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one device in one step.

    Attributes:
        experts: routed experts that are touched. dense: all other weights that are read. table_rows: rows of the
            embedding and of Engram tables. index_keys, main_kv, window: read from the cache. written: to the cache.
        distinct_experts: expected number of experts of a layer that a step's tokens touch, of all.
    """

    experts: float
    dense: float
    table_rows: float
    index_keys: float
    main_kv: float
    window: float
    written: float
    distinct_experts: float

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(value for name, value in dataclasses.asdict(self).items() if name != "distinct_experts")

    @property
    def weights(self) -> float:
        """Bytes of weights."""
        return self.experts + self.dense + self.table_rows

    @property
    def cache(self) -> float:
        """Bytes of the cache."""
        return self.index_keys + self.main_kv + self.window + self.written


def local_bytes(leaf: Any) -> int:
    """Bytes of one device's part of an array or its description."""
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def names(path: tuple) -> tuple[str, ...]:
    """A leaf's path as names."""
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def traffic(config: ModelConfig, numerics: Numerics, state: Any, request: Request) -> Traffic:
    """What a step moves on the device with the most rows.

    Args:
        state: parameters with shardings; of a training step all that it updates: it is read and written once.
    """
    if request.phase == "train":
        return _training(config, state, request)
    rows, tokens = request.rows, request.tokens
    encoder_only = request.phase == "prefill"
    layers = config.decoder_start if encoder_only else config.num_hidden_layers
    distinct = touched_experts(config.n_routed_experts, config.num_experts_per_tok, request.batch * tokens)
    read = {"experts": 0.0, "dense": 0.0}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = names(path)
        part = _fraction(config, name, layers, encoder_only)
        if part:
            kind = "experts" if "experts" in name else "dense"
            share = distinct / config.n_routed_experts if kind == "experts" else 1.0
            read[kind] += part * share * local_bytes(leaf)
    return Traffic(
        **read,
        table_rows=_table_rows(config, layers, rows * tokens),
        **_cache(config, numerics, layers, rows, tokens, request.context),
        distinct_experts=distinct,
    )


def _training(config: ModelConfig, state: Any, request: Request) -> Traffic:
    distinct = touched_experts(config.n_routed_experts, config.num_experts_per_tok, request.batch * request.tokens)
    updated = 2.0 * sum(map(local_bytes, jax.tree.leaves(state)))
    return Traffic(0.0, updated, 0.0, 0.0, 0.0, 0.0, 0.0, distinct)


def _fraction(config: ModelConfig, name: tuple[str, ...], layers: int, encoder_only: bool) -> float:
    """What part of a (stacked) leaf a step reads."""
    if name[0] == "layers":
        return layers / config.num_hidden_layers
    if name[0] == "compressors":
        return 1.0  # of the hand-over too
    if name[0] == "indexers":
        return sum(layer < layers for layer in config.index_source_layer_ids) / len(config.index_source_layer_ids)
    if name[0] == "engram":
        return float("embed" not in name and int(name[1].removeprefix("l")) < layers)
    if name[0] in ("norm", "head"):
        return float(not encoder_only)
    if name[0] == "mtp":
        seeds = name[1] in _TAPPED or ("attn" in name and ("wkv" in name or "kv_norm" in name))
        return float(seeds and not encoder_only)
    return 0.0  # the embedding is read by rows, vision is not part of these steps


def _table_rows(config: ModelConfig, layers: int, tokens: float) -> float:
    embedding = 2 * config.hidden_size
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    row = config.engram_head_dim + config.engram_head_dim // quant.BLOCK
    return tokens * (embedding + sum(layer < layers for layer in config.engram_layer_ids) * columns * row)


def _cache(
    config: ModelConfig, numerics: Numerics, layers: int, rows: float, tokens: int, context: int
) -> dict[str, float]:
    """Bytes of the cache that `rows` rows read and write."""
    shares = layer_map(config)[:layers]
    ring_row = config.head_dim + config.head_dim // quant.BLOCK
    window = rows * layers * min(context, config.sliding_window) * ring_row
    index_keys = main_kv = 0.0
    written = rows * tokens * layers * ring_row
    for share in shares:
        if share.mode is Mode.WINDOW:
            continue
        entries = context // share.ratio
        layout = PageLayout.of(config, numerics, share.ratio)
        entry = 4 * layout.main_words
        key = config.index_head_dim // 2 + config.index_head_dim // quant.BLOCK
        main_kv += rows * min(entries, tokens * config.index_topk) * entry
        if share.mode in (Mode.FULL, Mode.REINDEX):
            pool = config.candidate_topk_blocks * config.candidate_block_size
            searched = min(entries, tokens * pool) if share.pool == "searches" else entries
            index_keys += rows * searched * key
        if share.mode is Mode.FULL:
            written += rows * tokens / share.ratio * (entry + key)
    return {"index_keys": index_keys, "main_kv": main_kv, "window": window, "written": written}
