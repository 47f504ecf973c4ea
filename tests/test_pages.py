"""Pages of packed entries: the layout bit by bit, exact values back, and writes that touch nothing else."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv41_jax import numerics, quant
from dsv41_jax.config import load_config
from dsv41_jax.pages import PageLayout
from module_golden import BF16, assert_same_bits, load

PAGES, SOURCES = 6, 2
SHAPES = [(1, 512, 128), (2, 512, 128), (2, 64, 32), (1, 96, 64)]  # ratio, head_dim, index_dim


def layout_of(ratio: int, head_dim: int, index_dim: int, kind: numerics.Numerics = numerics.RELEASED) -> PageLayout:
    return PageLayout(ratio, head_dim, index_dim, kind.quantize_activations, kind.dtype)


def empty(specs: dict) -> dict:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), specs)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """bf16 numbers of very different sizes, the golden edge rows of the quantisers among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32) * 2.0 ** rng.integers(-12, 6, (*shape[:-1], 1))
    x = x.astype(BF16).reshape(-1, shape[-1])
    golden = np.asarray(load("quant")["x"])
    golden = golden[np.abs(golden.astype(np.float32)).max(axis=1) < 1e30]  # larger ones overflow bf16 by design
    width = min(golden.shape[1], shape[-1])
    x[: len(golden), :width] = golden[: len(x), :width]
    return x.reshape(shape)


def test_released_sizes():
    config = load_config(Path(__file__).parent.parent / "configs/flash.py")
    for ratio, entries, rows, index_rows in ((1, 128, 72, 16), (2, 64, 36, 8)):
        layout = PageLayout.of(config, numerics.RELEASED, ratio)
        assert (layout.entries, layout.main_rows, layout.index_rows) == (entries, rows, index_rows)
        assert 4 * layout.main_words == 288
        assert layout.main_rows * 128 == layout.entries * layout.main_words  # no word is lost
        index_bytes = 4 * (layout.index_rows * 128 + layout.index_scale_words)
        assert index_bytes == 68 * entries


def placed(layout: PageLayout, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """n different places of the pool, shuffled: page and place int32 [1, n]."""
    flat = np.random.default_rng(seed).permutation(PAGES * layout.entries)[:n].astype(np.int32)
    return flat[None] // layout.entries, flat[None] % layout.entries


@functools.partial(jax.jit, static_argnums=0)
def written(layout: PageLayout, main, index, slot, page, place, values, keys, keep):
    return (
        layout.write_main(main, slot, page, place, values, keep),
        layout.write_index(index, slot, page, place, keys, keep),
    )


@functools.partial(jax.jit, static_argnums=0)
def read(layout: PageLayout, main, index, slot, page, place):
    keys = layout.read_index(index, slot, jnp.arange(PAGES)[None])
    return layout.read_main(main, slot, page, place), keys[0][page * layout.entries + place]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_come_back_as_the_quantisers_give_them(shape):
    layout = layout_of(*shape)
    n = PAGES * layout.entries // 2
    page, place = placed(layout, n)
    values, keys = numbers(1, n, layout.head_dim), numbers(1, n, layout.index_dim, seed=1)
    pools = empty(layout.abstract_main(SOURCES, PAGES)), empty(layout.abstract_index(SOURCES, PAGES))
    pools = written(layout, *pools, 1, page, place, values, keys, np.ones((1, n), bool))
    main, index = read(layout, *pools, 1, page, place)
    assert_same_bits(main, quant.fake_q4_main(values))
    assert_same_bits(index, quant.fake_q4_index(keys))
    for other in read(layout, *pools, 0, page, place):  # the other source
        assert not np.asarray(other).any()


@pytest.mark.parametrize("kind", [numerics.FLOAT32, numerics.NOQUANT], ids=lambda k: k.name)
def test_plain_entries_come_back_unchanged(kind):
    layout = layout_of(2, 64, 32, kind)
    page, place = placed(layout, 40)
    values, keys = numbers(1, 40, 64), numbers(1, 40, 32, seed=1)
    pools = empty(layout.abstract_main(SOURCES, PAGES)), empty(layout.abstract_index(SOURCES, PAGES))
    pools = written(layout, *pools, 0, page, place, values, keys, np.ones((1, 40), bool))
    for got, want in zip(read(layout, *pools, 0, page, place), (values, keys), strict=True):
        assert got.dtype == kind.dtype
        np.testing.assert_array_equal(np.asarray(got, np.float32), want.astype(np.float32))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_writing_touches_nothing_else(shape):
    """What stands in other places, and what `keep` leaves out, keeps its bits; a written place is overwritten."""
    layout = layout_of(*shape)
    n = PAGES * layout.entries
    page, place = placed(layout, n)
    values, keys = numbers(1, n, layout.head_dim), numbers(1, n, layout.index_dim, seed=1)
    pools = empty(layout.abstract_main(SOURCES, PAGES)), empty(layout.abstract_index(SOURCES, PAGES))
    pools = written(layout, *pools, 1, page, place, values, keys, np.ones((1, n), bool))
    keep = np.random.default_rng(2).random((1, n)) < 0.3
    again = written(layout, *pools, 1, page, place, -2 * values, -2 * keys, keep)
    for got, want, source in zip(read(layout, *again, 1, page, place), (values, keys), "mi", strict=True):
        fake = quant.fake_q4_main if source == "m" else quant.fake_q4_index
        assert_same_bits(got, np.where(keep[..., None], fake(-2 * want), fake(want)))


def test_main_kv_layout_bit_by_bit():
    """One entry decoded by hand: nibble k of word w is channel 64k + w, byte b of scale word w is scale 8b + w."""
    layout = layout_of(2, 512, 128)
    values = numbers(1, 1, 512, seed=3)
    page, place = np.array([[4]]), np.array([[37]])
    pool = empty(layout.abstract_main(SOURCES, PAGES))
    pool = layout.write_main(pool, 1, page, place, jnp.asarray(values), np.ones((1, 1), bool))
    flat = np.asarray(pool["words"][1]).view(np.uint32).reshape(PAGES, 36 * 128)[4]
    words = flat[37 * 72 : 38 * 72].astype(np.int64)
    assert not np.delete(flat, np.arange(37 * 72, 38 * 72)).any()
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    codes = [table[words[c % 64] >> 4 * (c // 64) & 15] for c in range(512)]
    raw = np.array([words[64 + s % 8] >> 8 * (s // 8) & 255 for s in range(32)], np.uint8)
    scales = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert_same_bits(
        (np.array(codes) * np.repeat(scales, 16)).astype(BF16), np.asarray(quant.fake_q4_main(values))[0, 0]
    )


@pytest.mark.parametrize("ratio", [1, 2])
def test_index_key_layout_bit_by_bit(ratio):
    """Word w of key e is word w * entries + e of the page; nibble k of it is channel 16k + w; scale bytes beside."""
    layout = layout_of(ratio, 512, 128)
    size = layout.entries
    keys = numbers(1, 1, 128, seed=4)
    pool = empty(layout.abstract_index(SOURCES, PAGES))
    pool = layout.write_index(pool, 0, np.array([[3]]), np.array([[5]]), jnp.asarray(keys), np.ones((1, 1), bool))
    words = np.asarray(pool["codes"][0, 3]).view(np.uint32).ravel()[5::size].astype(np.int64)
    scale_word = np.asarray(pool["scales"][0]).view(np.uint32).ravel()[3 * size + 5]
    assert np.count_nonzero(np.asarray(pool["scales"])) == 1
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    codes = np.array([table[words[c % 16] >> 4 * (c // 16) & 15] for c in range(128)])
    scales = 2.0 ** (np.array([scale_word >> 8 * b & 255 for b in range(4)], np.float32) - 127)
    assert_same_bits((codes * np.repeat(scales, 32)).astype(BF16), np.asarray(quant.fake_q4_index(keys))[0, 0])


@pytest.mark.parametrize("kind", [numerics.RELEASED, numerics.FLOAT32], ids=lambda k: k.name)
@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_a_copied_page_holds_the_same_and_the_others_stay(shape, kind):
    layout = layout_of(*shape, kind)
    n = PAGES * layout.entries
    page, place = (x.ravel()[None] for x in np.divmod(np.arange(n), layout.entries))
    values, keys = numbers(1, n, layout.head_dim), numbers(1, n, layout.index_dim, seed=1)
    pools = empty(layout.abstract_main(SOURCES, PAGES)), empty(layout.abstract_index(SOURCES, PAGES))
    for slot in range(SOURCES):
        pools = written(layout, *pools, slot, page, place, values * (1 + slot), keys, np.ones((1, n), bool))
    copied = jax.jit(layout.copy_page)(*pools, jnp.int32(1), jnp.int32(4))
    for slot in range(SOURCES):
        before, after = read(layout, *pools, slot, page, place), read(layout, *copied, slot, page, place)
        for old, new in zip(before, after, strict=True):
            old, new = (np.asarray(x)[0].reshape(PAGES, layout.entries, -1) for x in (old, new))
            assert_same_bits(new[4], old[1])
            assert_same_bits(np.delete(new, 4, axis=0), np.delete(old, 4, axis=0))
