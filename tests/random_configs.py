"""Random legal configurations, tiny: any layer map the rules allow, for oracles and property tests."""

from __future__ import annotations

import random
from typing import Any

from dsv41_jax.engram_layout import derive_layout


def random_legal_config(seed: int) -> dict[str, Any]:
    """A legal `config.json` as a dict (released nested layout, no vision). The same seed gives the same configuration.

    3..7 layers of width 32..96; windows anywhere, ratios 0, 1, 2 in any order, with or without candidates, Engram
    layers, drafts, YaRN; hc_mult 2..4. Seeds in a row have 0, 1, 2, 3 drafts; every sixteenth (11, 27, ...) has no KV
    source at all.
    """
    rng = random.Random(seed)
    vocab = rng.choice([64, 96, 128])
    text = _widths(rng, vocab)
    text.update(_layer_map(rng, windows_only=seed % 16 == 11))
    text.update(_engram(rng, text["num_hidden_layers"], vocab))
    text.update(_drafts(rng, seed % 4, text["num_hidden_layers"], vocab))
    # The list of ratios may stop at the backbone or name the draft blocks too.
    if rng.random() < 0.7:
        text["compress_ratios"] = text["compress_ratios"] + [0] * text["num_nextn_predict_layers"]
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": vocab - 2,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
    }


def _widths(rng: random.Random, vocab: int) -> dict[str, Any]:
    heads = rng.choice([2, 4])
    groups = rng.choice([g for g in (1, 2, 4) if heads % g == 0])
    experts = rng.randint(3, 6)
    return {
        "model_type": "deepseek_v41_text",
        "vocab_size": vocab,
        "hidden_size": rng.choice([32, 64, 96]),
        "moe_intermediate_size": rng.choice([32, 64]),
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": rng.choice([32, 64]),
        "qk_rope_head_dim": rng.choice([8, 16]),
        "q_lora_rank": rng.choice([32, 64]),
        "o_lora_rank": rng.choice([32 // groups, 32]),
        "o_groups": groups,
        "hidden_act": "silu",
        "swiglu_limit": rng.choice([0.0, 1.5, 10.0]),
        "rms_norm_eps": 1e-20,
        "max_position_embeddings": 256,
        "rope_theta": 10000,
        "rope_scaling": _rope_scaling(rng),
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": rng.randint(1, 3),
        "scoring_func": rng.choice(["sqrtsoftplus", "sqrtsoftplus", "softmax", "sigmoid"]),
        "norm_topk_prob": rng.random() < 0.75,
        "routed_scaling_factor": rng.choice([1.0, 1.5]),
        "sliding_window": rng.randint(3, 12),
        "compress_rope_theta": 160000,
        "index_n_heads": rng.randint(1, 4),
        "index_head_dim": rng.choice([32, 64]),
        "hc_mult": rng.randint(2, 4),
        "hc_sinkhorn_iters": rng.choice([1, 3, 20]),
        "hc_eps": 1e-06,
    }


def _rope_scaling(rng: random.Random) -> dict[str, Any] | None:
    if rng.random() < 0.2:
        return None
    return {
        "rope_type": "yarn",
        "factor": rng.choice([4, 16]),
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": rng.choice([16, 64]),
    }


def _layer_map(rng: random.Random, windows_only: bool) -> dict[str, Any]:
    """Layer by layer: a window, a new KV source, or (once there is a source) a Reindex or Reuse layer."""
    layers = rng.randint(3, 7)
    weights = [1, 0, 0, 0] if windows_only else [0.22, 0.24, 0.24, 0.3]
    ratios, kv, index = [], [], []
    for layer in range(layers):
        kind = rng.choices(["window", "full", "reindex", "reuse"], weights)[0]
        if kind == "window":
            ratios.append(0)
        elif kind == "full" or not kv:
            kv.append(layer)
            index.append(layer)
            ratios.append(rng.choice([1, 2]))
        else:
            ratios.append(ratios[kv[-1]])
            if kind == "reindex":
                index.append(layer)
    topk = rng.randint(2, 8)
    found: dict[str, Any] = {
        "num_hidden_layers": layers,
        "compress_ratios": ratios,
        "kv_source_layer_ids": kv,
        "index_source_layer_ids": index,
        "index_topk": topk,
        "candidate_source_layer_id": None,
        "candidate_topk_blocks": 0,
        "candidate_block_size": 0,
    }
    if kv and rng.random() < 0.6:
        size = rng.randint(1, 4)
        # The fewest blocks that can still fill the selection, or one more: the pool restricts early.
        blocks = -(-(topk + size - 1) // size) + rng.randint(0, 1)
        found.update(candidate_source_layer_id=kv[-1], candidate_topk_blocks=blocks, candidate_block_size=size)
    return found


def _engram(rng: random.Random, layers: int, vocab: int) -> dict[str, Any]:
    ids = sorted(rng.sample(range(layers), rng.choice([0, 1, 1, 2, 3])))
    order, smallest, heads = rng.randint(2, 4), rng.randint(7, 60), rng.randint(1, 2)
    compressed = rng.randint(vocab // 2, vocab)
    return {
        "engram_layer_ids": ids,
        "engram_num_embeddings": list(derive_layout(tuple(ids), order, smallest, heads, compressed).table_rows),
        "engram_max_ngram_size": order,
        "engram_vocab_size": smallest,
        "engram_n_heads": heads,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": compressed,
    }


def _drafts(rng: random.Random, drafts: int, layers: int, vocab: int) -> dict[str, Any]:
    experts = rng.randint(2, 4)
    return {
        "num_nextn_predict_layers": drafts,
        "dspark_block_size": rng.randint(1, 5),
        "dspark_noise_token_id": vocab - 1,
        "dspark_target_layer_ids": sorted(rng.sample(range(layers), rng.randint(1, 3))) if drafts else [],
        "dspark_markov_rank": rng.choice([16, 32]),
        "dspark_n_routed_experts": experts,
        "dspark_num_experts_per_tok": rng.randint(1, 2),
    }
