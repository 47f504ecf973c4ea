"""Cache writes: the reference against pages and rings, the TPU kernels (interpreted) against the reference.

Everything is compared bit by bit. The inputs allow it: raw values are small integers times one power of two, so that
sums of squares are exact in any order, and cosines and sines have 8 bits, so that products with bf16 numbers are exact.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from dsv41_jax import quant, rings, rope
from dsv41_jax.norms import RMSNorm
from dsv41_jax.numerics import RELEASED
from dsv41_jax.pages import PageLayout
from pallas_kernels import kv_write
from pallas_kernels.implementation import KernelError
from pallas_kernels.kv_write import lanes, reference

EPS = 1e-20
few = settings(max_examples=12)
seeds = st.integers(0, 2**31)


@functools.cache
def op(name: str, implementation: str, **options):
    """A jitted write; the same arrays compile it once."""
    return jax.jit(functools.partial(getattr(kv_write, name), eps=EPS, implementation=implementation, **options))


def rows(rng: np.random.Generator, b: int, n: int, d: int, rope_dim: int) -> tuple:
    """raw, norm, cos, sin. A row of one magnitude has latents equal to the norm's weights: on ties of the formats."""
    kind = rng.integers(0, 3, (b, n, 1))
    integers = rng.integers(-15, 16, (b, n, d))
    raw = np.where(kind == 0, np.sign(integers - 0.5) * 4, np.where(kind == 1, integers, 0 * integers))
    raw = raw * 2.0 ** rng.integers(-20, 20, (b, n, 1))
    far = rng.choice([0, 0, 0, -90, -60, 9, 110], d // 32).repeat(32)  # all zeros, or saturation of the scale
    norm = rng.choice([-1, 1], d) * rng.integers(1, 33, d) / 4 * 2.0 ** (rng.integers(-1, 2, d // 32).repeat(32) + far)
    turn = rng.uniform(0, 6, (b, n, rope_dim // 2))
    angles = [jnp.asarray(f(turn), jnp.bfloat16).astype(jnp.float32) for f in (np.cos, np.sin)]
    return jnp.asarray(raw, jnp.bfloat16), jnp.asarray(norm, jnp.bfloat16), *angles


def places(rng: np.random.Generator, b: int, n: int, entries: int) -> tuple:
    """page, place, keep and how many pages: consecutive entries of each row, often up to the end of a page."""
    per_row = n // entries + 2
    table = rng.permutation(b * per_row).reshape(b, per_row)
    first = rng.choice([0, entries - 1, entries - n % entries, int(rng.integers(0, entries))], b)
    entry = first[:, None] + np.arange(n)
    page = np.take_along_axis(table, entry // entries, axis=1)
    keep = rng.random((b, n)) < rng.choice([0.0, 0.7, 1.0], (b, 1))
    return jnp.asarray(page, jnp.int32), jnp.asarray(entry % entries, jnp.int32), jnp.asarray(keep), b * per_row


def old(rng: np.random.Generator, *shape: int, dtype: type = np.int32) -> jax.Array:
    """What a pool holds before: any bits."""
    kinds = np.iinfo(dtype)
    return jnp.asarray(rng.integers(kinds.min, kinds.max, shape, dtype=dtype, endpoint=True))


def assert_equal(got, want):
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(np.asarray(g).view(np.uint8), np.asarray(w).view(np.uint8))


def normed(raw, norm):
    return RMSNorm(EPS, RELEASED).apply({"params": {"weight": norm}}, raw)


@pytest.mark.parametrize("ratio", [1, 2])
def test_reference_writes_what_pages_write(ratio):
    rng = np.random.default_rng(ratio)
    layout = PageLayout(ratio, 96, 64, True, jnp.dtype(jnp.bfloat16))
    page, place, keep, pages = places(rng, 2, 9, layout.entries)
    slot = jnp.int32(1)
    raw, norm, cos, sin = rows(rng, 2, 9, 96, 32)
    words = old(rng, *layout.abstract_main(2, pages)["words"].shape)

    @jax.jit
    def main(raw, norm, cos, sin, words):
        latent = normed(raw, norm)
        values = rope.rotate_tail(latent, cos, sin, RELEASED)
        return layout.write_main({"words": words}, slot, page, place, values, keep)["words"], latent

    write = op("main_entries", "reference", page_entries=layout.entries, page_rows=layout.main_rows)
    got = write(raw, norm, cos, sin, words, slot, page, place, keep)
    assert_equal(got, main(raw, norm, cos, sin, words))

    raw, norm, cos, sin = rows(rng, 2, 9, 64, 32)
    pool = {name: old(rng, *spec.shape) for name, spec in layout.abstract_index(2, pages).items()}

    @jax.jit
    def index(raw, norm, cos, sin, pool):
        keys = rope.rotate_tail(normed(raw, norm), cos, sin, RELEASED)
        new = layout.write_index(pool, slot, page, place, keys, keep)
        return new["codes"], new["scales"]

    write = op("index_entries", "reference", page_entries=layout.entries)
    got = write(raw, norm, cos, sin, pool["codes"], pool["scales"], slot, page, place, keep)
    assert_equal(got, index(raw, norm, cos, sin, pool))


def test_reference_writes_what_rings_write():
    rng = np.random.default_rng(3)
    raw, norm, cos, sin = rows(rng, 2, 20, 64, 32)
    ring = {"codes": old(rng, 2, 2, 16, 64, dtype=np.uint8), "scales": old(rng, 2, 2, 2, 16, dtype=np.uint8)}
    start, n_valid = jnp.array([5, 40]), jnp.array([20, 3])

    @jax.jit
    def window(raw, norm, cos, sin, ring):
        values = rope.rotate_tail(normed(raw, norm), cos, sin, RELEASED)
        stored = rings.stored_form(values, RELEASED)
        new = rings.write_window(ring, 1, stored, start, n_valid)
        return new["codes"], new["scales"], stored["codes"], stored["scales"]

    got = op("window_rows", "reference")(raw, norm, cos, sin, ring["codes"], ring["scales"], 1, start, n_valid)
    assert_equal(got, window(raw, norm, cos, sin, ring))


# A few entries of released size in pages of 64; more than a tile of a row, nine words each, in pages of 128.
@pytest.mark.parametrize(("b", "n", "d", "rope_dim", "entries"), [(3, 5, 512, 64, 64), (1, 150, 64, 32, 128)])
def test_main_entries(b, n, d, rope_dim, entries):
    page_rows = -(-entries * reference.main_words(d) // 128)
    options = {"page_entries": entries, "page_rows": page_rows}

    @few
    @given(seeds)
    def check(seed):
        rng = np.random.default_rng(seed)
        page, place, keep, pages = places(rng, b, n, entries)
        pool = old(rng, 2, pages * page_rows, 128)
        arguments = *rows(rng, b, n, d, rope_dim), pool, jnp.int32(rng.integers(2)), page, place, keep
        want = op("main_entries", "reference", **options)(*arguments)
        assert_equal(op("main_entries", "interpret", **options)(*arguments), want)
        assert bool(keep.any()) or bool((want[0] == pool).all())

    check()


# Two pages share a row of scales (64) or none do (128).
@pytest.mark.parametrize(("b", "n", "d", "rope_dim", "entries"), [(3, 5, 128, 64, 64), (1, 150, 96, 32, 128)])
def test_index_entries(b, n, d, rope_dim, entries):
    @few
    @given(seeds)
    def check(seed):
        rng = np.random.default_rng(seed)
        page, place, keep, pages = places(rng, b, n, entries)
        pools = old(rng, 2, pages, -(-entries * (d // 8) // 128), 128), old(rng, 2, -(-pages * entries // 128), 128)
        arguments = *rows(rng, b, n, d, rope_dim), *pools, jnp.int32(rng.integers(2)), page, place, keep
        want = op("index_entries", "reference", page_entries=entries)(*arguments)
        assert_equal(op("index_entries", "interpret", page_entries=entries)(*arguments), want)

    check()


# A decode step; a block longer than its ring, which comes back to the piece it began in; a ring of an odd size.
@pytest.mark.parametrize(
    ("b", "t", "d", "rope_dim", "size"), [(3, 1, 512, 64, 144), (2, 40, 64, 32, 24), (2, 6, 96, 96, 21)]
)
def test_window_rows(b, t, d, rope_dim, size):
    @few
    @given(seeds)
    def check(seed):
        rng = np.random.default_rng(seed)
        ring = old(rng, 2, b, size, d, dtype=np.uint8), old(rng, 2, b, d // 32, size, dtype=np.uint8)
        start = rng.choice([0, size - 1, 10 * size - t, int(rng.integers(0, 5 * size))], b)
        n_valid = rng.choice([0, 1, t, int(rng.integers(0, t + 1))], b)
        arguments = *rows(rng, b, t, d, rope_dim), *ring, jnp.int32(rng.integers(2)), start, n_valid
        want = op("window_rows", "reference")(*arguments)
        assert_equal(op("window_rows", "interpret")(*arguments), want)

    check()


def test_quantisers_on_every_bf16():
    """All finite bf16 numbers but subnormals, next to numbers of their size: codes and scales of `quant`."""
    bits = np.arange(2**16).astype(np.uint16)
    x = bits[(bits & 0x7F80 != 0x7F80) & ((bits & 0x7F80 != 0) | (bits & 0x7F == 0))].view(jnp.bfloat16)
    rng = np.random.default_rng(0)
    order = np.argsort(np.abs(x.astype(np.float32)) * rng.choice([1, 4, 64, 4096], x.size), kind="stable")
    x = jnp.asarray(np.pad(x[order], (0, -x.size % 2048)).reshape(-1, 128))

    def kernel(x, *out):
        column = x[...].astype(jnp.float32)
        values = [part for quantise in (lanes.q4_main, lanes.q4_index, lanes.q8) for part in quantise(column)]
        for ref, value in zip(out, values, strict=True):
            ref[...] = value

    got = pl.pallas_call(kernel, [jax.ShapeDtypeStruct(x.shape, jnp.int32)] * 6, interpret=True)(x)

    @jax.jit
    def expected(x):
        parts = []
        for quantise, block in ((quant.q4_main, 16), (quant.q4_index, 32), (quant.q8, 32)):
            codes, scales = quantise(x)
            parts += [codes, jnp.repeat(scales, block, axis=-1)]
        return [jax.lax.bitcast_convert_type(part, jnp.uint8).astype(jnp.int32) for part in parts]

    for name, g, w in zip(("q4m", "q4m s", "q4i", "q4i s", "q8", "q8 s"), got, expected(x), strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w), err_msg=name)


def test_errors():
    rng = np.random.default_rng(0)
    raw, norm, cos, sin = rows(rng, 1, 2, 64, 32)
    place = jnp.zeros((1, 2), jnp.int32)
    words, keep = old(rng, 1, 5, 128), jnp.ones((1, 2), bool)
    good = {"page_entries": 64, "page_rows": 5, "eps": EPS}

    def main(raw=raw, norm=norm, cos=cos, words=words, place=place, **changed):
        return kv_write.main_entries(raw, norm, cos, sin, words, 0, place, place, keep, **{**good, **changed})

    for changed, message in (
        ({"implementation": "triton"}, "triton"),
        ({"raw": raw.astype(jnp.float32)}, "float32"),
        ({"raw": raw[..., :40]}, "40 channels"),
        ({"norm": norm[:3]}, "norm"),
        ({"cos": cos[..., :3]}, "rotate"),
        ({"words": words[..., :64]}, "words"),
        ({"place": place[:, :1]}, "page"),
        ({"page_rows": 6}, "page_rows=6"),
    ):
        with pytest.raises(KernelError, match=message):
            main(**changed)
    scales = old(rng, 1, 1, 128)
    with pytest.raises(KernelError, match="page_entries=48"):
        kv_write.index_entries(
            raw, norm, cos, sin, old(rng, 1, 2, 3, 128), scales, 0, place, place, keep,
            page_entries=48, eps=EPS, implementation="interpret",
        )  # fmt: skip
    ring = old(rng, 1, 1, 24, 64, dtype=np.uint8), old(rng, 1, 1, 3, 24, dtype=np.uint8)
    with pytest.raises(KernelError, match="ring"):
        kv_write.window_rows(raw, norm, cos, sin, *ring, 0, place[:, 0], place[:, 0], eps=EPS)
