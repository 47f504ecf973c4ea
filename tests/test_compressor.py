"""Compressor of ratio 1 and 2 through the cache: golden latents, the tokens that wait, and any split of a prompt."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_stack import BLOCK, CONFIG, empty_state, stack_params
from dsv41_jax import cache, compressor, quant, rings
from dsv41_jax.blocks import compressor_module
from dsv41_jax.cached_block import CachedBlock
from dsv41_jax.compressor import Compressor
from dsv41_jax.numerics import RELEASED
from dsv41_jax.rope import angles, layer_frequencies
from module_golden import assert_close, assert_same_bits, load, weights
from stored import stored_entries

GOLD = load("attention")
TOKENS = 12


@functools.cache
def params_of(ratio: int) -> dict:
    """The recorded compressor; the index key projection of the stack's layer, which the recording does not have."""
    borrowed = jax.tree.map(lambda w: w[0], stack_params()["compressors"]["r1"])
    return {**weights(GOLD, f"comp{ratio}.w."), "wk": borrowed["wk"], "k_norm": borrowed["k_norm"]}


def add(ratio: int, params: dict, state: cache.CacheArrays, y: jax.Array, start: jax.Array, n_valid: jax.Array):
    """New state and the latents of the block's groups."""
    found = []

    def watch(call, args, kwargs, context):
        if (type(context.module), context.method_name) == (Compressor, "entries"):
            found.append(args[0])
        return call(*args, **kwargs)

    block = CachedBlock(CONFIG, RELEASED, start, n_valid, y.shape[1], state)
    with nn.intercept_methods(watch):
        state = block.add_entries(state, compressor_module(CONFIG, RELEASED, ratio), params, y, 0)
    return state, found[0]


add_jitted = {ratio: jax.jit(functools.partial(add, ratio)) for ratio in (1, 2)}


def feed(ratio: int, state: cache.CacheArrays, begin: int, end: int, size: int = BLOCK, run=None):
    """Tokens begin .. end - 1 as one block of `size`, padded with other tokens; and the latents that complete."""
    x = np.roll(GOLD[f"comp{ratio}.x"], -begin, axis=1)[:, :size]
    run = run or add_jitted[ratio]
    state, latents = run(params_of(ratio), state, x, np.full(2, begin, np.int32), np.full(2, end - begin, np.int32))
    return state, np.asarray(latents)[:, : end // ratio - begin // ratio]


def check(ratio: int, prefill: int, run=None) -> cache.CacheArrays:
    state, latents = feed(ratio, empty_state(), 0, prefill, run=run)
    name = f"comp{ratio}.prefill{prefill}"
    assert (name in GOLD) == (latents.shape[1] > 0)
    if name in GOLD:
        assert_close(latents, GOLD[name])
    if ratio == 2:
        check_waiting(state, prefill)
    for position in range(prefill, TOKENS):
        # A real step of one token, or (ratio 1, broken programs) a padded block with one.
        state, latents = feed(ratio, state, position, position + 1, 1 if ratio == 2 and run is None else BLOCK, run)
        name = f"comp{ratio}.prefill{prefill}_decode{position}"
        assert (name in GOLD) == (latents.shape[1] == 1)
        if name in GOLD:
            assert_close(latents, GOLD[name])
    return state


def check_waiting(state: cache.CacheArrays, tokens: int) -> None:
    """Rows of an incomplete group wait in float32; golden's empty slots hold 0 and -inf and are never read here."""
    name = f"comp2.prefill{tokens}"
    for position in range(tokens - tokens % 2, tokens):
        slot = position % state.tail_values["r2"].shape[-2]
        for got, want in ((state.tail_values, "kv_state"), (state.tail_gates, "score_state")):
            got, want = got["r2"][0, :, slot], GOLD[f"{name}_{want}"][:, position % 2]
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)  # sums of 64 float32 terms
    empty = GOLD[f"{name}_score_state"][:, tokens % 2 :]
    assert (empty == -np.inf).all() and (GOLD[f"{name}_kv_state"][:, tokens % 2 :] == 0).all()


@functools.cache
def whole(ratio: int) -> cache.CacheArrays:
    return check(ratio, 8)


@pytest.mark.parametrize("prefill", [1, 7, 8])
@pytest.mark.parametrize("ratio", [1, 2])
def test_prefill_and_steps_equal_golden(ratio, prefill):
    state = check(ratio, prefill)
    name = f"r{ratio}"
    jax.tree.map(assert_same_bits, state.main_kv[name], whole(ratio).main_kv[name])
    jax.tree.map(assert_same_bits, state.index_key[name], whole(ratio).index_key[name])
    assert not any(
        x[TOKENS // ratio :].any() for x in stored_entries(CONFIG, RELEASED, state, ratio, 0, row=1)
    )  # nothing past the last group


@settings(max_examples=25)
@given(st.sampled_from([1, 2]), st.lists(st.integers(0, BLOCK), min_size=1, max_size=TOKENS))
def test_any_split_gives_the_same_entries(ratio, sizes):
    state, done = empty_state(), 0
    for size in [*sizes, TOKENS, TOKENS]:
        size = min(size, BLOCK, TOKENS - done)
        state, _ = feed(ratio, state, done, done + size)
        done += size
    equal = jax.tree.map(lambda a, b: bool((a == b).all()), state, whole(ratio))
    assert jax.tree.all(equal), equal


def test_an_incomplete_group_writes_no_entry():
    state, latents = feed(2, empty_state(), 0, 1)
    assert latents.shape[1] == 0
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves((state.main_kv, state.index_key)))


@functools.cache
def entries_jitted(layer: int):
    weights_of = jax.tree.map(lambda w: w[0], stack_params()["compressors"][f"r{CONFIG.compress_ratios[layer]}"])
    module = compressor_module(CONFIG, RELEASED, CONFIG.compress_ratios[layer])
    return jax.jit(functools.partial(module.apply, {"params": weights_of}, method="entries"))


def check_entries(layer: int, shift: int = 0, latent: np.ndarray | None = None) -> None:
    """Both cached forms of the stack's golden latents, rotated at the first position of their group."""
    gold = {name: GOLD[f"layer{layer}.own.prefill23.{name}"] for name in ("latent_prerope", "latent_cached", "index_k")}
    latent = gold["latent_prerope"] if latent is None else latent
    positions = np.arange(latent.shape[1]) * CONFIG.compress_ratios[layer] + shift
    main_kv, index_key = entries_jitted(layer)(latent, *angles(positions, layer_frequencies(CONFIG, True)))
    assert_close(quant.fake_q4_main(main_kv), gold["latent_cached"])
    assert_close(quant.fake_q4_index(index_key), gold["index_k"])


@pytest.mark.parametrize("layer", [1, 2])
def test_cached_entries_of_golden_latents(layer):
    check_entries(layer)


def test_an_entry_stands_at_the_first_position_of_its_group():
    """Negative control: at its last position, or unrotated, it is another entry."""
    with pytest.raises(AssertionError):
        check_entries(1, shift=1)
    with pytest.raises(AssertionError):
        check_entries(1, latent=GOLD["layer1.own.prefill23.latent_cached"])


def test_pooling_is_a_softmax_for_each_channel():
    module = compressor_module(CONFIG, RELEASED, 2)
    rng = np.random.default_rng(0)
    values, gates = rng.standard_normal((2, 3, 2, 64)).astype(np.float32)
    got = jax.jit(functools.partial(module.apply, method="pool"))({"params": params_of(2)}, values, gates)
    p = np.exp(gates.astype(np.float64))
    pooled = (p / p.sum(axis=1, keepdims=True) * values).sum(axis=1)
    normed = pooled / np.sqrt((pooled**2).mean(-1, keepdims=True)) * GOLD["comp2.w.norm.weight"].astype(np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float32), normed, rtol=2**-7)  # two roundings to bf16


MISTAKES = ("gates_ignored", "tail_forgotten", "two_roundings")


@functools.cache
def broken_add():
    """`add` of ratio 2 with a traced number that says which mistake is made: one compiled program for all."""

    def run(mistake, *args):
        softmax, write_rows, project = jax.nn.softmax, rings.write_rows, Compressor.project
        on = {name: mistake == i for i, name in enumerate(MISTAKES)}

        def even(x, axis):
            return jnp.where(on["gates_ignored"], 0.5, softmax(x, axis))

        def lost(ring, *rest):
            return jnp.where(on["tail_forgotten"], ring, write_rows(ring, *rest))

        def rounded(self, y):  # where the release keeps float32
            return tuple(jnp.where(on["two_roundings"], RELEASED.round_f32(p), p) for p in project(self, y))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compressor.jax.nn, "softmax", even)
            patch.setattr(rings, "write_rows", lost)
            patch.setattr(Compressor, "project", rounded)
            return add(2, *args)

    return jax.jit(run)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_compressors_fail_the_golden_comparison(mistake):
    """Negative control."""
    with pytest.raises(AssertionError):
        check(2, 7, run=functools.partial(broken_add(), MISTAKES.index(mistake)))


def test_without_a_mistake_the_switched_program_passes():
    check(2, 7, run=functools.partial(broken_add(), -1))
