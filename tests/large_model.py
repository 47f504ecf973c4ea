"""A model far larger than the memory that handling it may take: a sparse file, of zeros but for a few bytes."""

import json
from pathlib import Path

from dsv41_jax.checkpoint.manifest import manifest
from dsv41_jax.checkpoint.safetensors_file import file_head, read_header
from dsv41_jax.checkpoint.save_released import FILE_METADATA
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_layout import derive_layout

# {tensor: offset of the byte 0x35 in it}
SPARSE = {"layers.9.ffn.experts.31.w1.weight": 7, "embed.weight": 123_456_789, "layers.4.engram.embed.weight": 99}


def write_large_model(golden: Path, folder: Path) -> None:
    """Tiny model A, widened to 2.6 GB, as a released-format folder: three leaves of 500 MB, two tensors of over 300."""
    config = json.loads((golden / "tinyA_config.json").read_text())
    text = config["text_config"]
    text |= {"vocab_size": 160_000, "hidden_size": 1024, "moe_intermediate_size": 1024, "n_routed_experts": 96}
    text |= {"engram_vocab_size": 500_000, "engram_compressed_vocab_size": 150_000}
    layout = derive_layout((1, 4), text["engram_max_ngram_size"], 500_000, text["engram_n_heads"], 150_000)
    text["engram_num_embeddings"] = list(layout.table_rows)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    specs = list(manifest(ModelConfig.from_json(folder)).values())
    head = file_head([(s.name, s.dtype, s.shape) for s in specs], FILE_METADATA)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(head)
        file.truncate(len(head) + sum(spec.nbytes for spec in specs))
    entries, _ = read_header(folder / "model.safetensors")
    with open(folder / "model.safetensors", "r+b") as file:
        for name, at in SPARSE.items():
            file.seek(entries[name].offset + at)
            file.write(b"\x35")
