"""What a token and a sequence cost in memory, and what a step needs beside it."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax import cache, model, numerics
from dsv41_jax.aot import compile_for
from dsv41_jax.cached_block import CachedBlock
from dsv41_jax.checkpoint.released import abstract_params
from dsv41_jax.config import ModelConfig, load_config
from dsv41_jax.layer_plan import source_ratios
from dsv41_jax.tiles import TEMPORARY_BYTES, largest_tile
from random_configs import random_legal_config

FLASH = load_config(Path(__file__).parent.parent / "configs/flash.py")
spec = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)


def test_890_bytes_a_token():
    assert ds.cache.global_bytes_per_token(FLASH) == 890
    entry = 288 + 68
    assert 890 == 3 * entry / 2 + entry  # three sources of ratio 2, one of ratio 1
    assert ds.cache.global_bytes_per_token(FLASH, numerics.NOQUANT) == 2 * (512 + 128) * (3 / 2 + 1)


def test_window_bytes_are_counted_apart():
    ring = (128 + cache.MAX_REWIND) * (512 + 16)  # E4M3 codes and UE8M0 scales
    tails = 2 * 3 * (1 + cache.MAX_REWIND) * 512 * 4  # values and gates of three sources of ratio 2, float32
    assert cache.window_bytes(FLASH) == (40 + 3) * ring + tails
    short, long = (cache.abstract_arrays(FLASH, numerics.RELEASED, 1, n) for n in (1 << 10, 1 << 20))
    assert short.window == long.window and short.tail_gates == long.tail_gates


def touch(arrays: cache.CacheArrays, pools: tuple, start, main_kv, index_key, slot, selection):
    """Write an entry of a source of every ratio, and read keys and a selection back."""
    arrays = arrays.replace(main_kv=pools[0], index_key=pools[1])
    keys = CachedBlock(FLASH, numerics.RELEASED, start, jnp.ones_like(start), 1, arrays)
    read, main, index = [], dict(pools[0]), dict(pools[1])
    for ratio in source_ratios(FLASH):
        name, layout = f"r{ratio}", keys.layouts[ratio]
        place = keys.places(ratio, (start // ratio)[:, None])
        main[name] = layout.write_main(main[name], slot, *place, main_kv, selection[:, :1] >= 0)
        index[name] = layout.write_index(index[name], slot, *place, index_key, selection[:, :1] >= 0)
        read.append(layout.read_main(main[name], slot, *keys.places(ratio, selection)).sum())
        read.append(layout.read_index(index[name], slot, keys.page_table[:, :8]).sum())
    return (main, index), jnp.stack(read)


def test_a_tpu_compiler_finds_890_bytes_a_token_too():
    """Hidden padding would show among the arguments, and a copy of a pool among the temporaries."""
    tokens = 1 << 18
    arrays = cache.abstract_arrays(FLASH, numerics.RELEASED, 1, tokens)
    pools = (arrays.main_kv, arrays.index_key)
    small = dataclasses.replace(arrays, main_kv={}, index_key={})
    entry = [jax.ShapeDtypeStruct((1, 1, d), jnp.bfloat16) for d in (FLASH.head_dim, FLASH.index_head_dim)]

    def step(pools, page_table, *rest):
        state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), small).replace(page_table=page_table)
        return touch(state, pools, *rest)

    rest = (arrays.page_table, spec((1,)), *entry, spec(()), spec((1, FLASH.index_topk)))
    memory = compile_for("v5e", step, pools, *rest, donate=0).memory_analysis()
    assert memory.argument_size_in_bytes / tokens == pytest.approx(890, rel=0.02)
    assert memory.alias_size_in_bytes / tokens == pytest.approx(890, rel=0.02)  # updated in place
    assert memory.temp_size_in_bytes < 8 << 20


def test_largest_tile():
    for count in (1, 7, 12, 64, 2048):
        for limit in (0.1, 1, 5, 63, 64, 1e9):
            tile = largest_tile(count, limit)
            assert count % tile == 0 and (tile <= limit or tile == 1)
            assert not any(count % n == 0 for n in range(tile + 1, int(min(limit, count)) + 1))


LONG = {
    "num_hidden_layers": 3,
    "compress_ratios": [2, 1, 1],
    "kv_source_layer_ids": [0, 1],
    "index_source_layer_ids": [0, 1, 2],
    "candidate_source_layer_id": 1,
    "candidate_topk_blocks": 64,
    "candidate_block_size": 4,
    "index_topk": 8,
    "n_routed_experts": 3,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 2,
    "max_position_embeddings": 1 << 20,
}


@functools.cache
def long_step_memory(budget: int) -> int:
    """Temporary bytes of a chunk of 2,048 tokens at 300,000 entries of a tiny model."""
    mapping = random_legal_config(12)
    mapping["text_config"] |= LONG
    config = ModelConfig.from_json(mapping)
    arrays = cache.abstract_arrays(config, numerics.FLOAT32, 1, 300_000)
    params = abstract_params(config, numerics.FLOAT32)
    step = functools.partial(model.extend, config, numerics.FLOAT32, temporary_bytes=budget)
    compiled = (
        jax.jit(step, donate_argnums=1).lower(params, arrays, spec((1, 2048)), spec((1,)), spec((1,)), {}).compile()
    )
    return compiled.memory_analysis().temp_size_in_bytes


def test_a_long_chunk_at_a_long_context_stays_inside_the_budget():
    assert long_step_memory(TEMPORARY_BYTES) <= TEMPORARY_BYTES


def test_without_a_budget_it_would_not():
    """Negative control: the scores alone are 2,048 x 300,000 numbers."""
    assert long_step_memory(1 << 50) > 4 * 2048 * 300_000


@pytest.mark.parametrize("budget", [1 << 14, 1 << 17])
def test_tiles_change_no_number(budget):
    """The same block with tiles of a few queries and pages: equal selections, logits to rounding."""
    mapping = random_legal_config(12)
    mapping["text_config"] |= {**LONG, "candidate_topk_blocks": 4}
    config = ModelConfig.from_json(mapping)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda s: jnp.asarray(rng.standard_normal(s.shape) * 0.1, s.dtype), abstract_params(config, numerics.FLOAT32)
    )
    ids = jnp.asarray(rng.integers(3, config.vocab_size, (1, 32)))

    @functools.partial(jax.jit, static_argnums=0)
    def step(budget, params, arrays):
        record = {}
        logits, _ = model.extend(
            config, numerics.FLOAT32, params, arrays, ids, jnp.zeros(1, jnp.int32), jnp.full(1, 32), {}, None, None,
            None, "all", True, budget, record,
        )  # fmt: skip
        return logits, {layer: note["selection"] for layer, note in record.items()}

    arrays = cache.zero_arrays(config, numerics.FLOAT32, 1, 512)
    logits, selections = step(TEMPORARY_BYTES, params, arrays)
    tiled, chosen = step(budget, params, arrays)
    np.testing.assert_allclose(tiled, logits, rtol=0, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, chosen, selections)
    assert all((rows >= 0).any() for rows in selections.values())
