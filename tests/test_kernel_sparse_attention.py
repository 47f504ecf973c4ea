"""The TPU kernel of sparse attention, interpreted, against the reference; the reference against what caches read."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_jax import kernel_inputs, rings
from dsv41_jax.numerics import RELEASED
from pallas_kernels.implementation import KernelError
from pallas_kernels.sparse_attention import Entries, WindowKeys, attend, entry_words, reference, tpu

# Kernel and reference sum the same products in another order. That may turn the rounding of a probability to bf16
# (2^-9 of it) and of the output (one unit in the last place of 8 bits). No key here is above 6 in magnitude.
ABSOLUTE, RELATIVE = 6 * 2.0**-9, 2.0**-7


@dataclass(frozen=True)
class Size:
    dim: int
    heads: int
    t: int
    rows: int
    width: int
    chosen: int
    padded: bool = False


RELEASED_SIZE = Size(dim=512, heads=64, t=1, rows=144, width=128, chosen=130)
VERIFY = Size(dim=96, heads=4, t=3, rows=24, width=16, chosen=20)
PREFILL = Size(dim=64, heads=20, t=40, rows=55, width=16, chosen=9)
WITHOUT_HISTORY = replace(PREFILL, t=16, rows=16, padded=True)
STORED = 300  # entries in a pool


def pool(rng: np.random.Generator, dim: int, padded: bool) -> np.ndarray:
    """Two sources of entries, one after the other through the rows or each in its own: any codes, E4M3 scales from the
    smallest subnormal to 1.
    """
    codes = rng.integers(0, 2**32, (2, STORED, dim // 8), dtype=np.uint32)
    scales = rng.integers(1, 0x39, (2, STORED, 4 * (entry_words(dim) - dim // 8)), dtype=np.uint8).view(np.uint32)
    words = np.concatenate([codes, scales], axis=-1)
    if padded:
        return np.pad(words, [(0, 0), (0, 0), (0, 128 - words.shape[-1])]).view(np.int32)
    flat = words.reshape(2, -1)
    return np.pad(flat, [(0, 0), (0, -flat.shape[1] % 128)]).reshape(2, -1, 128).view(np.int32)


def case(size: Size, seed: int = 0, end: tuple[int, int] = (100, 60), kept: float = 0.8) -> tuple:
    """Arguments of `attend` for two sequences.

    Args:
        end: tokens of each, counting the queries.
        kept: the fraction of selected places that hold an entry.
    """
    rng = np.random.default_rng(seed)
    entry = rng.integers(0, STORED, (2, size.t, size.chosen))
    exists = rng.random(entry.shape) < kept
    word = entry * (128 if size.padded else entry_words(size.dim))
    lane = np.where(exists, word % 128, rng.integers(0, 1 if size.padded else 128, entry.shape))
    entries = Entries(
        jnp.asarray(pool(rng, size.dim, size.padded)),
        jnp.int32(1),
        jnp.asarray(np.where(exists, word // 128, -1), jnp.int32),
        jnp.asarray(lane, jnp.int32),
        size.padded,
    )
    end = jnp.asarray(end, jnp.int32)
    codes, scales = kernel_inputs.window_ring(jax.random.key(seed), 3, 2, size.rows, size.dim)
    position = rings.ring_positions(end, size.rows)
    if size.t > 8:
        position = end[:, None] - size.rows + jnp.arange(size.rows)
    window = WindowKeys(codes, scales, jnp.int32(2), position)
    q = jnp.asarray(rng.standard_normal((2, size.t, size.heads, size.dim)), jnp.bfloat16)
    sink = jnp.asarray(rng.standard_normal(size.heads), jnp.float32)
    return q, end[:, None] - size.t + jnp.arange(size.t), window, entries, sink


@functools.cache
def compiled(implementation: str, width: int, temporary_bytes: int = 1 << 28):
    options = {"width": width, "implementation": implementation, "temporary_bytes": temporary_bytes}
    return jax.jit(lambda *arguments: attend(*arguments, **options))


def check(size: Size, arguments: tuple) -> np.ndarray:
    want, got = (compiled(name, size.width)(*arguments) for name in ("reference", "interpret"))
    assert got.dtype == jnp.bfloat16 and got.shape == want.shape
    want, got = (np.asarray(x.astype(jnp.float32)) for x in (want, got))
    np.testing.assert_allclose(got, want, rtol=RELATIVE, atol=ABSOLUTE)
    return got


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("end", [(1, 400), (2**20, 128)])
def test_decode_at_released_size(padded, end):
    size = replace(RELEASED_SIZE, padded=padded)
    check(size, case(size, seed=end[0], end=end))


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.tuples(*2 * [st.integers(3, 80)]), st.sampled_from([0.0, 0.1, 0.7, 1.0]))
def test_verify(seed, end, kept):
    check(VERIFY, case(VERIFY, seed, end, kept))


@settings(max_examples=3)
@given(st.integers(0, 10**6), st.tuples(*2 * [st.integers(1, 120)]), st.sampled_from([0.0, 0.3, 1.0]))
def test_prefill(seed, end, kept):
    check(PREFILL, case(PREFILL, seed, end, kept))


def test_prefill_without_history():
    check(WITHOUT_HISTORY, case(WITHOUT_HISTORY, end=(16, 30)))


def test_tiles_of_a_long_block_change_nothing():
    arguments = case(PREFILL)
    want = compiled("interpret", PREFILL.width)(*arguments)
    np.testing.assert_array_equal(compiled("interpret", PREFILL.width, 1)(*arguments), want)


def test_a_verify_block_gives_the_bits_of_single_queries():
    q, position, window, entries, sink = case(VERIFY)
    block = compiled("interpret", VERIFY.width)(q, position, window, entries, sink)
    for i in range(VERIFY.t):
        now = slice(i, i + 1)
        own = replace(entries, row=entries.row[:, now], lane=entries.lane[:, now])
        single = compiled("interpret", VERIFY.width)(q[:, now], position[:, now], window, own, sink)
        np.testing.assert_array_equal(single[:, 0], block[:, i])


def test_a_single_key_of_either_kind():
    q, position, window, entries, sink = case(VERIFY, kept=0.0)
    first, second = 5 * entry_words(VERIFY.dim), 201 * entry_words(VERIFY.dim)  # the second one runs into the next row
    assert second % 128 + entry_words(VERIFY.dim) > 128
    one = replace(
        entries,
        row=entries.row.at[0, 0, 3].set(first // 128).at[0, 1, 19].set(second // 128),
        lane=entries.lane.at[0, 0, 3].set(first % 128).at[0, 1, 19].set(second % 128),
    )
    nothing = window._replace(position=jnp.full_like(window.position, -1))
    got = check(VERIFY, (q, position, nothing, one, sink))
    assert got[0, :2].any(axis=(-1, -2)).all() and not got[0, 2].any() and not got[1].any()
    now = nothing._replace(position=nothing.position.at[:, 7].set(position[:, 1]))
    got = check(VERIFY, (q, position, now, entries, sink))
    assert not got[:, 0].any() and got[:, 1:].any(axis=(-1, -2)).all()


@pytest.mark.parametrize("size", [VERIFY, WITHOUT_HISTORY])
def test_no_keys_at_all_give_exactly_0(size):
    q, position, window, entries, sink = case(size, kept=0.0)
    nothing = window._replace(position=jnp.full_like(window.position, -1))
    for chosen in (entries, None):
        for implementation in ("reference", "interpret"):
            out = compiled(implementation, size.width)(q, position, nothing, chosen, sink)
            assert not np.asarray(out).any()


def test_without_a_selection():
    q, position, window, entries, sink = case(VERIFY)
    got = check(VERIFY, (q, position, window, None, sink))
    none = replace(entries, row=entries.row[..., :0], lane=entries.lane[..., :0])
    np.testing.assert_array_equal(check(VERIFY, (q, position, window, none, sink)), got)
    assert got.any()


@pytest.mark.parametrize("dim", [96, 512])
def test_reference_reads_entries_as_the_cache_does(dim):
    layout = kernel_inputs.layout(1, dim)
    words = kernel_inputs.main_pool(jax.random.key(dim), layout, 2, 3)
    selection = jnp.arange(3 * layout.entries)[None, None]
    table = jnp.asarray([[2, 0, 1]])
    row, lane = kernel_inputs.entry_places(layout, table, selection)
    page, place = jnp.repeat(table[0], layout.entries), selection[0, 0] % layout.entries
    got = jax.jit(reference.selected_values, static_argnums=1)(Entries(words, 1, row, lane), dim)[0, 0]
    want = jax.jit(layout.read_main)({"words": words}, 1, page, place)
    np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))


def test_reference_reads_window_rows_as_the_cache_does():
    codes, scales = kernel_inputs.window_ring(jax.random.key(0), 1, 2, 20, 96)
    got = reference.window_values(codes[0], scales[0].swapaxes(-1, -2))
    want = rings.values_of({"codes": codes[0], "scales": scales[0]}, RELEASED)
    np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))


def test_every_e4m3_scale_and_e2m1_code_is_unpacked_exactly():
    bits = jnp.arange(127)[None]
    scales = jax.lax.bitcast_convert_type(bits.astype(jnp.uint8), jnp.float8_e4m3fn).astype(jnp.float32)
    np.testing.assert_array_equal(tpu._half_e4m3(bits), scales / 2)
    codes = [0, 1, 2, 3, 4, 6, 8, 12]
    np.testing.assert_array_equal(tpu._double_e2m1(jnp.arange(16)[None])[0], np.float32(codes + [-c for c in codes]))
    assert np.isfinite(tpu._half_e4m3(jnp.arange(128)[None])).all()


def test_arguments_are_checked():
    q, position, window, entries, sink = case(VERIFY)

    def refused(match: str, *arguments, implementation: str = "reference", width: int = 16) -> None:
        with pytest.raises(KernelError, match=f"sparse_attention: .*{match}"):
            attend(*arguments, width=width, implementation=implementation)

    refused("implementation='cuda'", q, position, window, entries, sink, implementation="cuda")
    refused("q is float32", q.astype(jnp.float32), position, window, entries, sink)
    refused("head dim is 80; .* multiple of 32", q[..., :80], position, window, entries, sink)
    refused("width is 0", q, position, window, entries, sink, width=0)
    refused("query_position", q, position[:, :1], window, entries, sink)
    refused("sink", q, position, window, entries, sink[:1])
    refused("window.codes", q, position, window._replace(codes=window.codes[..., :64]), entries, sink)
    refused("window.scales", q, position, window._replace(scales=window.scales[..., :8]), entries, sink)
    refused("window.position", q, position, window._replace(position=window.position[:1]), entries, sink)
    refused("entries.words", q, position, window, replace(entries, words=entries.words[..., :72]), sink)
    refused("entries.lane", q, position, window, replace(entries, lane=entries.lane[..., :1]), sink)
    refused("entries.row", q, position, window, replace(entries, row=entries.row.astype(jnp.float32)), sink)
    tiny = window._replace(codes=window.codes[..., :32], scales=window.scales[..., :1, :])
    refused("head dim is 32; .* 64 to 512", q[..., :32], position, tiny, entries, sink, implementation="interpret")
    long = case(PREFILL)
    few = long[2]._replace(
        codes=long[2].codes[:, :, :8], scales=long[2].scales[..., :8], position=long[2].position[:, :8]
    )
    refused("window rows", *long[:2], few, *long[3:])
