"""A model just big enough to be trained in a test: two layers, every mechanism but vision."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dsv41_jax.checkpoint.names import flatten, nest
from dsv41_jax.checkpoint.released import abstract_params
from dsv41_jax.config import ModelConfig, load_config
from dsv41_jax.engram_layout import derive_layout
from dsv41_jax.numerics import FLOAT32
from dsv41_jax.training.windows import Windows

VOCAB = 64


def tiny_training_config() -> ModelConfig:
    """Full (ratio 2, builds the pool), Reindex, one draft block."""
    released = load_config(Path(__file__).parents[1] / "configs/tiny.py").to_json()
    released.pop("vision_config")
    released["image_token_id"] = VOCAB - 2
    rows = derive_layout((0,), 3, 40, 1, VOCAB).table_rows
    released["text_config"] |= {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 32,
        "q_lora_rank": 32,
        "n_routed_experts": 4,
        "sliding_window": 8,
        "compress_ratios": [2, 2, 0],
        "kv_source_layer_ids": [0],
        "index_source_layer_ids": [0, 1],
        "index_n_heads": 2,
        "index_topk": 4,
        "candidate_source_layer_id": 0,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 2,
        "hc_sinkhorn_iters": 4,
        "engram_layer_ids": [0],
        "engram_num_embeddings": list(rows),
        "engram_max_ngram_size": 3,
        "engram_vocab_size": 40,
        "engram_n_heads": 1,
        "engram_compressed_vocab_size": VOCAB,
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 3,
        "dspark_noise_token_id": 3,
        "dspark_target_layer_ids": [0, 1],
        "dspark_markov_rank": 32,
    }
    return ModelConfig.from_json(released)


def tiny_windows(config: ModelConfig, batch: int = 2, length: int = 24, seed: int = 5) -> Windows:
    """Windows over 1,000 random tokens, with a BOS now and then."""
    tokens = np.random.default_rng(0).integers(4, VOCAB, 1000).astype(np.uint16)
    tokens[::37] = config.bos_token_id
    return Windows(tokens, config, np.arange(VOCAB), batch, length, seed)


def tiny_params(config: ModelConfig, seed: int = 0) -> dict:
    """Random parameters with nothing left at zero, so that every part has an effect. No compilation."""
    rng = np.random.default_rng(seed)

    def make(path: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
        gain = path[-1] == "weight" and path[-2].endswith("norm") or path[-1] in ("q_weight", "k_weight")
        return np.float32(gain) + rng.standard_normal(shape, np.float32) * np.float32(0.1)

    return nest({path: make(path, leaf.shape) for path, leaf in flatten(abstract_params(config, FLOAT32))})
