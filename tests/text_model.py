"""A tiny model that reads and writes text: random weights, a byte-level tokenizer, released-format folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from dsv41_jax.engram_layout import derive_layout
from dsv41_jax.token_map import compressed_token_map
from random_configs import random_legal_config
from random_models import write_model

SPECIAL = ("<bos>", "<eos>", "<pad>")
LAST = ("<image>", "<noise>")
MERGES = (("h", "e"), ("t", "he"), ("a", "n"), ("Ġ", "the"))


def byte_tokenizer() -> tokenizers.Tokenizer:
    """The three special tokens, the 256 bytes, a few merges, then an image and a noise token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL, *letters, *("".join(pair) for pair in MERGES), *LAST]
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in (*SPECIAL, *LAST)])
    return backend


def text_config() -> dict[str, Any]:
    """Three layers (a ratio-2 source, a ratio-1 source with a pool, Reindex), each with Engram; no draft blocks."""
    config, vocab = random_legal_config(25), byte_tokenizer().get_vocab_size()
    compressed = int(compressed_token_map(byte_tokenizer()).max()) + 1
    text = config["text_config"]
    layout = derive_layout(
        tuple(text["engram_layer_ids"]),
        text["engram_max_ngram_size"],
        text["engram_vocab_size"],
        text["engram_n_heads"],
        compressed,
    )
    text |= {
        "vocab_size": vocab,
        "max_position_embeddings": 1024,
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
        "dspark_noise_token_id": vocab - 1,
        "compress_ratios": text["compress_ratios"][: text["num_hidden_layers"]],
        "engram_num_embeddings": list(layout.table_rows),
        "engram_compressed_vocab_size": compressed,
    }
    return config | {"image_token_id": vocab - 2}


def write_text_model(folder: Path, seed: int = 0, **changes: int) -> None:
    """`config.json`, `model.safetensors` and `tokenizer.json` in `folder`; `changes` of the text configuration."""
    config = text_config()
    config["text_config"] |= changes
    write_model(folder, config, seed)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
