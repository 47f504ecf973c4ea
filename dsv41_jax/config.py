"""ModelConfig: the facts of a DeepSeek-V4.1 model, frozen and hashable, read from the released `config.json`.

Attribute names are the released keys. A configuration is validated when it is made (`config_rules.py`) and can be
written back as it was read (`config_json.py` knows the two JSON layouts).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dsv41_jax import config_json, config_rules
from dsv41_jax.config_json import ConfigError
from dsv41_jax.config_unsupported import check_unsupported
from dsv41_jax.engram_layout import EngramLayout, engram_layout

__all__ = [
    "ConfigError",
    "ModelConfig",
    "QuantizationConfig",
    "RopeScaling",
    "VisionConfig",
    "from_config_dict",
    "load_config",
]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """YaRN scaling of the rotation of every layer with a ratio above 0."""

    rope_type: str
    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Storage formats of the checkpoint; only the released values are understood."""

    quant_method: str
    activation_scheme: str
    weight_block_size: tuple[int, ...]
    scale_fmt: str
    expert_dtype: str


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower and its image size plan. `max_wh_ratio` None means no limit."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Frozen, hashable facts of one model; static under jit. Every instance is a legal configuration (spec section 16).

    `compress_ratios` always has num_hidden_layers + num_nextn_predict_layers entries here, even if the file listed the
    backbone only. Optional keys have the released value as default where it says how the model computes, and "none of
    it" where it says what the model has. `source` is the JSON text this was read from; it takes no part in equality.
    """

    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None = None
    quantization: QuantizationConfig
    vision: VisionConfig | None = None

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 1
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    hidden_act: str = "silu"
    swiglu_limit: float
    rms_norm_eps: float
    attention_bias: bool = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1048576
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    n_routed_experts: int
    n_shared_experts: int = 1
    num_experts_per_tok: int
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    compress_rope_theta: float
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None = None
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 0
    engram_vocab_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_token_id: int = 0
    engram_compressed_vocab_size: int = 0
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0

    source: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        config_rules.validate(self)

    @classmethod
    def from_json(cls, source: str | Path | Mapping[str, Any]) -> ModelConfig:
        """From a `config.json`, the folder that holds one, or its content as a dict; nested or flat layout.

        Raises ConfigError (a ValueError) naming key, value and rule; OSError if the file cannot be read.
        """
        if isinstance(source, Mapping):
            text = config_json.dump_json(source)
        else:
            text = config_json.read_text(source)
        mapping = config_json.parse_json(text)
        return _from_mapping(mapping, text)

    def to_json(self) -> dict[str, Any]:
        """The configuration as a dict: keys, order, layout and unknown keys as read, with changed values put in."""
        table = self._table()
        if not self.source:
            mapping = config_json.skeleton(self.vision is not None)
            config_json.update_source(mapping, table)
            return mapping
        mapping = json.loads(self.source)
        before = ModelConfig.from_json(mapping)
        if self.vision is None and before.vision is not None:
            config_json.drop_vision(mapping)
        old = before._table()
        config_json.update_source(mapping, {k: v for k, v in table.items() if k not in old or old[k] != v})
        return mapping

    def write(self, path: str | Path) -> None:
        """Write `config.json` (`path`: file or existing folder), byte for byte as read if nothing has changed."""
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        mapping = self.to_json()
        unchanged = bool(self.source) and json.loads(self.source) == mapping
        path.write_bytes((self.source if unchanged else config_json.dump_json(mapping)).encode("utf-8"))

    @property
    def n_draft(self) -> int:
        """Number of DSpark draft blocks."""
        return self.num_nextn_predict_layers

    @property
    def backbone_ratios(self) -> tuple[int, ...]:
        """Compression ratio of each backbone layer (0 = sliding window only)."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def decoder_start(self) -> int:
        """First decoder layer: the last KV source (num_hidden_layers if there is none: all encoder)."""
        return self.kv_source_layer_ids[-1] if self.kv_source_layer_ids else self.num_hidden_layers

    @property
    def taps(self) -> tuple[int, ...]:
        """Backbone layers whose input feeds the draft blocks."""
        return self.dspark_target_layer_ids

    @property
    def supports_ced(self) -> bool:
        """Whether CED prefill is exact about what it skips: a KV source exists and no Engram at or after it."""
        return bool(self.kv_source_layer_ids) and all(i < self.decoder_start for i in self.engram_layer_ids)

    @property
    def engram_layout(self) -> EngramLayout:
        """Primes, offsets, rows and multipliers of the Engram tables (cached)."""
        return engram_layout(self)

    def _table(self) -> config_json.Table:
        """Plain JSON values by (section, key), in released order."""
        table: config_json.Table = {("root", key): getattr(self, key) for key in _ROOT_IDS}
        table.update({("quant", k): v for k, v in _plain(self.quantization).items()})
        plain = _plain(self)
        table.update({("text", key): plain[key] for key in _TEXT_KEYS})
        if self.vision is not None:
            table.update({("vision", k): v for k, v in _plain(self.vision).items()})
        return table


_ROOT_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
_TEXT_KEYS = tuple(
    f.name for f in fields(ModelConfig) if f.name not in (*_ROOT_IDS, "quantization", "vision", "source")
)
_VISION_KEYS = tuple(f.name for f in fields(VisionConfig))


def _plain(config: Any) -> dict[str, Any]:
    """Fields of a frozen config as JSON values (tuples become lists, sub-configurations dicts)."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    return {
        key: list(v) if isinstance(v, tuple) else _plain(v) if dataclasses.is_dataclass(v) else v
        for key, v in values.items()
    }


def _build(cls: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    """`cls` from JSON values: lists become tuples, unknown keys are ignored. A missing required key is an error."""
    given = {}
    for f in fields(cls):
        if f.name in values:
            value = values[f.name]
            given[f.name] = tuple(value) if isinstance(value, list) else value
        elif f.default is dataclasses.MISSING:
            note = "; the reference's flat layout has no token ids: add it to the file" if f.name in _ROOT_IDS else ""
            raise ConfigError(prefix + f.name, None, "is required and missing" + note)
    return cls(**given)


def _from_mapping(mapping: Mapping[str, Any], text: str) -> ModelConfig:
    """Validated configuration from parsed JSON in either layout; `text` is kept as its source."""
    table = config_json.read_table(mapping, _TEXT_KEYS, _VISION_KEYS)
    check_unsupported(mapping)
    config_rules.check_model_types(table)
    section = config_json.section_of
    values = {**section(table, "root"), **section(table, "text"), "source": text}
    quantization = section(table, "quant")
    if not quantization:
        raise ConfigError("quantization_config", None, "is required and missing")
    values["quantization"] = _build(QuantizationConfig, quantization)
    if config_json.has_section(table, "vision"):
        values["vision"] = _build(VisionConfig, section(table, "vision"), "vision_config.")
    rope = values.get("rope_scaling")
    if isinstance(rope, Mapping):
        values["rope_scaling"] = _build(RopeScaling, {"rope_type": rope.get("type"), **rope}, "rope_scaling.")
    elif rope is not None:
        raise ConfigError("rope_scaling", rope, "must be an object or null")
    ratios, layers, drafts = (
        values.get(k) for k in ("compress_ratios", "num_hidden_layers", "num_nextn_predict_layers")
    )
    if isinstance(ratios, list) and type(drafts) is int and drafts > 0 and len(ratios) == layers:
        values["compress_ratios"] = ratios + [0] * drafts  # some files list the backbone only
    for what, key in (
        ("num_nextn_predict_layers", "dspark_noise_token_id"),
        ("engram_layer_ids", "engram_pad_token_id"),
    ):
        if values.get(what) and key not in values:
            raise ConfigError(key, None, f"is required with {what}={values[what]}, and missing")
    return _build(ModelConfig, values)


def from_config_dict(config_dict: Any) -> ModelConfig:
    """From the `ml_collections.ConfigDict` of `configs/*.py`, which has the released nested layout.

    A ConfigDict forgets the order of its keys, so the result is written in the released order, other keys last.
    """
    given = json.loads(config_json.dump_json(config_dict.to_dict()))
    config = ModelConfig.from_json(given)
    order = dict.fromkeys(config_json.RELEASED_ROOT_ORDER) | dataclasses.replace(config, source="").to_json()
    return ModelConfig.from_json(config_json.reorder(given, order))


def load_config(path: str | Path) -> ModelConfig:
    """From a `configs/*.py` file (its `get_config()`), a `config.json`, or a folder that holds one."""
    path = Path(path)
    if path.suffix != ".py":
        return ModelConfig.from_json(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no configuration file {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return from_config_dict(module.get_config())
