"""The key store of the kernels against the reference's: outputs, and choices and state bit by bit.

On a CPU "auto" takes every operation's reference, so what differs is how the store calls them: places, floors, padding,
windows, pools.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax import csa2, quant, rings
from dsv41_jax.blocks import Sharing, csa2_attention
from dsv41_jax.cache import CacheArrays, zero_arrays
from dsv41_jax.kernel_block import attend_everything, key_store
from dsv41_jax.kernel_params import pack_params
from dsv41_jax.layer_loop import pick
from dsv41_jax.numerics import RELEASED
from dsv41_jax.runner import Runner
from layer_by_layer import layers
from tiny_golden import assert_rms, prompt

BY_KERNELS = dataclasses.replace(RELEASED, implementation="auto")
BATCH, MAX_LEN, BLOCK = 3, 512, 16
BUDGET = 1 << 18  # several tiles


def first_state(config) -> CacheArrays:
    """Pages in no order; floors of the windows that differ by row and side."""
    arrays = zero_arrays(config, RELEASED, BATCH, MAX_LEN)
    table = np.random.default_rng(5).permutation(arrays.page_table.size).reshape(arrays.page_table.shape)
    return arrays.replace(
        page_table=jnp.asarray(table, jnp.int32),
        encoder_floor=jnp.asarray([3, 0, 40], jnp.int32),
        decoder_floor=jnp.asarray([5, 30, 0], jnp.int32),
    )


def program(config, numerics, layer):
    """Attention of one layer."""

    @jax.jit
    def run(params, arrays, y, pool, start, n_valid, write_floor):
        keys = key_store(numerics)(config, numerics, start, n_valid, y.shape[1], arrays, write_floor, BUDGET)
        shared = Sharing(jnp.full((*y.shape[:2], config.index_topk), -1, jnp.int32), pool)
        weights = pick(params["layers"], jnp.int32(layer.number), numerics.kernels)["attn"]
        places = (layer.number, layer.kv_slot, layer.index_slot)
        out, arrays = csa2_attention(
            config, numerics, layer.kind, params, weights, keys, arrays, shared, *places, pick, y
        )
        return out, arrays, shared.selection, shared.pool

    return run


def random_pool(rng: np.random.Generator, t: int, blocks: int, width: int) -> np.ndarray:
    """Ascending block numbers with the first block in them, some of them missing (-1 at the end)."""
    pool = np.sort(np.argsort(rng.random((BATCH, t, blocks)), axis=-1)[..., :width], axis=-1)
    pool[rng.random(pool.shape) < 0.5] = blocks
    pool[..., 0] = 0
    pool = np.sort(pool, axis=-1)
    pool[..., 1:][pool[..., 1:] == pool[..., :-1]] = blocks  # the first block once
    pool = np.sort(pool, axis=-1)
    return np.where(pool == blocks, -1, pool).astype(np.int32)


def steps(tiny, number: int, arrays: CacheArrays | None = None, decode: bool = False) -> CacheArrays:
    """Ragged blocks, a rewind, and single tokens through one layer both ways; returns the state of the reference."""
    model = tiny("released")
    config = model.config
    layer = next(one for one in layers(config) if one.number == number)
    both = [program(config, numerics, layer) for numerics in (RELEASED, BY_KERNELS)]
    states = [first_state(config) if arrays is None else arrays] * 2
    rng = np.random.default_rng(number)
    blocks = -(-MAX_LEN // config.candidate_block_size)
    width = min(config.candidate_topk_blocks, blocks)
    start, write_floor = np.array([0, 1, 120]), np.array([6, 0, 127])
    for step in range(8 if decode else 6):
        t = BLOCK if step < 6 else 1
        n_valid = np.array([t, 0, t]) if step == 2 else rng.integers(0, t + 1, BATCH)
        y = jnp.asarray(rng.standard_normal((BATCH, t, config.hidden_size)), jnp.bfloat16)
        pool = jnp.asarray(random_pool(rng, t, blocks, width))
        numbers = [jnp.asarray(x, jnp.int32) for x in (start, n_valid, write_floor)]
        results = [run(model.params, state, y, pool, *numbers) for run, state in zip(both, states, strict=True)]
        valid = np.arange(t) < n_valid[:, None]
        (want, _, *chosen), (got, _, *ours) = results
        got, want = (np.asarray(x, np.float32)[valid] for x in (got, want))
        # Tiles of other sizes sum in another order: in a few rows a bf16 rounding goes the other way.
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-3)
        assert (got == want).sum() >= 0.95 * got.size
        for mine, right in zip(ours, chosen, strict=True):  # a pool's order has no meaning
            mine, right = (np.sort(np.asarray(x)[valid], axis=-1) for x in (mine, right))
            np.testing.assert_array_equal(mine, right)
        states = [result[1] for result in results]
        jax.tree.map(np.testing.assert_array_equal, states[1], states[0])
        start = start + n_valid - (np.minimum(3, n_valid) if step == 4 else 0)
    return states[0]


@pytest.mark.parametrize("number", [0, 2], ids=["window", "ratio 2"])
def test_window_and_full_layers(tiny, number):
    steps(tiny, number, decode=True)


def test_candidate_source_and_the_layer_that_searches_its_pool(tiny):
    steps(tiny, 8, arrays=steps(tiny, 6))


@pytest.mark.parametrize("size", [5, 19])
def test_drafts_see_everything(size):
    """Also in blocks of more queries than a ring is read for."""
    rng = np.random.default_rng(size)
    shapes = ((2, size, 2, 64), (2, size, 64), (2, 16, 64))
    q, own, before = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    exists = np.concatenate([rng.random((2, 16)) < 0.7, np.ones((2, size), bool)], axis=1)
    sink = jnp.asarray(rng.standard_normal(2), jnp.float32)
    stored = rings.joined(*(rings.stored_form(rows, RELEASED) for rows in (before, own)))
    keys = quant.fake_q8(jnp.concatenate([before, own], axis=1))
    mask = jnp.broadcast_to(exists[:, None], (2, size, 16 + size))
    want = np.asarray(csa2.attend(q, keys, mask, None, None, sink, RELEASED), np.float32)
    for implementation in ("reference", "interpret"):
        numerics = dataclasses.replace(RELEASED, implementation=implementation)
        got = np.asarray(attend_everything(q, stored, exists, sink, numerics), np.float32)
        # The keys of a query stand in another order: p may be rounded to the other neighbour, then the result.
        np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-8)


@pytest.fixture(scope="module")
def by_kernels(tiny) -> ds.Model:
    """Tiny model A whose operations are all called as kernels are."""
    runner = tiny("released")._runner
    other = Runner(runner.config, BY_KERNELS, runner.params, runner.hasher, runner.tables)
    other.prefill_block = runner.prefill_block
    return ds.Model(other, None)


@pytest.mark.slow
def test_a_whole_model(tiny, by_kernels):
    """Encoder-only prefill of ragged rows, decoding, a rewind, a verify block, drafts: the rolled layer loop."""
    ids = prompt("long")[:, :70].repeat(2, axis=0)
    lengths = np.array([70, 37])
    logits = {}
    for name, model in (("reference", tiny("released")), ("kernels", by_kernels)):
        found, cache = model.prefill(ids, lengths, mode="ced")
        seen = [found]
        for token in (5, 6):
            found, cache = model.decode(cache, np.array([token, token + 1]))
            seen.append(found)
        found, cache = model.decode(cache.rewind(lengths), np.array([[5, 6, 7], [8, 9, 10]]))
        seen += [found[:, 0], found[:, 2], model.draft(cache, np.array([11, 12]))[1][:, 0]]
        logits[name] = np.stack([np.asarray(x, np.float32) for x in seen])
    assert_rms(logits["kernels"], logits["reference"], 0.05, argmax=0.9)
    np.testing.assert_array_equal(logits["kernels"][0], logits["reference"][0])


@pytest.mark.slow
def test_loss_of_packed_parameters(tiny, by_kernels):
    """The cacheless forward is the reference's, whatever the parameters were packed for."""
    runner = by_kernels._runner
    packed = jax.tree.map(lambda x: x, runner.params)
    model = ds.Model(Runner(runner.config, BY_KERNELS, pack_params(packed), runner.hasher, runner.tables), None)
    assert "words" in model.params["layers"]["ffn"]["experts"]["w1"]
    ids = prompt("short")
    assert float(model.loss(ids)) == float(tiny("released").loss(ids))
