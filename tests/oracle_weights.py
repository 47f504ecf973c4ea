"""Weights for the slow oracle: read a safetensors file, dequantise released storage kinds, make random weights.

Storage kinds (released checkpoint): F8+S = float8_e4m3fn [out, in] with float8_e8m0fnu [out/32, in/32]; F4+S = int8
[out, in/2] (two e2m1 codes a byte, low nibble = even input) with float8_e8m0fnu [out, in/32]; an Engram table is
float8_e4m3fn [rows, width] with float8_e8m0fnu [rows, width/32]; everything else is bfloat16 or float32.
"""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

BLOCK = 32
E4M3, E8M0, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_STORED = {
    "BF16": BF16, "F8_E4M3": E4M3, "F8_E8M0": E8M0, "F64": np.float64, "F32": np.float32, "I8": np.int8, "U8": np.uint8,
    "I32": np.int32, "I64": np.int64, "BOOL": np.bool_,
}  # fmt: skip


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """All tensors of a safetensors file as numpy arrays (ml_dtypes for bf16 and fp8), raw storage values."""
    blob = Path(path).read_bytes()
    (header_size,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + header_size])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + header_size + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(blob[begin:end], _STORED[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def write_safetensors(path: str | Path, tensors: dict[str, np.ndarray]) -> None:
    """Write raw arrays (the dtypes `read_safetensors` knows) as one safetensors file."""
    names = {np.dtype(dtype): name for name, dtype in _STORED.items()}
    header, chunks, offset = {}, [], 0
    for name, array in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        chunks.append(data)
        offset += len(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(head)) + head + b"".join(chunks))


def _power_of_two(scale: np.ndarray) -> np.ndarray:
    """float8_e8m0fnu -> float64: 2^(code-127)."""
    return np.ldexp(1.0, scale.view(np.uint8).astype(np.int64) - 127)


def dequantise_one(weight: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """One stored tensor as float64: [out, in] for packed fp4, the stored shape otherwise."""
    if scale is None:
        return weight.astype(np.float64)
    if weight.dtype == np.int8:
        codes = weight.view(np.uint8)
        pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
        values, row_block = E2M1_VALUES[pairs], 1
    else:
        values = weight.astype(np.float64)
        row_block = 1 if scale.shape[0] == weight.shape[0] else BLOCK
    factors = np.repeat(np.repeat(_power_of_two(scale), row_block, 0), BLOCK, 1)
    return values * factors[: values.shape[0], : values.shape[1]]


def dequantise(raw: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Released tensors -> {name: float64 array}; the `.scale` entries are used up and disappear."""
    scales = {name[: -len(".scale")] for name in raw if name.endswith(".scale")}
    weights = {}
    for name, array in raw.items():
        stem, _, leaf = name.rpartition(".")
        if leaf != "scale":
            weights[name] = dequantise_one(array, raw[stem + ".scale"] if leaf == "weight" and stem in scales else None)
    return weights


def _e8m0(amax: np.ndarray, largest_code: float) -> np.ndarray:
    """Smallest power of two that keeps amax/scale within the code range, as float8_e8m0fnu."""
    exponent = np.ceil(np.log2(np.maximum(amax, 1e-30) / largest_code)).astype(np.int64)
    return (exponent + 127).astype(np.uint8).view(E8M0)


def store_fp8(values: np.ndarray, row_block: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """float [out, in] -> (float8_e4m3fn [out, in], float8_e8m0fnu [ceil(out/row_block), in/32])."""
    out, inner = values.shape
    padded = np.pad(values, ((0, -out % row_block), (0, 0)))
    blocks = padded.reshape(-1, row_block, inner // BLOCK, BLOCK)
    scale = _e8m0(np.abs(blocks).max(axis=(1, 3)), 448.0)
    codes = (blocks / _power_of_two(scale)[:, None, :, None]).reshape(padded.shape)[:out]
    return np.clip(codes, -448, 448).astype(np.float32).astype(E4M3), scale


def store_fp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float [out, in] -> (int8 [out, in/2], float8_e8m0fnu [out, in/32])."""
    out, inner = values.shape
    blocks = values.reshape(out, inner // BLOCK, BLOCK)
    scale = _e8m0(np.abs(blocks).max(axis=-1), 6.0)
    scaled = np.clip(blocks / _power_of_two(scale)[..., None], -6, 6).reshape(out, inner)
    codes = scaled.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    nibbles = (np.abs(codes)[..., None] == E2M1_VALUES[:8]).argmax(-1).astype(np.uint8)
    nibbles |= np.where(np.signbit(codes), 8, 0).astype(np.uint8)
    return (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).view(np.int8), scale


class _Maker:
    """Draws tensors in released storage types into one dict."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.tensors: dict[str, np.ndarray] = {}

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape)

    def bf16(self, name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        self.tensors[name] = (mean + std * self.normal(*shape)).astype(np.float32).astype(BF16)

    def f32(self, name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        self.tensors[name] = (mean + std * self.normal(*shape)).astype(np.float32)

    def norm(self, name: str, size: int) -> None:
        self.bf16(name, size, std=0.1, mean=1.0)

    def fp8(self, name: str, out: int, inner: int, gain: float = 1.0) -> None:
        # Row blocks of different size, so that a reader that mixes up scales fails.
        spread = np.repeat(np.exp2(self.rng.integers(-1, 2, -(-out // BLOCK))), BLOCK)[:out, None]
        values = gain * inner**-0.5 * spread / np.sqrt(1.75) * self.normal(out, inner)
        self.tensors[name + ".weight"], self.tensors[name + ".scale"] = store_fp8(values)

    def fp4(self, name: str, out: int, inner: int, gain: float = 1.0) -> None:
        values = gain * inner**-0.5 * self.normal(out, inner)
        self.tensors[name + ".weight"], self.tensors[name + ".scale"] = store_fp4(values)


def _block(make: _Maker, text: dict, prefix: str, n_experts: int) -> None:
    """What every block owns: attention without compressor, norms, hyper-connections, MoE."""
    dim, heads, head_dim = text["hidden_size"], text["num_attention_heads"], text["head_dim"]
    q_rank, o_width, streams = text["q_lora_rank"], text["o_groups"] * text["o_lora_rank"], text["hc_mult"]
    mixes = (2 + streams) * streams
    for sub in ("attn", "ffn"):
        make.norm(f"{prefix}.{sub}_norm.weight", dim)
        make.f32(f"{prefix}.hc_{sub}_fn", mixes, streams * dim, std=(streams * dim) ** -0.5)
        make.f32(f"{prefix}.hc_{sub}_base", mixes, std=0.6, mean=0.1)
        make.f32(f"{prefix}.hc_{sub}_scale", 3, std=0.08, mean=0.8)
    make.f32(f"{prefix}.attn.attn_sink", heads, std=0.8)
    make.fp8(f"{prefix}.attn.wq_a", q_rank, dim)
    make.norm(f"{prefix}.attn.q_norm.weight", q_rank)
    make.fp8(f"{prefix}.attn.wq_b", heads * head_dim, q_rank, gain=1.3)
    make.fp8(f"{prefix}.attn.wkv", head_dim, dim)
    make.norm(f"{prefix}.attn.kv_norm.weight", head_dim)
    make.fp8(f"{prefix}.attn.wo_a", o_width, heads * head_dim // text["o_groups"], gain=2.0)
    make.fp8(f"{prefix}.attn.wo_b", dim, o_width, gain=0.3)
    inner = text["moe_intermediate_size"]
    make.bf16(f"{prefix}.ffn.gate.weight", n_experts, dim, std=1.5 * dim**-0.5)
    make.f32(f"{prefix}.ffn.gate.bias", n_experts, std=0.15)
    make.f32(f"{prefix}.ffn.gate.bias_vl", n_experts, std=0.4)
    # w1 and w3 reach the swiglu clamp; w2 (like wo_b) is small so that layers do not drown each other.
    shapes = (("w1", inner, dim, 1.5), ("w3", inner, dim, 1.5), ("w2", dim, inner, 0.3))
    for expert in range(n_experts):
        for leaf, out, into, gain in shapes:
            make.fp4(f"{prefix}.ffn.experts.{expert}.{leaf}", out, into, gain)
    for leaf, out, into, gain in shapes:
        make.fp8(f"{prefix}.ffn.shared_experts.{leaf}", out, into, gain)


def _sources(make: _Maker, text: dict, layer: int) -> None:
    """Compressor of a KV source and indexer of an index source."""
    dim, head_dim, index_dim, heads = (
        text[k] for k in ("hidden_size", "head_dim", "index_head_dim", "index_n_heads")
    )  # fmt: skip
    attn = f"layers.{layer}.attn"
    if layer in text["kv_source_layer_ids"]:
        make.bf16(f"{attn}.compressor.wkv.weight", head_dim, dim, std=dim**-0.5)
        if text["compress_ratios"][layer] > 1:
            make.bf16(f"{attn}.compressor.wgate.weight", head_dim, dim, std=1.5 * dim**-0.5)
        make.norm(f"{attn}.compressor.norm.weight", head_dim)
        make.bf16(f"{attn}.indexer.wk.weight", index_dim, head_dim, std=head_dim**-0.5)
        make.norm(f"{attn}.indexer.k_norm.weight", index_dim)
    if layer in text["index_source_layer_ids"]:
        make.fp8(f"{attn}.indexer.wq_b", heads * index_dim, text["q_lora_rank"])
        # A positive mean: mostly but not always positive head weights, so that scores of both signs occur.
        make.bf16(f"{attn}.indexer.weights_proj.weight", heads, dim, std=dim**-0.5, mean=0.3 * dim**-0.5)


def _vision(make: _Maker, config: dict) -> None:
    vision, dim = config["vision_config"], config["text_config"]["hidden_size"]
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    patch = 3 * vision["patch_size"] ** 2
    make.bf16("vision.patch_embed.proj.weight", width, patch, std=patch**-0.5)
    make.bf16("vision.patch_embed.proj.bias", width, std=0.1)
    for block in range(vision["num_hidden_layers"]):
        prefix = f"vision.blocks.{block}"
        make.norm(f"{prefix}.norm1.weight", width)
        make.norm(f"{prefix}.norm2.weight", width)
        make.bf16(f"{prefix}.attn.wqkv.weight", 3 * width, width, std=width**-0.5)
        make.bf16(f"{prefix}.attn.wqkv.bias", 3 * width, std=0.1)
        make.bf16(f"{prefix}.attn.wo.weight", width, width, std=width**-0.5)
        make.bf16(f"{prefix}.attn.wo.bias", width, std=0.1)
        make.bf16(f"{prefix}.mlp.w1.weight", 2 * inner, width, std=width**-0.5)
        make.bf16(f"{prefix}.mlp.w2.weight", width, inner, std=inner**-0.5)
    make.norm("vision.norm.weight", width)
    cells = width * vision["downsample_ratio"] ** 2
    make.bf16("aligner.w1.weight", dim, cells, std=cells**-0.5)
    make.bf16("aligner.w1.bias", dim, std=0.1)
    make.bf16("aligner.w2.weight", dim, dim, std=1.5 * dim**-0.5)
    make.bf16("aligner.w2.bias", dim, std=0.1)
    for name in ("image_start", "image_end", "image_newline"):
        make.bf16(name, dim, std=1.0)


def random_weights(config: dict, seed: int) -> dict[str, np.ndarray]:
    """Random weights of the released names, shapes and storage types for a released-layout config dict.

    Magnitudes make every mechanism matter: sinks and hyper-connection bases vary, router scores spread, selection
    biases flip choices, the swiglu clamp bites at a limit of about 1.5. Vision tensors only when the config has a
    `vision_config`; `engram_num_embeddings` must hold what `oracle_engram.table_rows` gives.
    """
    text, make = config["text_config"], _Maker(seed)
    dim, vocab, streams = text["hidden_size"], text["vocab_size"], text["hc_mult"]
    make.bf16("embed.weight", vocab, dim, std=1.0)
    make.bf16("head.weight", vocab, dim, std=2.0 * dim**-0.5)
    make.norm("norm.weight", dim)
    for layer in range(text["num_hidden_layers"]):
        _block(make, text, f"layers.{layer}", text["n_routed_experts"])
        _sources(make, text, layer)
    columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    for layer, rows in zip(text["engram_layer_ids"], text["engram_num_embeddings"], strict=True):
        prefix, width = f"layers.{layer}.engram", text["engram_head_dim"]
        table = store_fp8(make.normal(rows, width), row_block=1)
        make.tensors[f"{prefix}.embed.weight"], make.tensors[f"{prefix}.embed.scale"] = table
        make.fp8(f"{prefix}.wkv", dim * (streams + 1), columns * width, gain=0.5)
        make.bf16(f"{prefix}.q_weight", streams, dim, std=0.2, mean=1.0)
        make.bf16(f"{prefix}.k_weight", streams, dim, std=0.2, mean=1.0)
    drafts, rank = text["num_nextn_predict_layers"], text["dspark_markov_rank"]
    for draft in range(drafts):
        _block(make, text, f"mtp.{draft}", text["dspark_n_routed_experts"])
    if drafts:
        make.fp8("mtp.0.main_proj", dim, len(text["dspark_target_layer_ids"]) * dim)
        make.norm("mtp.0.main_norm.weight", dim)
        last = f"mtp.{drafts - 1}"
        make.norm(f"{last}.norm.weight", dim)
        make.bf16(f"{last}.markov_head.embed.weight", vocab, rank, std=1.0)
        make.bf16(f"{last}.markov_head.head.weight", vocab, rank, std=rank**-0.5)
        make.bf16(f"{last}.confidence_head.proj.weight", 1, dim + rank, std=(dim + rank) ** -0.5)
    if config.get("vision_config"):
        _vision(make, config)
    return make.tensors
