"""Released-format folders with random weights, and what is needed to load them: for tests of whole models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import dsv41_jax as ds
from oracle_weights import random_weights, write_safetensors
from random_configs import random_legal_config


def random_token_map(config: dict[str, Any], seed: int) -> np.ndarray:
    """A legal token map for a config.json dict: int32 [vocab], every compressed id is met, in no order."""
    text, rng = config["text_config"], np.random.default_rng(seed)
    vocab, compressed = text["vocab_size"], text["engram_compressed_vocab_size"]
    extra = rng.integers(0, compressed, vocab - compressed)
    return rng.permutation(np.concatenate([np.arange(compressed), extra])).astype(np.int32)


def write_model(folder: Path, config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Write `config.json` and `model.safetensors` with random weights into `folder`; return the released tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_weights(config, seed)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return tensors


def load_random(folder: Path, seed: int) -> ds.Model:
    """A small model of a random legal layer map in float32, written to `folder`; prefills in blocks of 16 tokens."""
    config = random_legal_config(seed)
    write_model(folder, config, seed)
    model = ds.load(folder, numerics="float32", token_map=random_token_map(config, seed))
    model._runner.prefill_block = 16
    return model
