"""Steps on a mesh, compiled for four TPUs that are not there: caches are updated in place, and neither a cache nor a
stack of weights is copied. Sizes are small, but pools and stacks of weights are larger than all else.
"""

from __future__ import annotations

import math

import jax
import pytest

from configs.tiny import get_config
from dsv41_jax import aot, sharding  # noqa: F401  aot sets libtpu up
from dsv41_jax.compiled_program import CompiledProgram
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import RELEASED
from dsv41_jax.sharded_step import AbstractStep, abstract_step

BATCH, CONTEXT = 64, 65536


def config() -> ModelConfig:
    """A window layer, a Full one with three Reuse layers, a Full one of ratio 1; wide experts."""
    source = get_config().to_dict()
    source["text_config"] |= {
        "num_hidden_layers": 6,
        "max_position_embeddings": CONTEXT,
        "compress_ratios": [0, 2, 2, 2, 2, 1],
        "kv_source_layer_ids": [1, 5],
        "index_source_layer_ids": [1, 5],
        "candidate_source_layer_id": None,
        "moe_intermediate_size": 512,
        "n_routed_experts": 64,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
    }
    return ModelConfig.from_json(source)


def local_bytes(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def planned(phase: str, topology: str = "v5e:2x2", **options) -> AbstractStep:
    devices = jax.experimental.topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = sharding.Layout(2, 1, 2).mesh(devices)
    numerics, sizes = RELEASED.computed_by("tpu"), {"batch": BATCH, "context": CONTEXT, "block": 32}
    return abstract_step(config(), numerics, mesh, phase=phase, **sizes, **options)


@pytest.mark.parametrize("phase", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
def test_nothing_large_is_copied(phase):
    step = planned(phase)
    params, cache, _ = step.arguments
    compiled = step.lower().compile()
    memory = compiled.memory_analysis()
    updated = sum(local_bytes(leaf) for leaf in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= updated  # layouts may pad
    if phase == "decode":  # a block's index scores may take `TEMPORARY_BYTES`
        assert memory.temp_size_in_bytes < min(local_bytes(leaf) for leaf in jax.tree.leaves(cache.main_kv))
    weights = [local_bytes(leaf["words"]) for leaf in params["layers"]["ffn"]["experts"].values()]
    large = min(*weights, *(local_bytes(leaf) for leaf in jax.tree.leaves((cache.main_kv, cache.index_key))))
    assert not CompiledProgram(compiled.as_text()).large_moves(large // 2)


@pytest.mark.slow
def test_ragged_exchange_compiles_where_it_exists():
    """Real rows alone travel; TPU v5e has no such exchange."""
    step = planned("prefill", "v6e:2x2", dispatch="ragged")
    assert "ragged-all-to-all" in step.lower().compile().as_text()
