"""The two JSON layouts of a DeepSeek-V4.1 configuration, and the spellings of their keys.

The released `config.json` nests `text_config`, `vision_config` and `quantization_config`. The reference's
`inference/config.json` is flat and uses shorter names. Both are read into one table keyed by (section, released key);
changed values are put back under whatever spelling the source used, so a configuration is written as it was read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODEL_TYPE = "deepseek_v41"

# Released text key -> the reference's flat name, where the two differ.
FLAT_TEXT_NAMES = {
    "hidden_size": "dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "num_nextn_predict_layers": "n_mtp_layers",
    "num_attention_heads": "n_heads",
    "num_experts_per_tok": "n_activated_experts",
    "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale",
    "qk_rope_head_dim": "rope_head_dim",
    "rms_norm_eps": "norm_eps",
    "sliding_window": "window_size",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "engram_pad_token_id": "engram_pad_id",
    "dspark_num_experts_per_tok": "dspark_n_activated_experts",
    "max_position_embeddings": "max_seq_len",
}
FLAT_ROPE_NAMES = {
    "factor": "rope_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_max_position_embeddings": "original_seq_len",
}
FLAT_VISION_NAMES = {
    "num_hidden_layers": "vision_n_layers",
    "hidden_size": "vision_dim",
    "num_attention_heads": "vision_n_heads",
    "intermediate_size": "vision_inter_dim",
    "patch_size": "vision_patch_size",
    "rope_theta": "vision_rope_theta",
    "downsample_ratio": "vision_downsample_ratio",
    "max_image_tokens": "vision_max_n_token",
    "min_pixels": "vision_min_pixels",
    "max_wh_ratio": "vision_max_wh_ratio",
}
# In the flat layout "dtype" names the quantisation, not the activations.
FLAT_QUANT_NAMES = {"quant_method": "dtype", "scale_fmt": "scale_fmt", "expert_dtype": "expert_dtype"}

# What the flat layout does not say. Token ids are not among these: a file without them must be completed.
FLAT_ROOT_DEFAULTS = {"model_type": MODEL_TYPE, "architectures": ["DeepseekV41ForCausalLM"]}
QUANT_DEFAULTS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}

ROOT_KEYS = ("architectures", "model_type", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
RELEASED_ROOT_ORDER = (*ROOT_KEYS[:3], "transformers_version", *ROOT_KEYS[3:], "quantization_config")
SECTION_NAMES = {"text": "text_config", "vision": "vision_config", "quant": "quantization_config"}

Table = dict[tuple[str, str], Any]


class ConfigError(ValueError):
    """A configuration value breaks a rule. Attributes: key, value, rule (all in the message)."""

    def __init__(self, key: str, value: object, rule: str):
        super().__init__(f"{key} = {value!r}: {rule}")
        self.key, self.value, self.rule = key, value, rule


def parse_json(text: str, name: str = "config.json") -> dict[str, Any]:
    """JSON object text to a dict. No JSON, no object, or a key twice in one object raises ConfigError.

    NaN and Infinity pass here, so that validation can name the key that holds them.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in items:
            if key in out:
                raise ConfigError(key, value, f"appears twice in one object of {name}")
            out[key] = value
        return out

    try:
        mapping = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise ConfigError(name, text[:40], f"must be JSON ({error})") from error
    if not isinstance(mapping, dict):
        raise ConfigError(name, mapping, "must be a JSON object")
    return mapping


def dump_json(mapping: Mapping[str, Any]) -> str:
    """The released style: 2-space indent, one list item a line, final newline."""

    def refuse(value: object) -> None:
        raise ConfigError("configuration", value, f"a {type(value).__name__} is no JSON value")

    return json.dumps(mapping, indent=2, ensure_ascii=False, default=refuse) + "\n"


def read_text(path: str | Path) -> str:
    """Text of a `config.json`, given the file or its folder, byte for byte."""
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    return path.read_bytes().decode("utf-8")


def is_flat(mapping: Mapping[str, Any]) -> bool:
    """True for the reference's flat layout."""
    return "text_config" not in mapping


def _section(mapping: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = mapping[name]
    if not isinstance(value, Mapping):
        raise ConfigError(name, value, "must be a JSON object")
    return value


def _pick(container: Mapping[str, Any], key: str, other: str | None) -> str | None:
    """The spelling that `container` uses for `key`, or None. Two spellings with two values are an error."""
    if other is None or other not in container:
        return key if key in container else None
    if key in container and container[key] != container[other]:
        raise ConfigError(key, container[key], f"contradicts {other} = {container[other]!r}: two spellings of one key")
    return key if key in container else other


def read_table(mapping: Mapping[str, Any], text_keys: tuple[str, ...], vision_keys: tuple[str, ...]) -> Table:
    """Known values of either layout, by (section, released key); sections "root", "text", "vision", "quant".

    Keys that are absent are absent from the table, except what the flat layout never says. `rope_scaling` stays a dict
    or None. A missing vision section leaves no "vision" entries.
    """
    flat = is_flat(mapping)
    table: Table = {("root", key): mapping[key] for key in ROOT_KEYS if key in mapping}
    if "dtype" not in mapping and "torch_dtype" in mapping:
        table["root", "dtype"] = mapping["torch_dtype"]
    text = mapping if flat else _section(mapping, "text_config")
    for key in text_keys:
        name = _pick(text, key, FLAT_TEXT_NAMES.get(key))
        if name is not None:
            table["text", key] = text[name]
    if not flat and "model_type" in text:
        table["text", "model_type"] = text["model_type"]
    if flat and ("text", "rope_scaling") not in table and text.get("original_seq_len"):
        # original_seq_len 0 means no YaRN in the reference.
        rope = {key: text[name] for key, name in FLAT_ROPE_NAMES.items() if name in text}
        table["text", "rope_scaling"] = {"rope_type": "yarn", **rope}
    _read_vision(mapping, flat, vision_keys, table)
    _read_quantization(mapping, flat, table)
    if flat:
        table["root", "dtype"] = "bfloat16"
        for key, value in FLAT_ROOT_DEFAULTS.items():
            table.setdefault(("root", key), value)
    return table


def _read_vision(mapping: Mapping[str, Any], flat: bool, keys: tuple[str, ...], table: Table) -> None:
    if mapping.get("vision_config") is not None:
        section = _section(mapping, "vision_config")
        table.update({("vision", key): section[key] for key in (*keys, "model_type") if key in section})
    elif flat and mapping.get("vision_n_layers"):
        found = {key: name for key, name in FLAT_VISION_NAMES.items() if name in mapping}
        table.update({("vision", key): mapping[name] for key, name in found.items()})


def _read_quantization(mapping: Mapping[str, Any], flat: bool, table: Table) -> None:
    if "quantization_config" in mapping:
        section = _section(mapping, "quantization_config")
        table.update({("quant", key): section[key] for key in QUANT_DEFAULTS if key in section})
    elif flat:
        found = {key: mapping[name] for key, name in FLAT_QUANT_NAMES.items() if name in mapping}
        table.update({("quant", key): found.get(key, value) for key, value in QUANT_DEFAULTS.items()})


def section_of(table: Table, section: str) -> dict[str, Any]:
    """The values of one section by key."""
    return {key: value for (name, key), value in table.items() if name == section}


def has_section(table: Table, section: str) -> bool:
    """True if the table holds any key of the section."""
    return any(name == section for name, _ in table)


def update_source(mapping: dict[str, Any], changes: Table) -> None:
    """Write changed values into `mapping` in place, under the spelling and layout it already uses."""
    flat = is_flat(mapping)
    for (section, key), value in changes.items():
        if section == "root":
            mapping["torch_dtype" if key == "dtype" and "dtype" not in mapping else key] = value
        elif section == "text":
            _put_text(mapping, flat, key, value)
        elif SECTION_NAMES[section] in mapping or not flat:
            name = SECTION_NAMES[section]
            if not isinstance(mapping.get(name), dict):
                mapping[name] = {"model_type": f"{MODEL_TYPE}_{section}"} if section == "vision" else {}
            mapping[name][key] = value
        else:
            names = FLAT_VISION_NAMES if section == "vision" else FLAT_QUANT_NAMES
            mapping[names.get(key, key)] = value


def _put_text(mapping: dict[str, Any], flat: bool, key: str, value: Any) -> None:
    container = mapping if flat else mapping["text_config"]
    if flat and key == "rope_scaling" and key not in container:
        scaling = value or {"original_max_position_embeddings": 0}
        container.update({name: scaling[part] for part, name in FLAT_ROPE_NAMES.items() if part in scaling})
        return
    other = FLAT_TEXT_NAMES.get(key)
    present = [name for name in (key, other) if name in container]
    for name in present or [other if flat and other else key]:
        container[name] = value


def drop_vision(mapping: dict[str, Any]) -> None:
    """Remove the vision tower from `mapping` in place."""
    mapping.pop("vision_config", None)
    for name in FLAT_VISION_NAMES.values():
        mapping.pop(name, None)


def skeleton(vision: bool) -> dict[str, Any]:
    """A released-layout mapping in released key order, to be filled by `update_source`."""
    mapping: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": MODEL_TYPE,
        "dtype": "bfloat16",
        **{key: None for key in ROOT_KEYS if key.endswith("_token_id")},
        "quantization_config": {},
        "text_config": {"model_type": f"{MODEL_TYPE}_text"},
    }
    if vision:
        mapping["vision_config"] = {"model_type": f"{MODEL_TYPE}_vision"}
    return mapping


def reorder(mapping: Mapping[str, Any], order: Mapping[str, Any]) -> dict[str, Any]:
    """`mapping` with its keys in the order of `order`, objects inside likewise; keys that `order` lacks come last."""
    keys = [key for key in order if key in mapping] + sorted(key for key in mapping if key not in order)
    nested = {key for key in keys if isinstance(mapping[key], Mapping) and isinstance(order.get(key), Mapping)}
    return {key: reorder(mapping[key], order[key]) if key in nested else mapping[key] for key in keys}
