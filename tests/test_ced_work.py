"""What encoder-only prefill saves, counted from jaxprs at released sizes: nothing is compiled, no array is made."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dsv41_jax import accounting, cache, model, numerics
from dsv41_jax.ced import Reading
from dsv41_jax.checkpoint.released import abstract_params
from dsv41_jax.config import load_config
from dsv41_jax.runner import step_sizes

BLOCK = step_sizes(numerics.RELEASED)[0]

CONFIG = load_config(Path(__file__).parent.parent / "configs/flash.py")  # 20 + 20 layers, a window of 128
TOKENS = 4096


@functools.cache
def step_work(layers: str) -> int:
    """Floating-point operations of a block of one prompt."""
    block, kind = BLOCK, numerics.RELEASED
    spec = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    columns = CONFIG.engram_layout.columns
    memory = {f"l{layer}": spec((1, block, columns)) for layer in CONFIG.engram_layer_ids}
    step = functools.partial(model.extend, CONFIG, kind, layers=layers)
    arrays = cache.abstract_arrays(CONFIG, kind, 1, TOKENS)
    work = accounting.flops(
        step, abstract_params(CONFIG, kind), arrays, spec((1, block)), spec((1,)), spec((1,)), memory
    )
    return sum(work.values())


def prompt_work(mode: str) -> int:
    """Floating-point operations of reading a prompt of 4,096 tokens."""
    reading = Reading.of(CONFIG, mode, TOKENS)
    return sum(step_work(layers) for layers, _, _ in reading.blocks(BLOCK))


def test_ced_is_at_most_0_56_of_exact():
    ratio = prompt_work("ced") / prompt_work("exact")
    print(f"encoder-only prefill of {TOKENS} tokens: {ratio:.3f} of the work of exact prefill")
    assert 0.5 < ratio <= 0.56


def test_every_token_is_read_once_in_blocks():
    for mode in ("ced", "exact"):
        for n in (1, 127, 128, 129, 1000, TOKENS):
            blocks = list(Reading.of(CONFIG, mode, n).blocks(64))
            assert [first for _, first, _ in blocks] == [0, *(stop for _, _, stop in blocks[:-1])]
            assert blocks[-1][2] == n and blocks[-1][0] == "all"
            everything = sum(stop - first for layers, first, stop in blocks if layers == "all")
            assert everything == (n if mode == "exact" else min(n, CONFIG.sliding_window))


@pytest.mark.parametrize("hit", [129, 256, 3000])
def test_a_prefix_is_replayed_for_one_window(hit):
    for n in (hit + 1, hit + 100, hit + 1000):
        reading = Reading.of(CONFIG, "ced", n, hit)
        assert (reading.begin, reading.split, reading.end) == (hit - 128, n - 128, n)
