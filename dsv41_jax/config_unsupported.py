"""Keys that change the arithmetic in models of this family and that nothing here implements.

A key that is not known is kept and ignored, because most say nothing about the arithmetic. Those below do: they are
accepted with the value that leaves it as it is, and refused with any other, so that no model is computed wrongly in
silence. null is always accepted.
"""

import re
from collections.abc import Mapping
from typing import Any

from dsv41_jax.config_json import FLAT_ROPE_NAMES, SECTION_NAMES, ConfigError, is_flat

# (pattern of the whole key, values that change nothing)
_TEXT: tuple[tuple[str, tuple], ...] = (
    (r"\w+_temp(erature)?", (1,)),  # of the gate or of attention
    (r"mscale(_all_dim)?", (0,)),  # YaRN's factor on attention
    (r"n_group|topk_group|n_expert_groups|n_limited_groups|moe_layer_freq", (1,)),
    (r"first_k_dense_replace|n_dense_layers|n_hash_layers|num_hash_layers", (0,)),
    (r"(mlp|qkv|router|lm_head)_bias", (False,)),
    (r"(attn|final|router)_logit_softcapping|logits?_soft_?cap", ()),
    (r"softmax_scale|attention_scale|attention_multiplier|query_pre_attn_scalar", ()),
    (r"(embedding|residual)_multiplier|logits?_scal(e|ing)|swiglu_alpha", (1,)),
    (r"rope_interleave", (True,)),
    (r"rope_parameters", ()),  # a newer spelling of rope_theta and rope_scaling together
)
_ROPE: tuple[tuple[str, tuple], ...] = (
    (r"mscale(_all_dim)?", (0,)),
    (r"attn_factor|attention_factor|extrapolation_factor", (1,)),
    (r"truncate", (True,)),
)
_VISION: tuple[tuple[str, tuple], ...] = (
    (r"hidden_act", ("silu",)),
    (r"(rms|layer)_norm_eps", (1e-6,)),
    (r"num_channels|in_channels", (3,)),
    (r"attention_dropout", (0,)),
)
_QUANTIZATION: tuple[tuple[str, tuple], ...] = (
    (r"fmt", ("e4m3",)),
    (r"kv_cache_scheme", ()),
    (r"modules_to_not_convert|ignored_layers", ([],)),
)


def check_unsupported(mapping: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first key of a config.json, in either layout, that asks for other arithmetic."""
    text = mapping if is_flat(mapping) else mapping["text_config"]
    _check(text, _TEXT)
    rope = text.get("rope_scaling")
    if isinstance(rope, Mapping):
        _check(rope, _ROPE, "rope_scaling.")
        for key in rope:
            known = key in (*FLAT_ROPE_NAMES, "rope_type", "type") or any(re.fullmatch(p, key) for p, _ in _ROPE)
            if not known and rope[key] is not None:
                raise ConfigError(f"rope_scaling.{key}", rope[key], "is not implemented: it may change the rotation")
        if rope.get("type", rope.get("rope_type")) != rope.get("rope_type", rope.get("type")):
            raise ConfigError("rope_scaling.type", rope["type"], f"contradicts rope_type = {rope['rope_type']!r}")
    for section, table in (("vision", _VISION), ("quant", _QUANTIZATION)):
        values = mapping.get(SECTION_NAMES[section])
        if isinstance(values, Mapping):
            _check(values, table, f"{SECTION_NAMES[section]}.")


def _check(values: Mapping[str, Any], table: tuple[tuple[str, tuple], ...], prefix: str = "") -> None:
    for key, value in values.items():
        for pattern, neutral in table:
            if re.fullmatch(pattern, key) and value is not None and value not in neutral:
                allowed = " or ".join([*map(repr, neutral), "null"])
                raise ConfigError(
                    prefix + key, value, f"changes the arithmetic in a way not implemented; only {allowed}"
                )
