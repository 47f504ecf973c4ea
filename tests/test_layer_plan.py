"""How the layer loop is rolled up: the plan agrees with the layer-share map, and rolling changes no number."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax import model, numerics
from dsv41_jax.cache import abstract_arrays
from dsv41_jax.checkpoint.released import abstract_params
from dsv41_jax.config import ModelConfig, load_config
from dsv41_jax.layer_loop import LayerLoop
from dsv41_jax.layer_map import Mode, layer_map
from dsv41_jax.layer_plan import layer_plan, source_ratios, sources_of_ratio
from random_configs import random_legal_config
from random_models import write_model

ROOT = Path(__file__).parent.parent


def shipped(name):
    return load_config(ROOT / f"configs/{name}.py")


def small(changes):
    """A legal configuration of small widths, without Engram."""
    config = random_legal_config(12)
    config["text_config"] |= {"index_topk": 4, "n_routed_experts": 3, "hc_mult": 2, "hc_sinkhorn_iters": 3, **changes}
    return ModelConfig.from_json(config)


def expanded(config):
    """The plan, layer by layer in the order in which the loop runs: (layer, run, kv_slot, index_slot)."""
    for segment in layer_plan(config):
        for repeat in range(segment.repeats):
            first = segment.first + repeat * segment.size
            kv_slot = segment.kv_slot + repeat * segment.kv_step
            index_slot = segment.index_slot + repeat * segment.index_step
            for run in segment.runs:
                for i in range(run.count):
                    yield first + run.offset + i, run, kv_slot, index_slot


def check_plan(config):
    shares = layer_map(config)[: config.num_hidden_layers]
    rows = list(expanded(config))
    assert [layer for layer, *_ in rows] == list(range(config.num_hidden_layers))
    for share, (_, run, kv_slot, index_slot) in zip(shares, rows, strict=True):
        for name in ("mode", "ratio", "pool", "engram", "tapped"):
            assert getattr(run, name) == getattr(share, name)
        if share.ratio:
            assert sources_of_ratio(config, share.ratio)[kv_slot] == share.main_kv_from
            assert config.index_source_layer_ids[index_slot] == share.index_from
    for segment in layer_plan(config):
        assert segment.size == sum(run.count for run in segment.runs)
        for run in segment.runs:
            # What happens once cannot be inside a scan: a table by name, a pool that is built, a tap of a given layer.
            assert segment.repeats == 1 or not (run.engram or run.tapped or run.pool == "builds")
            assert run.count == 1 or (run.mode in (Mode.WINDOW, Mode.REUSE) and not run.engram)


@pytest.mark.parametrize("name", ["flash", "tiny", "demo"])
def test_plans_of_shipped_configs(name):
    check_plan(shipped(name))


def test_plans_of_random_maps():
    for seed in range(300):
        check_plan(ModelConfig.from_json(random_legal_config(seed)))


def test_sources_by_ratio():
    config = shipped("flash")
    assert source_ratios(config) == (1, 2)
    assert sources_of_ratio(config, 2) == (2, 8, 14) and sources_of_ratio(config, 1) == (20,)


def test_released_model_traces_few_bodies(monkeypatch):
    """40 layers, at most 12 traced bodies: counted while the real step is traced, with nothing computed."""
    config, released = shipped("flash"), numerics.RELEASED
    assert sum(len(segment.runs) for segment in layer_plan(config)) <= 12
    traced = []
    layer = LayerLoop._layer

    def counted(self, run, *args):
        traced.append(run)
        return layer(self, run, *args)

    monkeypatch.setattr(LayerLoop, "_layer", counted)
    spec = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    arguments = [
        abstract_params(config, released),
        abstract_arrays(config, released, 2, 256),
        spec((2, 4)),
        spec((2,)),
        spec((2,)),
        {f"l{i}": spec((2, 4, 24)) for i in config.engram_layer_ids},
    ]
    traced_step = jax.make_jaxpr(functools.partial(model.extend, config, released))(*arguments)
    assert traced_step.out_avals[0].shape == (2, config.vocab_size)
    assert len(traced) <= 12
    # A value that escaped from a scan would stand among the constants, and fail only when the step is called.
    assert not any(isinstance(constant, jax.core.Tracer) for constant in traced_step.consts)


# Every way to repeat: window layers; (Full, Reuse, Reuse) twice; after a candidate source, Reindex twice.
REPEATING = {
    "num_hidden_layers": 11,
    "compress_ratios": [0] * 2 + [2] * 6 + [1] * 3,
    "kv_source_layer_ids": [2, 5, 8],
    "index_source_layer_ids": [2, 5, 8, 9, 10],
    "candidate_source_layer_id": 8,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 2,
}
# Reuse layers that feed the draft blocks, as the released model's last three.
TAPPED = {
    "num_hidden_layers": 3,
    "compress_ratios": [1] * 3,
    "kv_source_layer_ids": [0],
    "index_source_layer_ids": [0],
    "candidate_source_layer_id": None,
    "num_nextn_predict_layers": 1,
    "dspark_target_layer_ids": [1, 2],
}


def test_repeating_map_is_rolled_up():
    shape = [(segment.repeats, tuple(run.count for run in segment.runs)) for segment in layer_plan(small(REPEATING))]
    assert shape == [(1, (2,)), (2, (1, 2)), (1, (1,)), (2, (1,))]


@pytest.mark.parametrize("changes", [REPEATING, TAPPED], ids=["repeating", "tapped"])
def test_rolled_and_unrolled_loops_agree(changes, tmp_path):
    write_model(tmp_path / "model", small(changes).to_json(), 0)
    loaded = ds.load(tmp_path / "model", numerics="float32")

    @jax.jit
    def unrolled(params, arrays, ids, start, n_valid):
        # A record asks for the unrolled loop.
        return model.extend(
            loaded.config, numerics.FLOAT32, params, arrays, ids, start, n_valid, {}, all_logits=True, record={}
        )

    rng = np.random.default_rng(0)
    ids = rng.integers(3, loaded.config.vocab_size, (2, 1, 16)).astype(np.int32)
    # One row, so that both run matrix products of the same number of rows: only the loops differ.
    cache, other = loaded._runner.new_cache(1, 32), loaded._runner.new_cache(1, 32).arrays
    for block, n in zip(ids, (16, 11), strict=True):
        start = cache.lengths
        rolled, cache = loaded._runner.extend(cache, block, np.array([n]), all_logits=True)
        logits, other = unrolled(loaded.params, other, block, start, np.array([n]))
        np.testing.assert_allclose(rolled[:, :n], logits[:, :n], rtol=0, atol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5), cache.arrays, other)
    for pool in cache.arrays.main_kv.values():  # every source wrote
        assert float(jnp.abs(pool["rows"]).max(axis=(1, 2, 3)).min()) > 0
