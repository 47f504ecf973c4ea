"""Every tensor of a released-format checkpoint, from the configuration alone: name, storage dtype, shape.

The released configuration gives 96,085 tensors and 510,286,023,000 bytes. Readers compare files with this list before
they read anything large; writers follow it. Names carry no `model.` prefix.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dsv41_jax.config import ModelConfig, VisionConfig

Kind = Literal["bf16", "f32", "fp8", "fp8_scale", "fp4", "fp4_scale", "table", "table_scale"]

# Kind -> dtype as safetensors spells it. A "table" is an Engram table: FP8 with scales per row instead of per block.
KIND_DTYPE: dict[Kind, str] = {
    "bf16": "BF16",
    "f32": "F32",
    "fp8": "F8_E4M3",
    "fp8_scale": "F8_E8M0",
    "fp4": "I8",
    "fp4_scale": "F8_E8M0",
    "table": "F8_E4M3",
    "table_scale": "F8_E8M0",
}
DTYPE_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
_BLOCK = 32  # one weight scale per 32 inputs (and per 32 outputs for dense FP8)
_PATCH_CHANNELS = 3


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor. `shape` is as stored: FP4 packs two inputs a byte, so its last axis is half as long."""

    name: str
    kind: Kind
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """Storage dtype in safetensors spelling."""
        return KIND_DTYPE[self.kind]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Shape in numbers: FP4 unpacked, everything else as stored."""
        return (*self.shape[:-1], 2 * self.shape[-1]) if self.kind == "fp4" else self.shape

    @property
    def parameters(self) -> int:
        """Numbers this tensor adds to the model's parameter count; scales add none."""
        return 0 if self.kind.endswith("_scale") else math.prod(self.logical_shape)


@dataclass(frozen=True)
class ManifestTotals:
    """Sums over a manifest; `bytes_by_dtype` is keyed by the safetensors spelling."""

    tensors: int
    nbytes: int
    parameters: int
    bytes_by_dtype: dict[str, int]


def iter_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """All tensors in model order: embedding, layers, final norm and head, draft blocks, vision."""
    hidden = config.hidden_size
    yield TensorSpec("embed.weight", "bf16", (config.vocab_size, hidden))
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        yield from _block(config, prefix, config.n_routed_experts)
        yield from _sources(config, layer, prefix + "attn.")
        if layer in config.engram_layer_ids:
            yield from _engram(config, layer, prefix + "engram.")
    yield TensorSpec("norm.weight", "bf16", (hidden,))
    yield TensorSpec("head.weight", "bf16", (config.vocab_size, hidden))
    for block in range(config.n_draft):
        yield from _draft(config, block)
    if config.vision is not None:
        yield from _vision(config.vision)
        yield from _aligner(config.vision, hidden)
        for name in ("image_start", "image_end", "image_newline"):
            yield TensorSpec(name, "bf16", (hidden,))


def manifest(config: ModelConfig) -> dict[str, TensorSpec]:
    """`iter_tensors` as a dict by name, same order."""
    return {spec.name: spec for spec in iter_tensors(config)}


def totals(config: ModelConfig) -> ManifestTotals:
    """Counts and bytes of the whole checkpoint (payload, without headers)."""
    tensors = nbytes = parameters = 0
    by_dtype: Counter[str] = Counter()
    for spec in iter_tensors(config):
        tensors += 1
        nbytes += spec.nbytes
        parameters += spec.parameters
        by_dtype[spec.dtype] += spec.nbytes
    return ManifestTotals(tensors, nbytes, parameters, dict(by_dtype))


def _fp8(name: str, out: int, inner: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", "fp8", (out, inner))
    yield TensorSpec(f"{name}.scale", "fp8_scale", (out // _BLOCK, inner // _BLOCK))


def _fp4(name: str, out: int, inner: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", "fp4", (out, inner // 2))
    yield TensorSpec(f"{name}.scale", "fp4_scale", (out, inner // _BLOCK))


def _block(config: ModelConfig, prefix: str, experts: int) -> Iterator[TensorSpec]:
    """What every backbone layer and every draft block has."""
    hidden, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
    attn, ffn, inter = prefix + "attn.", prefix + "ffn.", config.moe_intermediate_size
    grouped = config.o_groups * config.o_lora_rank
    yield TensorSpec(prefix + "attn_norm.weight", "bf16", (hidden,))
    yield TensorSpec(prefix + "ffn_norm.weight", "bf16", (hidden,))
    mixes = (2 + config.hc_mult) * config.hc_mult
    for sublayer in ("hc_attn", "hc_ffn"):
        yield TensorSpec(f"{prefix}{sublayer}_fn", "f32", (mixes, config.hc_mult * hidden))
        yield TensorSpec(f"{prefix}{sublayer}_base", "f32", (mixes,))
        yield TensorSpec(f"{prefix}{sublayer}_scale", "f32", (3,))
    yield TensorSpec(attn + "attn_sink", "f32", (heads,))
    yield from _fp8(attn + "wq_a", config.q_lora_rank, hidden)
    yield TensorSpec(attn + "q_norm.weight", "bf16", (config.q_lora_rank,))
    yield from _fp8(attn + "wq_b", heads * width, config.q_lora_rank)
    yield from _fp8(attn + "wkv", width, hidden)
    yield TensorSpec(attn + "kv_norm.weight", "bf16", (width,))
    yield from _fp8(attn + "wo_a", grouped, heads * width // config.o_groups)
    yield from _fp8(attn + "wo_b", hidden, grouped)
    yield TensorSpec(ffn + "gate.weight", "bf16", (experts, hidden))
    yield TensorSpec(ffn + "gate.bias", "f32", (experts,))
    yield TensorSpec(ffn + "gate.bias_vl", "f32", (experts,))
    for expert in range(experts):
        yield from _fp4(f"{ffn}experts.{expert}.w1", inter, hidden)
        yield from _fp4(f"{ffn}experts.{expert}.w2", hidden, inter)
        yield from _fp4(f"{ffn}experts.{expert}.w3", inter, hidden)
    yield from _fp8(ffn + "shared_experts.w1", inter, hidden)
    yield from _fp8(ffn + "shared_experts.w2", hidden, inter)
    yield from _fp8(ffn + "shared_experts.w3", inter, hidden)


def _sources(config: ModelConfig, layer: int, attn: str) -> Iterator[TensorSpec]:
    """Compressor and index keys of a KV source, index queries of an index source.

    The ratio does not say who owns a compressor, only which kind of cache a layer reads. Ratio 1 has no gate.
    """
    hidden, width, key = config.hidden_size, config.head_dim, config.index_head_dim
    if layer in config.kv_source_layer_ids:
        yield TensorSpec(attn + "compressor.wkv.weight", "bf16", (width, hidden))
        if config.compress_ratios[layer] > 1:
            yield TensorSpec(attn + "compressor.wgate.weight", "bf16", (width, hidden))
        yield TensorSpec(attn + "compressor.norm.weight", "bf16", (width,))
        yield TensorSpec(attn + "indexer.wk.weight", "bf16", (key, width))
        yield TensorSpec(attn + "indexer.k_norm.weight", "bf16", (key,))
    if layer in config.index_source_layer_ids:
        yield from _fp8(attn + "indexer.wq_b", config.index_n_heads * key, config.q_lora_rank)
        yield TensorSpec(attn + "indexer.weights_proj.weight", "bf16", (config.index_n_heads, hidden))


def _engram(config: ModelConfig, layer: int, prefix: str) -> Iterator[TensorSpec]:
    rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
    width, copies, hidden = config.engram_head_dim, config.hc_mult, config.hidden_size
    yield TensorSpec(prefix + "embed.weight", "table", (rows, width))
    yield TensorSpec(prefix + "embed.scale", "table_scale", (rows, width // _BLOCK))
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    yield from _fp8(prefix + "wkv", hidden * (copies + 1), columns * width)
    yield TensorSpec(prefix + "q_weight", "bf16", (copies, hidden))
    yield TensorSpec(prefix + "k_weight", "bf16", (copies, hidden))


def _draft(config: ModelConfig, block: int) -> Iterator[TensorSpec]:
    prefix, hidden, rank = f"mtp.{block}.", config.hidden_size, config.dspark_markov_rank
    yield from _block(config, prefix, config.dspark_n_routed_experts)
    if block == 0:
        yield from _fp8(prefix + "main_proj", hidden, len(config.taps) * hidden)
        yield TensorSpec(prefix + "main_norm.weight", "bf16", (hidden,))
    if block == config.n_draft - 1:
        yield TensorSpec(prefix + "norm.weight", "bf16", (hidden,))
        yield TensorSpec(prefix + "markov_head.embed.weight", "bf16", (config.vocab_size, rank))
        yield TensorSpec(prefix + "markov_head.head.weight", "bf16", (config.vocab_size, rank))
        yield TensorSpec(prefix + "confidence_head.proj.weight", "bf16", (1, hidden + rank))


def _vision(vision: VisionConfig) -> Iterator[TensorSpec]:
    width, inter = vision.hidden_size, vision.intermediate_size
    yield TensorSpec("vision.patch_embed.proj.weight", "bf16", (width, _PATCH_CHANNELS * vision.patch_size**2))
    yield TensorSpec("vision.patch_embed.proj.bias", "bf16", (width,))
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}."
        yield TensorSpec(prefix + "norm1.weight", "bf16", (width,))
        yield TensorSpec(prefix + "attn.wqkv.weight", "bf16", (3 * width, width))
        yield TensorSpec(prefix + "attn.wqkv.bias", "bf16", (3 * width,))
        yield TensorSpec(prefix + "attn.wo.weight", "bf16", (width, width))
        yield TensorSpec(prefix + "attn.wo.bias", "bf16", (width,))
        yield TensorSpec(prefix + "norm2.weight", "bf16", (width,))
        yield TensorSpec(prefix + "mlp.w1.weight", "bf16", (2 * inter, width))
        yield TensorSpec(prefix + "mlp.w2.weight", "bf16", (width, inter))
    yield TensorSpec("vision.norm.weight", "bf16", (width,))


def _aligner(vision: VisionConfig, hidden: int) -> Iterator[TensorSpec]:
    yield TensorSpec("aligner.w1.weight", "bf16", (hidden, vision.hidden_size * vision.downsample_ratio**2))
    yield TensorSpec("aligner.w1.bias", "bf16", (hidden,))
    yield TensorSpec("aligner.w2.weight", "bf16", (hidden, hidden))
    yield TensorSpec("aligner.w2.bias", "bf16", (hidden,))
