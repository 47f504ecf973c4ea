"""Configurations: both layouts, the way back, and every rule with a value that breaks it."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict

from dsv41_jax import config_json
from dsv41_jax.config import ConfigError, ModelConfig, RopeScaling, from_config_dict, load_config
from random_configs import random_legal_config

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests/golden"
RELEASED = GOLDEN / "released_config.json"


@pytest.fixture(scope="module")
def released():
    return ModelConfig.from_json(RELEASED)


def _mapping():
    return json.loads(RELEASED.read_text())


def test_released_values(released):
    assert released.hidden_size == 5120 and released.rms_norm_eps == 1e-20
    assert (released.bos_token_id, released.eos_token_id, released.pad_token_id) == (0, 1, 2)
    assert released.image_token_id == 129264 and released.dspark_noise_token_id == 128799
    assert released.compress_ratios == (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    assert released.backbone_ratios == released.compress_ratios[:40]
    assert released.rope_scaling == RopeScaling(
        rope_type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536
    )
    assert released.vision.hidden_size == 1024 and released.vision.max_wh_ratio is None
    assert released.quantization.weight_block_size == (32, 32)
    assert (released.n_draft, released.decoder_start, released.taps) == (3, 20, (37, 38, 39))
    assert released.supports_ced and released.engram_layout.table_rows == released.engram_num_embeddings


def test_frozen_and_hashable(released):
    assert hash(released) == hash(ModelConfig.from_json(_mapping()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        released.hidden_size = 1


@pytest.mark.parametrize("name", ["released_config.json", "tinyA_config.json"])
def test_written_back_byte_for_byte(name, tmp_path):
    config = ModelConfig.from_json(GOLDEN / name)
    config.write(tmp_path)
    assert (tmp_path / "config.json").read_bytes() == (GOLDEN / name).read_bytes()
    assert ModelConfig.from_json(tmp_path) == config


def test_released_style_from_a_dict(tmp_path):
    mapping = _mapping()
    config = ModelConfig.from_json(mapping)
    assert config.to_json() == mapping
    assert json.dumps(config.to_json()) == json.dumps(mapping)  # order too
    config.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == RELEASED.read_bytes()


def test_flash_config_is_the_released_file(released, tmp_path):
    config = load_config(ROOT / "configs/flash.py")
    assert config == released
    config.write(tmp_path)
    assert (tmp_path / "config.json").read_bytes() == RELEASED.read_bytes()


def test_tiny_config_is_the_golden_model():
    config = load_config(ROOT / "configs/tiny.py")
    golden = ModelConfig.from_json(GOLDEN / "tinyA_config.json")
    assert config == golden and config.to_json() == golden.to_json()


def test_demo_config():
    config = load_config(ROOT / "configs/demo.py")
    assert config.vision is None and config.n_draft == 1 and config.supports_ced
    assert "vision_config" not in config.to_json()


def test_load_config_refuses_a_missing_file(tmp_path):
    for name in ("nowhere.py", "nowhere.json", "nowhere"):
        with pytest.raises(FileNotFoundError):
            load_config(tmp_path / name)


def test_unknown_keys_are_kept():
    mapping = _mapping()
    mapping["text_config"]["future"] = {"a": [1, None, "é"]}
    mapping["note"] = 3
    config = ModelConfig.from_json(mapping)
    assert config == ModelConfig.from_json(RELEASED)
    assert json.dumps(config.to_json()) == json.dumps(mapping)


def test_changed_values_are_written(released):
    changed = dataclasses.replace(released, routed_scaling_factor=2.5, eos_token_id=7)
    mapping = _mapping()
    mapping["text_config"]["routed_scaling_factor"] = 2.5
    mapping["eos_token_id"] = 7
    assert json.dumps(changed.to_json()) == json.dumps(mapping)
    text_only = dataclasses.replace(released, vision=None)
    assert "vision_config" not in text_only.to_json()
    assert ModelConfig.from_json(text_only.to_json()) == text_only
    # And back again: the section returns with its own model_type.
    restored = dataclasses.replace(text_only, source=json.dumps(text_only.to_json()), vision=released.vision)
    assert restored.to_json() == _mapping()


def test_without_a_source(released):
    bare = dataclasses.replace(released, source="")
    assert bare == released
    mapping = _mapping()
    del mapping["transformers_version"]
    assert json.dumps(bare.to_json()) == json.dumps(mapping)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_random_configs_round_trip(seed):
    mapping = random_legal_config(seed)
    config = ModelConfig.from_json(mapping)
    assert json.dumps(config.to_json()) == json.dumps(mapping)
    bare = dataclasses.replace(config, source="")
    assert ModelConfig.from_json(bare.to_json()) == config


def _flat(mapping):
    """The reference's flat layout of a nested mapping."""
    text, vision, quant = mapping["text_config"], mapping["vision_config"], mapping["quantization_config"]
    flat = {
        config_json.FLAT_TEXT_NAMES.get(key, key): value
        for key, value in text.items()
        if key not in ("model_type", "rope_scaling", "topk_method", "norm_topk_prob", "max_position_embeddings")
    }
    flat |= {name: text["rope_scaling"][key] for key, name in config_json.FLAT_ROPE_NAMES.items()}
    flat |= {name: vision[key] for key, name in config_json.FLAT_VISION_NAMES.items()}
    flat |= {name: quant[key] for key, name in config_json.FLAT_QUANT_NAMES.items()}
    return flat | {key: mapping[key] for key in mapping if key.endswith("_token_id")}


def test_flat_layout(released, tmp_path):
    flat = _flat(_mapping())
    assert {"dim", "n_layers", "n_mtp_layers", "kv_source_layers", "engram_pad_id", "route_scale"} <= set(flat)
    assert flat["dtype"] == "fp8" and "model_type" not in flat
    config = ModelConfig.from_json(flat)
    assert config == released
    assert json.dumps(config.to_json()) == json.dumps(flat)
    changed = dataclasses.replace(config, routed_scaling_factor=2.5, rope_scaling=None, vision=None)
    written = changed.to_json()
    assert written["route_scale"] == 2.5 and written["original_seq_len"] == 0 and "vision_dim" not in written
    again = ModelConfig.from_json(written)
    assert again.rope_scaling is None and again.vision is None and again.routed_scaling_factor == 2.5


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"])
def test_special_ids_are_never_made_up(key):
    """The reference's flat file has none; they differ between models, so they must be added."""
    flat = _flat(_mapping())
    flat[key] = 77
    assert getattr(ModelConfig.from_json(flat), key) == 77
    del flat[key]
    with pytest.raises(ConfigError, match=f"{key} = None: is required"):
        ModelConfig.from_json(flat)


def test_either_spelling_in_the_nested_layout(released):
    mapping = _mapping()
    text = mapping["text_config"]
    for key, name in config_json.FLAT_TEXT_NAMES.items():
        text[name] = text.pop(key)
    config = ModelConfig.from_json(mapping)
    assert config == released
    assert json.dumps(config.to_json()) == json.dumps(mapping)
    text["engram_pad_token_id"] = text["engram_pad_id"]
    assert ModelConfig.from_json(mapping) == released
    changed = dataclasses.replace(ModelConfig.from_json(mapping), engram_pad_token_id=5).to_json()["text_config"]
    assert changed["engram_pad_token_id"] == changed["engram_pad_id"] == 5
    text["engram_pad_token_id"] = 3
    with pytest.raises(ConfigError, match=r"engram_pad_token_id = 3: contradicts engram_pad_id = 2"):
        ModelConfig.from_json(mapping)


def test_ratios_may_stop_at_the_backbone(released):
    """Some ports drop the three draft entries."""
    mapping = _mapping()
    del mapping["text_config"]["compress_ratios"][40:]
    config = ModelConfig.from_json(mapping)
    assert config == released and config.compress_ratios[40:] == (0, 0, 0)
    assert len(config.to_json()["text_config"]["compress_ratios"]) == 40


def test_text_keys_come_from_text_config(released):
    """Pitfall A8: the root has no text keys; a decoy there must not be read."""
    mapping = _mapping()
    mapping["hidden_size"] = 0
    assert ModelConfig.from_json(mapping).hidden_size == 5120


def test_no_drafts_no_engram_no_vision():
    mapping = _mapping()
    del mapping["vision_config"]
    text = mapping["text_config"]
    for key in [key for key in text if key.startswith(("dspark_", "engram_", "num_nextn"))]:
        del text[key]
    del text["compress_ratios"][40:]
    config = ModelConfig.from_json(mapping)
    assert config.n_draft == 0 and config.taps == () and config.vision is None and config.engram_layer_ids == ()


def test_ced_needs_engram_before_the_decoder(released):
    mapping = _mapping()
    mapping["text_config"]["engram_layer_ids"] = [1, 20]
    config = ModelConfig.from_json(mapping)  # legal, sizes do not depend on the ids
    assert not config.supports_ced and config.decoder_start == 20
    mapping["text_config"]["engram_layer_ids"] = [1, 19]
    assert ModelConfig.from_json(mapping).supports_ced


def test_a_model_of_windows_only():
    mapping = _mapping()
    none = {"kv_source_layer_ids": [], "index_source_layer_ids": [], "candidate_source_layer_id": None}
    mapping["text_config"] |= {"compress_ratios": [0] * 43, **none}
    config = ModelConfig.from_json(mapping)
    assert config.decoder_start == 40 and not config.supports_ced


def test_engram_sizes_must_be_given():
    """Pitfall A25: layers without table sizes must not build."""
    mapping = _mapping()
    mapping["text_config"]["engram_layer_ids"] = [1]
    del mapping["text_config"]["engram_num_embeddings"]
    with pytest.raises(ConfigError, match=r"engram_num_embeddings = \[\]: must have one table size"):
        ModelConfig.from_json(mapping)


def test_ratio_one_is_legal_and_v4_scale_blocks_are_not(released):
    """Pitfalls A2 and A3."""
    assert set(released.backbone_ratios) == {0, 1, 2}
    mapping = _mapping()
    mapping["quantization_config"]["weight_block_size"] = [128, 128]
    with pytest.raises(ConfigError, match=r"weight_block_size = \[128, 128\]: must be \[32, 32\]"):
        ModelConfig.from_json(mapping)


# (section, key, value that breaks the rule, words of the rule in the message)
BROKEN = [
    ("root", "model_type", "deepseek_v4", "must be 'deepseek_v41'"),
    ("text_config", "model_type", "llama", "must be 'deepseek_v41_text'"),
    ("vision_config", "model_type", "siglip", "must be 'deepseek_v41_vision'"),
    ("root", "dtype", "float16", "must be 'bfloat16'"),
    ("root", "bos_token_id", 129280, "must be a token id"),
    ("root", "eos_token_id", -1, "must be a token id"),
    ("root", "eos_token_id", [1, 2], "must be an integer"),
    ("root", "pad_token_id", "2", "must be an integer"),
    ("root", "image_token_id", 10**9, "must be a token id"),
    ("root", "image_token_id", None, "is required with a vision_config"),
    ("quantization_config", "quant_method", "gptq", "must be 'fp8'"),
    ("quantization_config", "activation_scheme", "static", "must be 'dynamic'"),
    ("quantization_config", "scale_fmt", "float32", "must be 'ue8m0'"),
    ("quantization_config", "expert_dtype", "int4", "must be 'fp4'"),
    ("quantization_config", "weight_block_size", [32, 16], r"must be [32, 32]"),
    ("quantization_config", "weight_block_size", 32, "must be a list of integers >= 0"),
    ("text_config", "vocab_size", True, "must be an integer"),
    ("text_config", "vocab_size", 0, "must be above 0"),
    ("text_config", "hidden_size", 5120.0, "must be an integer"),
    ("text_config", "hidden_size", 5121, "must be multiples of 32"),
    ("text_config", "num_hidden_layers", -40, "must be above 0"),
    ("text_config", "num_hidden_layers", 41, "entries"),
    ("text_config", "num_key_value_heads", 8, "must be 1"),
    ("text_config", "head_dim", 80, "must be multiples of 32"),
    ("text_config", "qk_rope_head_dim", 63, "must be even"),
    ("text_config", "qk_rope_head_dim", 256, "at most 128"),
    ("text_config", "q_lora_rank", 1290, "must be multiples of 32"),
    ("text_config", "o_lora_rank", 3, "times o_groups is 24"),
    ("text_config", "o_groups", 6, "must divide num_attention_heads = 64"),
    ("text_config", "moe_intermediate_size", 2305, "must be multiples of 32"),
    ("text_config", "hidden_act", "gelu", "must be 'silu'"),
    ("text_config", "swiglu_limit", -1.0, "must not be negative"),
    ("text_config", "swiglu_limit", float("nan"), "must be a finite number"),
    ("text_config", "rms_norm_eps", 0, "must be above 0"),
    ("text_config", "rms_norm_eps", False, "must be a finite number"),
    ("text_config", "attention_bias", True, "must be False"),
    ("text_config", "attention_bias", 0, "must be true or false"),
    ("text_config", "attention_dropout", 0.1, "must be 0.0"),
    ("text_config", "tie_word_embeddings", True, "must be False"),
    ("text_config", "rope_theta", "10000", "must be a finite number"),
    ("text_config", "rope_theta", float("inf"), "must be a finite number"),
    ("text_config", "compress_rope_theta", 0.5, "must be above 1"),
    ("text_config", "rope_scaling", "yarn", "must be an object or null"),
    ("rope_scaling", "rope_type", "linear", "must be 'yarn'"),
    ("rope_scaling", "factor", 0, "must be above 0"),
    ("rope_scaling", "beta_fast", 0.5, "must be at least beta_slow = 1"),
    ("rope_scaling", "original_max_position_embeddings", 65536.5, "must be an integer"),
    ("text_config", "n_shared_experts", 2, "must be 1"),
    ("text_config", "num_experts_per_tok", 385, "must be at most n_routed_experts = 384"),
    ("text_config", "scoring_func", "tanh", "must be one of sqrtsoftplus, softmax, sigmoid"),
    ("text_config", "topk_method", "greedy", "must be 'noaux_tc'"),
    ("text_config", "norm_topk_prob", "true", "must be true or false"),
    ("text_config", "sliding_window", 0, "must be above 0"),
    ("text_config", "compress_ratios", [0] * 42, "must have num_hidden_layers = 40 entries"),
    ("text_config", "compress_ratios", [0, 0] + [4] * 38 + [0] * 3, "every ratio must be 0, 1 or 2"),
    ("text_config", "compress_ratios", [0, 0] + [2] * 18 + [1] * 21 + [0] * 2, "draft blocks"),
    ("text_config", "compress_ratios", [0, 2] + [2] * 18 + [1] * 20 + [0] * 3, "layer 1 has ratio 2 but no KV source"),
    ("text_config", "compress_ratios", [0, 0] + [2] * 17 + [1] * 21 + [0] * 3, "they must be equal"),
    ("text_config", "compress_ratios", [0, 0, 2.0] + [2] * 17 + [1] * 20 + [0] * 3, "must be a list of integers >= 0"),
    ("text_config", "kv_source_layer_ids", [2, 14, 8, 20], "must ascend"),
    ("text_config", "kv_source_layer_ids", [2, 8, 8, 14, 20], "must ascend"),
    ("text_config", "kv_source_layer_ids", [2, 8, 14, 20, 40], "must be backbone layers, 0..39"),
    ("text_config", "kv_source_layer_ids", [0, 2, 8, 14, 20], "layer 0 has ratio 0"),
    ("text_config", "index_source_layer_ids", [2, 14, 20, 24], "must contain every KV source, 8 is missing"),
    ("text_config", "index_source_layer_ids", [1, 2, 8, 14, 20], "layer 1 has ratio 0"),
    ("text_config", "index_source_layer_ids", [2, 8, 14, 24, 20], "must ascend"),
    ("text_config", "index_topk", 16378, "must be at least index_topk = 16378"),
    ("text_config", "index_head_dim", 100, "must be multiples of 32"),
    ("text_config", "candidate_source_layer_id", 24, "must be a KV source"),
    ("text_config", "candidate_source_layer_id", -1, "must be a KV source"),
    ("text_config", "candidate_source_layer_id", 14, "must share its KV source, but 20 is a later one"),
    ("text_config", "candidate_topk_blocks", 64, "must be at least index_topk = 512"),
    ("text_config", "candidate_block_size", 0, "must be above 0"),
    ("text_config", "hc_mult", 0, "must be above 0"),
    ("text_config", "hc_sinkhorn_iters", 0, "must be above 0"),
    ("text_config", "engram_layer_ids", [1, 1], "must name each layer once"),
    ("text_config", "engram_layer_ids", [1, 40], "must be backbone layers"),
    ("text_config", "engram_layer_ids", [1], "must have one table size"),
    ("text_config", "engram_num_embeddings", [384006168, 384016681], "sums of the derived primes"),
    ("text_config", "engram_num_embeddings", [384006168, 0], "must be between 384000000"),
    ("text_config", "engram_max_ngram_size", 1, "must be at least 2"),
    ("text_config", "engram_n_heads", 0, "must be above 0"),
    ("text_config", "engram_head_dim", 250, "must be a multiple of 32"),
    ("text_config", "engram_pad_token_id", 129280, "must be a token id"),
    ("text_config", "engram_compressed_vocab_size", 129281, "must be at most vocab_size"),
    ("text_config", "num_nextn_predict_layers", -1, "must not be negative"),
    ("text_config", "dspark_block_size", 0, "must be above 0"),
    ("text_config", "dspark_noise_token_id", 129280, "must be a token id"),
    ("text_config", "dspark_target_layer_ids", [39, 38, 37], "must ascend"),
    ("text_config", "dspark_target_layer_ids", [38, 39, 40], "must be backbone layers"),
    ("text_config", "dspark_target_layer_ids", [], "must name at least one layer"),
    ("text_config", "dspark_num_experts_per_tok", 129, "must be at most dspark_n_routed_experts = 128"),
    ("vision_config", "hidden_size", 1000, "must divide vision_config.hidden_size = 1000"),
    ("vision_config", "patch_size", 0, "must be above 0"),
    ("vision_config", "max_image_tokens", 3, "must be at least 4"),
    ("vision_config", "min_pixels", -1, "must not be negative"),
    ("vision_config", "max_wh_ratio", "8", "must be a finite number"),
]


@pytest.mark.parametrize(("section", "key", "value", "rule"), BROKEN)
def test_broken_rule_is_named(section, key, value, rule):
    """The error names a key, its value and the rule; key and value are those given, or those the rule is about."""
    mapping = _mapping()
    container = {"root": mapping, "rope_scaling": mapping["text_config"]["rope_scaling"]}.get(section)
    container = mapping[section] if container is None else container
    container[key] = value
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_json(mapping)
    message = str(caught.value)
    assert key in message and rule in message
    assert message.startswith(f"{caught.value.key} = {caught.value.value!r}: ")
    assert repr(value) in message or (key, value) in INDIRECT


# Here the rule is reported on the other key of the pair, and names this one in words.
INDIRECT = {("num_hidden_layers", 41), ("candidate_block_size", 0)}


# (section, key, value that leaves the arithmetic alone, value that nothing here implements)
UNSUPPORTED = [
    ("rope_scaling", "mscale", 0, 1.0),
    ("rope_scaling", "mscale_all_dim", 0.0, 0.707),
    ("rope_scaling", "attention_factor", 1.0, 1.2),
    ("rope_scaling", "truncate", True, False),
    ("rope_scaling", "type", "yarn", "linear"),
    ("rope_scaling", "long_factor", None, [1.0]),
    ("text_config", "gate_temperature", 1.0, 0.5),
    ("text_config", "router_temp", 1, 2),
    ("text_config", "n_group", 1, 8),
    ("text_config", "topk_group", 1, 4),
    ("text_config", "first_k_dense_replace", 0, 3),
    ("text_config", "num_hash_layers", 0, 3),
    ("text_config", "mlp_bias", False, True),
    ("text_config", "final_logit_softcapping", None, 30.0),
    ("text_config", "softmax_scale", None, 0.1),
    ("text_config", "residual_multiplier", 1.0, 0.5),
    ("text_config", "rope_interleave", True, False),
    ("text_config", "rope_parameters", None, {"rope_type": "yarn"}),
    ("vision_config", "hidden_act", "silu", "gelu"),
    ("vision_config", "rms_norm_eps", 1e-6, 1e-5),
    ("quantization_config", "fmt", "e4m3", "e5m2"),
    ("quantization_config", "modules_to_not_convert", [], ["lm_head"]),
]


@pytest.mark.parametrize(("section", "key", "neutral", "value"), UNSUPPORTED)
def test_arithmetic_that_is_not_implemented_is_refused(section, key, neutral, value, released):
    mapping = _mapping()
    container = {"rope_scaling": mapping["text_config"]["rope_scaling"]}.get(section) or mapping[section]
    container[key] = neutral
    assert ModelConfig.from_json(mapping) == released
    container[key] = value
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_json(mapping)
    assert caught.value.key.endswith(key) and repr(value) in str(caught.value)
    words = "not implemented", "contradicts rope_type = 'yarn'"
    assert any(part in str(caught.value) for part in words)


def test_flat_layouts_are_refused_alike():
    flat = _flat(_mapping())
    for key, value in (("mscale", 1.0), ("gate_temperature", 2.0), ("n_expert_groups", 8), ("n_dense_layers", 1)):
        with pytest.raises(ConfigError, match=f"{key} = {value}: .*not implemented"):
            ModelConfig.from_json(flat | {key: value})


@pytest.mark.parametrize("section", ["quantization_config", "text_config", "vision_config"])
def test_sections_must_be_objects(section):
    mapping = _mapping()
    mapping[section] = [1]
    with pytest.raises(ConfigError, match=rf"{section} = \[1\]: must be a JSON object"):
        ModelConfig.from_json(mapping)


@pytest.mark.parametrize("key", ["hidden_size", "kv_source_layer_ids", "swiglu_limit", "hc_mult"])
def test_required_keys(key):
    mapping = _mapping()
    del mapping["text_config"][key]
    with pytest.raises(ConfigError, match=f"{key} = None: is required"):
        ModelConfig.from_json(mapping)


def test_required_root_keys():
    for key in ("model_type", "eos_token_id", "quantization_config"):
        mapping = _mapping()
        del mapping[key]
        with pytest.raises(ConfigError, match=f"{key} = None: is required"):
            ModelConfig.from_json(mapping)


def test_bad_files(tmp_path):
    for text, words in (("{", "must be JSON"), ("[1]", "must be a JSON object"), ('{"a": 1, "a": 2}', "appears twice")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=words):
            ModelConfig.from_json(tmp_path)
    with pytest.raises(ConfigError, match="no JSON value"):
        ModelConfig.from_json({"text_config": {"hidden_size": object()}})


def test_every_instance_is_validated(released):
    with pytest.raises(ConfigError, match="hidden_size"):
        dataclasses.replace(released, hidden_size=33)
    with pytest.raises(ConfigError, match="must be a list"):
        dataclasses.replace(released, dspark_target_layer_ids=[37])


def test_config_dict_keeps_unknown_keys():
    mapping = json.loads((GOLDEN / "tinyA_config.json").read_text())
    mapping["text_config"]["extra_key"] = 4
    config = from_config_dict(ConfigDict(mapping))
    assert config == ModelConfig.from_json(mapping) and config.to_json() == mapping
