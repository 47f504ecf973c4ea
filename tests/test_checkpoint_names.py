"""Released names and places in the parameter pytree: one to one, for the release and for any legal configuration."""

import math

import numpy as np
import pytest

from dsv41_jax.checkpoint.names import NameMap, Place, by_released_name, canonical, flatten, name_map, nest
from dsv41_jax.config import ModelConfig
from random_configs import random_legal_config


@pytest.fixture(scope="module")
def released(golden):
    return name_map(ModelConfig.from_json(golden / "released_config.json"))


PLACES = {
    "embed.weight": ("embed.weight", ()),
    "image_newline": ("image_newline", ()),
    "layers.3.attn_norm.weight": ("layers.attn_norm.weight", (3,)),
    "layers.39.hc_attn_fn": ("layers.hc_attn.fn", (39,)),
    "layers.0.hc_ffn_scale": ("layers.hc_ffn.scale", (0,)),
    "layers.0.attn.wq_a.weight": ("layers.attn.wq_a.weight", (0,)),
    "layers.20.attn.attn_sink": ("layers.attn.attn_sink", (20,)),
    "layers.7.ffn.gate.bias_vl": ("layers.ffn.gate.bias_vl", (7,)),
    "layers.7.ffn.experts.383.w2.scale": ("layers.ffn.experts.w2.scale", (7, 383)),
    "layers.7.ffn.shared_experts.w3.weight": ("layers.ffn.shared_experts.w3.weight", (7,)),
    "layers.14.attn.compressor.wgate.weight": ("compressors.r2.wgate.weight", (2,)),
    "layers.20.attn.compressor.wkv.weight": ("compressors.r1.wkv.weight", (0,)),
    "layers.8.attn.compressor.norm.weight": ("compressors.r2.norm.weight", (1,)),
    "layers.8.attn.indexer.k_norm.weight": ("compressors.r2.k_norm.weight", (1,)),
    "layers.20.attn.indexer.wk.weight": ("compressors.r1.wk.weight", (0,)),
    "layers.20.attn.indexer.wq_b.scale": ("indexers.wq_b.scale", (3,)),
    "layers.36.attn.indexer.weights_proj.weight": ("indexers.weights_proj.weight", (7,)),
    "layers.14.engram.embed.scale": ("engram.l14.embed.scale", ()),
    "layers.1.engram.q_weight": ("engram.l1.q_weight", ()),
    "mtp.2.attn.wo_a.scale": ("mtp.layers.attn.wo_a.scale", (2,)),
    "mtp.1.ffn.experts.127.w1.weight": ("mtp.layers.ffn.experts.w1.weight", (1, 127)),
    "mtp.0.main_proj.scale": ("mtp.main_proj.scale", ()),
    "mtp.2.norm.weight": ("mtp.norm.weight", ()),
    "mtp.2.markov_head.embed.weight": ("mtp.markov_head.embed.weight", ()),
    "mtp.2.confidence_head.proj.weight": ("mtp.confidence_head.proj.weight", ()),
    "vision.blocks.31.attn.wqkv.bias": ("vision.blocks.attn.wqkv.bias", (31,)),
    "vision.patch_embed.proj.bias": ("vision.patch_embed.proj.bias", ()),
    "aligner.w2.bias": ("aligner.w2.bias", ()),
}


@pytest.mark.parametrize("name", PLACES)
def test_released_places(released, name):
    path, index = PLACES[name]
    assert released.places[name] == Place(tuple(path.split(".")), index)
    assert released.names[Place(tuple(path.split(".")), index)] == name


def test_every_released_tensor_has_one_place(released):
    assert len(released.places) == len(released.names) == 96_085
    assert sum(math.prod(leaf.stack) for leaf in released.leaves.values()) == 96_085
    # Pitfall 43: all of the draft stack.
    assert sum(place.path[0] == "mtp" for place in released.places.values()) == 2_401
    assert released.leaves["layers", "ffn", "experts", "w1", "weight"].stack == (40, 384)
    assert released.leaves["mtp", "layers", "ffn", "experts", "w1", "weight"].stack == (3, 128)
    assert released.leaves["compressors", "r2", "wkv", "weight"].stack == (3,)
    # Pitfall 2: ratio 1 has no gate.
    assert ("compressors", "r1", "wgate", "weight") not in released.leaves


@pytest.mark.parametrize("seed", range(16))
def test_random_configurations_map_one_to_one(seed):
    """`NameMap` checks itself; the stacks must also follow the layer map."""
    config = ModelConfig.from_json(random_legal_config(seed))
    names = NameMap(config)
    assert all(names.names[place] == name for name, place in names.places.items())
    assert names.leaves["layers", "attn", "wkv", "weight"].stack == (config.num_hidden_layers,)
    for ratio in {config.backbone_ratios[s] for s in config.kv_source_layer_ids}:
        owners = [s for s in config.kv_source_layer_ids if config.backbone_ratios[s] == ratio]
        assert names.leaves["compressors", f"r{ratio}", "wk", "weight"].stack == (len(owners),)


def test_scales_belong_to_their_weights(released):
    scales = [s for s in map(released.scale_of, released.places) if s]
    assert len(scales) == len(set(scales)) == sum(n.endswith(".scale") for n in released.places)
    assert released.scale_of("layers.1.engram.embed.weight") == "layers.1.engram.embed.scale"
    assert released.scale_of("layers.0.hc_attn_fn") is released.scale_of("embed.weight") is None


@pytest.mark.parametrize(
    ("found", "name"),
    [
        ("layers.0.attn.wq_a.weight", "layers.0.attn.wq_a.weight"),
        ("model.layers.0.self_attn.wq_a.weight_scale_inv", "layers.0.attn.wq_a.scale"),
        ("layers.3.mlp.gate.e_score_correction_bias", "layers.3.ffn.gate.bias"),
        ("model.embed.weight", "embed.weight"),
        ("vision.blocks.0.mlp.w1.weight", "vision.blocks.0.mlp.w1.weight"),
        ("model.vision.blocks.0.mlp.w1.weight", "vision.blocks.0.mlp.w1.weight"),
        ("mtp.0.mlp.experts.1.w1.weight", "mtp.0.ffn.experts.1.w1.weight"),
        ("mtp.1.embed.weight", None),
        ("mtp.1.head.weight", None),
        ("mtp.2.markov_head.embed.weight", "mtp.2.markov_head.embed.weight"),
    ],
)
def test_older_spellings(found, name):
    assert canonical(found) == name


def test_nested_dicts_and_released_names(golden):
    config = ModelConfig.from_json(golden / "tinyA_config.json")
    names = NameMap(config)
    flat = {path: np.arange(math.prod(leaf.stack)).reshape(leaf.stack) for path, leaf in names.leaves.items()}
    assert dict(flatten(nest(flat))) == flat
    named = by_released_name(nest(flat), config)
    assert named.keys() == names.places.keys()
    assert named["layers.3.ffn.experts.5.w1.weight"] == 3 * 8 + 5
    del flat["layers", "attn", "wq_a", "scale"]
    assert len(by_released_name(nest(flat), config)) == len(named) - config.num_hidden_layers
