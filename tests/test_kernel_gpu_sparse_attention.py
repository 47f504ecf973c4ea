"""The Triton kernel of sparse attention, interpreted, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import kernel_inputs, quant
from dsv41_jax.rings import ring_positions
from pallas_kernels import gpu_codes
from pallas_kernels.sparse_attention import Entries, WindowKeys, gpu, reference

# The kernel rounds probabilities relative to a running maximum, the reference relative to the final one: each is within
# 2^-9 of its value, so an output differs by at most 2^-8 of the mean magnitude of the keys (below 3 here), and by one
# unit in its last place of 8 bits.
ABSOLUTE, RELATIVE = 3 * 2.0**-8, 2.0**-7
WIDTH = 24
BLOCKS = gpu.Blocks(16, 16, 4, 1)


def case(seed: int, dim: int, heads: int, t: int = 1, rows: int = WIDTH, padded: bool = False):
    """Arguments of `attend` for two rows: a long sequence, and one whose ring is not full."""
    keys = jax.random.split(jax.random.key(seed), 6)
    layout, b, k = kernel_inputs.layout(2, head_dim=dim), 2, 40
    pages = 8
    words = kernel_inputs.main_pool(keys[0], layout, 2, pages)
    codes, scales = kernel_inputs.window_ring(keys[1], 3, b, rows, dim)
    end = jnp.array([100, 9 + t])
    table = kernel_inputs.page_tables(keys[2], b, pages // b, pages)
    selection = kernel_inputs.selections(keys[3], b, t, 4 * layout.entries, k)
    row, lane = kernel_inputs.entry_places(layout, table, selection)
    if padded:  # each entry in a row of its own
        flat = words.reshape(2, pages, -1)[..., : layout.entries * layout.main_words]
        words = jnp.pad(flat.reshape(2, -1, layout.main_words), ((0, 0), (0, 0), (0, 128 - layout.main_words)))
        number = (row % layout.main_rows * 128 + lane) // layout.main_words
        row, lane = row // layout.main_rows * layout.entries + number, jnp.zeros_like(lane)
    q = jax.random.normal(keys[4], (b, t, heads, dim), jnp.bfloat16)
    window = WindowKeys(codes, scales, jnp.int32(2), ring_positions(end, rows))
    sink = jax.random.normal(keys[5], (heads,))
    position = end[:, None] - t + jnp.arange(t)
    return q, position, window, Entries(words, jnp.int32(1), row, lane, padded), sink


@jax.jit
def both(*arguments):
    want = reference.attend(*arguments, width=WIDTH, temporary_bytes=1 << 28)
    return gpu.attend(*arguments, width=WIDTH, interpret=True, blocks=BLOCKS), want


def check(arguments):
    got, want = both(*arguments)
    assert got.dtype == jnp.bfloat16 and got.shape == want.shape
    got, want = (np.asarray(x.astype(jnp.float32)) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=RELATIVE, atol=ABSOLUTE)
    return got


@pytest.mark.parametrize(("dim", "heads"), [(64, 2), (96, 20), (512, 4)])
def test_decode(dim, heads):
    check(case(dim, dim, heads))


def test_entries_missing_anywhere():
    q, position, window, entries, sink = case(1, 64, 2)
    for row in (
        entries.row.at[:, :, ::3].set(-1),
        entries.row.at[0].set(-1),
        entries.row.at[:, :, 1:].set(-1),
    ):
        check((q, position, window, Entries(entries.words, entries.slot, row, entries.lane), sink))


def test_window_only_and_no_key_at_all():
    q, position, window, entries, sink = case(2, 64, 2)
    check((q, position, window, None, sink))
    check((q, position, window._replace(position=jnp.full_like(window.position, -1)), entries, sink))
    none = Entries(entries.words, entries.slot, jnp.full_like(entries.row, -1), entries.lane)
    got = check((q, position, window._replace(position=jnp.full_like(window.position, -1)), none, sink))
    assert not got.any()


def test_verify_block_sees_its_own_past_only():
    arguments = case(3, 64, 2, t=3, rows=30)
    got = check(arguments)
    q, position, window, entries, sink = arguments
    last = window.position == position[:, -1:]
    changed = window._replace(codes=jnp.where(last[None, :, :, None], window.codes ^ 0x80, window.codes))
    again = np.asarray(check((q, position, changed, entries, sink)))
    np.testing.assert_array_equal(got[:, :-1], again[:, :-1])
    assert (got[:, -1] != again[:, -1]).any()


def test_prefill_block():
    t, rows = 20, WIDTH - 1 + 20
    q, position, window, entries, sink = case(4, 64, 2, t=t, rows=rows)
    ordered = position[:, :1] - (WIDTH - 1) + jnp.arange(rows)
    check((q, position, window._replace(position=jnp.where(ordered >= 0, ordered, -1)), entries, sink))


def test_padded_entries():
    check(case(5, 64, 2, padded=True))


def test_every_code_and_scale():
    """All E2M1 codes, all positive finite E4M3 scales and window codes come out as the reference reads them."""
    words = jnp.arange(1 << 16, dtype=jnp.int32)[None] * jnp.array([[1], [1 << 16]])
    for k in range(8):
        want = quant.e2m1_values(((words.astype(jnp.uint32) >> (4 * k)) & 15).astype(jnp.uint8))
        np.testing.assert_array_equal(gpu_codes.e2m1(words, k) * gpu_codes.E2M1_UNIT, want)
    codes = jnp.array([c for c in range(256) if c & 0x7F != 0x7F], jnp.uint8)
    want = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    pairs = jax.lax.bitcast_convert_type(codes.reshape(-1, 2), jnp.uint16)
    np.testing.assert_array_equal(gpu_codes.e4m3_pairs(pairs) * gpu_codes.E4M3_UNIT, want)
    positive = codes[codes < 0x7F].astype(jnp.int32)
    np.testing.assert_array_equal(gpu_codes.e4m3_scale(positive) * gpu_codes.E4M3_UNIT, want[: positive.size])
