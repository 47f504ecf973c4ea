"""Every rule a configuration must obey to be legal. Each error names the key, its value and the rule."""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dsv41_jax.config_json import MODEL_TYPE, ConfigError, Table
from dsv41_jax.engram_layout import engram_layout

if TYPE_CHECKING:
    from dsv41_jax.config import ModelConfig, VisionConfig

SCORING_FUNCS = ("sqrtsoftplus", "softmax", "sigmoid")
SCALE_BLOCK = 32  # activations and weights carry one scale per 32 inputs
_INT64_MAX = (1 << 63) - 1

# Values the released arithmetic is written for; anything else would be computed wrongly, so it is refused.
_ONLY_TEXT: dict[str, Any] = {
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "n_shared_experts": 1,
    "topk_method": "noaux_tc",
}
_ONLY_QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": (32, 32),
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_POSITIVE = [
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "n_routed_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "sliding_window",
    "compress_rope_theta",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "hc_mult",
    "hc_sinkhorn_iters",
    "hc_eps",
]
_NOT_NEGATIVE = [
    "swiglu_limit",
    "initializer_range",
    "candidate_topk_blocks",
    "candidate_block_size",
    "engram_max_ngram_size",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_compressed_vocab_size",
    "num_nextn_predict_layers",
    "dspark_block_size",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
]
_POSITIVE_ENGRAM = ["engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size"]
_POSITIVE_DRAFT = ["dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok"]


def check_model_types(table: Table) -> None:
    """Root, text and vision `model_type` and the activation `dtype` of a configuration being read."""
    if ("root", "model_type") not in table:
        raise ConfigError("model_type", None, f"is required and must be {MODEL_TYPE!r}")
    for section, wanted in (("root", MODEL_TYPE), ("text", f"{MODEL_TYPE}_text"), ("vision", f"{MODEL_TYPE}_vision")):
        found = table.get((section, "model_type"), wanted)
        if found != wanted:
            key = "model_type" if section == "root" else f"{section}_config.model_type"
            raise ConfigError(key, found, f"must be {wanted!r}")
    dtype = table.get(("root", "dtype"), "bfloat16")
    if dtype != "bfloat16":
        raise ConfigError("dtype", dtype, "must be 'bfloat16', the type of the released activations")


def validate(config: ModelConfig) -> None:
    """Raise ConfigError for the first rule that `config` breaks."""
    check_types(config)
    _check_quantization(config)
    _check_numbers(config)
    _check_widths(config)
    _check_tokens(config)
    _check_layer_map(config)
    _check_candidates(config)
    _check_engram(config)
    _check_drafts(config)
    if config.rope_scaling is not None:
        _check_rope_scaling(config)
    if config.vision is not None:
        _check_vision(config.vision)


def check_types(config: Any, prefix: str = "") -> None:
    """Types of every field of a frozen config: bool is no number, numbers are finite, lists hold integers >= 0."""
    for f in fields(config):
        key, value, kind = prefix + f.name, getattr(config, f.name), str(f.type)
        if value is None and kind.endswith("| None"):
            continue
        kind = kind.removesuffix(" | None")
        if kind == "int":
            _require(type(value) is int, key, value, "must be an integer")
        elif kind == "float":
            number = type(value) in (int, float) and math.isfinite(value)
            _require(number, key, value, "must be a finite number")
        elif kind == "bool":
            _require(type(value) is bool, key, value, "must be true or false")
        elif kind == "str":
            _require(isinstance(value, str), key, value, "must be a string")
        elif kind == "tuple[int, ...]":
            integers = isinstance(value, tuple) and all(type(x) is int and x >= 0 for x in value)
            _require(integers, key, value, "must be a list of integers >= 0")
        else:
            _require(type(value).__name__ == kind, key, value, f"must be a {kind}")


def _require(ok: bool, key: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(key, list(value) if isinstance(value, tuple) else value, rule)


def _check_quantization(config: ModelConfig) -> None:
    check_types(config.quantization)
    for key, wanted in _ONLY_QUANTIZATION.items():
        value = getattr(config.quantization, key)
        _require(value == wanted, key, value, f"must be {list(wanted) if isinstance(wanted, tuple) else wanted!r}")


def _check_numbers(config: ModelConfig) -> None:
    for key in _POSITIVE:
        _require(getattr(config, key) > 0, key, getattr(config, key), "must be above 0")
    for key in _NOT_NEGATIVE:
        _require(getattr(config, key) >= 0, key, getattr(config, key), "must not be negative")
    for key, wanted in _ONLY_TEXT.items():
        _require(getattr(config, key) == wanted, key, getattr(config, key), f"must be {wanted!r}")
    known = config.scoring_func in SCORING_FUNCS
    _require(known, "scoring_func", config.scoring_func, f"must be one of {', '.join(SCORING_FUNCS)}")
    _require(
        config.num_experts_per_tok <= config.n_routed_experts,
        "num_experts_per_tok",
        config.num_experts_per_tok,
        f"must be at most n_routed_experts = {config.n_routed_experts}",
    )


def _check_widths(config: ModelConfig) -> None:
    inner = "inner sizes of quantised weights and quantised vectors must be multiples of 32"
    for key in ("hidden_size", "q_lora_rank", "moe_intermediate_size", "head_dim", "index_head_dim"):
        value = getattr(config, key)
        _require(value % SCALE_BLOCK == 0, key, value, inner)
    rank = config.o_lora_rank * config.o_groups
    _require(rank % SCALE_BLOCK == 0, "o_lora_rank", config.o_lora_rank, f"times o_groups is {rank}: {inner}")
    heads = config.num_attention_heads
    _require(heads % config.o_groups == 0, "o_groups", config.o_groups, f"must divide num_attention_heads = {heads}")
    rope = config.qk_rope_head_dim
    narrow = min(config.head_dim, config.index_head_dim)
    fits = rope % 2 == 0 and rope <= narrow
    rule = f"must be even (rotated in pairs) and at most {narrow}, the smaller of head_dim and index_head_dim"
    _require(fits, "qk_rope_head_dim", rope, rule)


def _check_tokens(config: ModelConfig) -> None:
    keys = ["bos_token_id", "eos_token_id", "pad_token_id"]
    if config.vision is not None:
        _require(config.image_token_id is not None, "image_token_id", None, "is required with a vision_config")
    if config.image_token_id is not None:
        keys.append("image_token_id")
    if config.engram_layer_ids:
        keys.append("engram_pad_token_id")
    if config.num_nextn_predict_layers:
        keys.append("dspark_noise_token_id")
    for key in keys:
        value = getattr(config, key)
        rule = f"must be a token id, 0..{config.vocab_size - 1} (vocab_size = {config.vocab_size})"
        _require(0 <= value < config.vocab_size, key, value, rule)


def _check_ascending_layers(config: ModelConfig, key: str) -> None:
    ids, layers = getattr(config, key), config.num_hidden_layers
    _require(all(a < b for a, b in pairwise(ids)), key, ids, "must ascend, each layer once")
    _require(all(i < layers for i in ids), key, ids, f"must be backbone layers, 0..{layers - 1}")


def _check_layer_map(config: ModelConfig) -> None:
    layers, drafts = config.num_hidden_layers, config.num_nextn_predict_layers
    ratios, kv, index = config.compress_ratios, config.kv_source_layer_ids, config.index_source_layer_ids
    rule = f"must have num_hidden_layers = {layers} entries, or {layers + drafts} with the draft blocks"
    _require(len(ratios) == layers + drafts, "compress_ratios", ratios, f"{rule}, not {len(ratios)}")
    _require(all(r in (0, 1, 2) for r in ratios), "compress_ratios", ratios, "every ratio must be 0, 1 or 2")
    drafts_window = not any(ratios[layers:])
    _require(drafts_window, "compress_ratios", ratios, f"draft blocks (entries from {layers} on) must have ratio 0")
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        _check_ascending_layers(config, key)
    for i in kv:
        _require(ratios[i] > 0, "kv_source_layer_ids", kv, f"layer {i} has ratio 0: a KV source needs a ratio above 0")
        _require(i in index, "index_source_layer_ids", index, f"must contain every KV source, {i} is missing")
    for i in index:
        rule = f"layer {i} has ratio 0: an index source needs a ratio above 0"
        _require(ratios[i] > 0, "index_source_layer_ids", index, rule)
    for i, ratio in enumerate(ratios[:layers]):
        if ratio == 0:
            continue
        before = [s for s in kv if s <= i]
        rule = f"layer {i} has ratio {ratio} but no KV source (kv_source_layer_ids = {list(kv)}) at or before it"
        _require(bool(before), "compress_ratios", ratios, rule)
        rule = f"layer {i} has ratio {ratio}, its KV source {before[-1]} has {ratios[before[-1]]}: they must be equal"
        _require(ratios[before[-1]] == ratio, "compress_ratios", ratios, rule)


def _check_candidates(config: ModelConfig) -> None:
    source, kv = config.candidate_source_layer_id, config.kv_source_layer_ids
    if source is None:
        return
    _require(source in kv, "candidate_source_layer_id", source, f"must be a KV source, one of {list(kv)}")
    rule = f"index sources after it must share its KV source, but {kv[-1]} is a later one"
    _require(source == kv[-1], "candidate_source_layer_id", source, rule)
    blocks, size = config.candidate_topk_blocks, config.candidate_block_size
    _require(size > 0, "candidate_block_size", size, "must be above 0 with a candidate source")
    pool = blocks * size - (size - 1)
    rule = (
        f"candidate_topk_blocks * candidate_block_size - (candidate_block_size - 1) = {pool} must be at least "
        f"index_topk = {config.index_topk} (candidate_block_size = {size})"
    )
    _require(pool >= config.index_topk, "candidate_topk_blocks", blocks, rule)


def _check_engram(config: ModelConfig) -> None:
    ids, sizes, layers = config.engram_layer_ids, config.engram_num_embeddings, config.num_hidden_layers
    _require(len(set(ids)) == len(ids), "engram_layer_ids", ids, "must name each layer once")
    _require(all(i < layers for i in ids), "engram_layer_ids", ids, f"must be backbone layers, 0..{layers - 1}")
    rule = f"must have one table size for each of engram_layer_ids = {list(ids)}"
    _require(len(sizes) == len(ids), "engram_num_embeddings", sizes, rule)
    if not ids:
        return
    order = config.engram_max_ngram_size
    _require(order >= 2, "engram_max_ngram_size", order, "must be at least 2 (n-gram sizes run from 2)")
    for key in _POSITIVE_ENGRAM:
        _require(getattr(config, key) > 0, key, getattr(config, key), "must be above 0 with Engram layers")
    width = config.engram_head_dim
    _require(width % SCALE_BLOCK == 0, "engram_head_dim", width, "table rows must be a multiple of 32 wide")
    vocab, compressed = config.vocab_size, config.engram_compressed_vocab_size
    rule = f"must be at most vocab_size = {vocab}"
    _require(compressed <= vocab, "engram_compressed_vocab_size", compressed, rule)
    smallest = config.engram_vocab_size * (order - 1) * config.engram_n_heads
    _require(
        smallest <= min(sizes) and max(sizes) <= _INT64_MAX,
        "engram_num_embeddings",
        sizes,
        f"must be between {smallest} (columns times engram_vocab_size) and 2^63 - 1",
    )
    rows = engram_layout(config).table_rows
    _require(sizes == rows, "engram_num_embeddings", sizes, f"must be the sums of the derived primes, {list(rows)}")


def _check_drafts(config: ModelConfig) -> None:
    _check_ascending_layers(config, "dspark_target_layer_ids")
    if config.num_nextn_predict_layers == 0:
        return
    for key in _POSITIVE_DRAFT:
        _require(getattr(config, key) > 0, key, getattr(config, key), "must be above 0 with draft blocks")
    taps = config.dspark_target_layer_ids
    _require(bool(taps), "dspark_target_layer_ids", taps, "must name at least one layer with draft blocks")
    chosen, experts = config.dspark_num_experts_per_tok, config.dspark_n_routed_experts
    rule = f"must be at most dspark_n_routed_experts = {experts}"
    _require(chosen <= experts, "dspark_num_experts_per_tok", chosen, rule)


def _check_rope_scaling(config: ModelConfig) -> None:
    scaling = config.rope_scaling
    check_types(scaling, "rope_scaling.")
    _require(scaling.rope_type == "yarn", "rope_scaling.rope_type", scaling.rope_type, "must be 'yarn'")
    for key in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
        _require(getattr(scaling, key) > 0, f"rope_scaling.{key}", getattr(scaling, key), "must be above 0")
    rule = f"must be at least beta_slow = {scaling.beta_slow}"
    _require(scaling.beta_fast >= scaling.beta_slow, "rope_scaling.beta_fast", scaling.beta_fast, rule)
    # The ramp divides by the logarithm of the base.
    base = config.compress_rope_theta
    _require(base > 1, "compress_rope_theta", base, "must be above 1 with rope_scaling")


def _check_vision(vision: VisionConfig) -> None:
    name = "vision_config."
    check_types(vision, name)
    for f in fields(vision):
        value = getattr(vision, f.name)
        if value is not None and f.name != "min_pixels":
            _require(value > 0, name + f.name, value, "must be above 0")
    _require(vision.min_pixels >= 0, name + "min_pixels", vision.min_pixels, "must not be negative")
    heads, width = vision.num_attention_heads, vision.hidden_size
    rule = f"times 4 must divide vision_config.hidden_size = {width} (rows and columns are rotated in pairs)"
    _require(width % (4 * heads) == 0, name + "num_attention_heads", heads, rule)
    tokens = vision.max_image_tokens
    _require(tokens >= 4, name + "max_image_tokens", tokens, "must be at least 4: START, one patch, NEW_LINE, END")
