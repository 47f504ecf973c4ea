"""Indexer kernels, interpreted, against the reference; the reference against plain NumPy and the cache's own reader."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_jax import quant
from dsv41_jax.pages import PageLayout
from pallas_kernels import indexer
from pallas_kernels.implementation import KernelError
from pallas_kernels.indexer import reference, tpu_candidates, tpu_scores, tpu_select

# A score is a bf16 value. Head sums in another order may round to its neighbour, which is 2^-7 of it away at most; near
# zero, where heads cancel, what counts is the size of the heads' own terms.
NEIGHBOUR = 2.0**-7
CANCELLED = 2.0**-16


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles so small that a few pages are several of them."""
    monkeypatch.setattr(tpu_scores, "_TILE", 4)
    monkeypatch.setattr(tpu_scores, "_SPAN", 8)
    monkeypatch.setattr(tpu_scores, "_GROUP", 2)
    monkeypatch.setattr(tpu_scores, "_QUERIES", 8)
    monkeypatch.setattr(tpu_scores, "_TOGETHER", 4)
    monkeypatch.setattr(tpu_candidates, "_TILE", 4)
    monkeypatch.setattr(tpu_candidates, "_GROUP", 2)
    monkeypatch.setattr(tpu_select, "_CHUNK", 16)


def paged_keys(rng: np.random.Generator, b: int, n: int, ratio: int, dim: int, scales=(126, 129)):
    """Arrays of a pool of two sources: any codes, and scales so close together that dots are exact in float32."""
    pages = b * n + 3
    layout = PageLayout(ratio, 128, dim, True, jnp.dtype(jnp.bfloat16))
    shapes = layout.abstract_index(2, pages)
    codes = rng.integers(-(2**31), 2**31, shapes["codes"].shape).astype(np.int32)
    raw = rng.integers(*scales, (*shapes["scales"].shape, 4)).astype(np.uint8)
    table = rng.permutation(pages)[: b * n].reshape(b, n).astype(np.int32)
    return codes, raw.view(np.int32)[..., 0], table


def queries_and_weights(rng: np.random.Generator, b: int, t: int, heads: int, dim: int, exact: bool = True):
    """Quantised queries; weights of few bits, so that sums over heads are exact, or any."""
    q = quant.fake_q4_index(jnp.asarray(rng.normal(size=(b, t, heads, dim)), jnp.bfloat16))
    weights = rng.integers(-8, 9, (b, t, heads)) / 8 if exact else rng.normal(size=(b, t, heads))
    return q, jnp.asarray(weights, jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_scores(implementation, entries, q, w, codes, scales, slot, table, visible):
    keys = indexer.PagedKeys(codes, scales, slot, table, entries)
    return indexer.scores(q, w, keys, visible, implementation=implementation)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def run_candidate_scores(implementation, entries, block, q, w, codes, scales, slot, table, visible, pool):
    keys = indexer.PagedKeys(codes, scales, slot, table, entries)
    return indexer.candidate_scores(q, w, keys, pool, visible, block=block, implementation=implementation)


@functools.partial(jax.jit, static_argnums=(0, 2))
def run_select(implementation, scores, k):
    return indexer.select(scores, k, implementation=implementation)


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def run_blocks(implementation, scores, visible, block, topk):
    return indexer.candidate_blocks(scores, visible, block=block, topk=topk, implementation=implementation)


def some_visible(rng: np.random.Generator, shape: tuple, n: int) -> np.ndarray:
    """Counts 0 .. n with the ends among them often."""
    edges = np.array([0, 1, n - 1, n])[rng.integers(0, 4, shape)]
    return np.where(rng.random(shape) < 0.5, edges, rng.integers(0, n + 1, shape)).astype(np.int32)


# b, n pages, ratio, t, heads, dim
SHAPES = {
    "decode": (2, 9, 1, 1, 4, 128),
    "verify_ratio2": (3, 9, 2, 3, 5, 64),
    "blocks_of_queries_ratio2": (1, 5, 2, 9, 2, 96),
    "odd_pages": (1, 3, 2, 1, 3, 32),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_equal_the_reference(shape):
    b, n, ratio, t, heads, dim = SHAPES[shape]

    @settings(max_examples=6)
    @given(st.integers(0, 2**32 - 1), st.integers(0, 1))
    def check(seed, slot):
        rng = np.random.default_rng(seed)
        codes, scales, table = paged_keys(rng, b, n, ratio, dim)
        q, w = queries_and_weights(rng, b, t, heads, dim)
        visible = some_visible(rng, (b, t), n * 128 // ratio)
        arguments = (128 // ratio, q, w, codes, scales, slot, table, visible)
        got = np.asarray(run_scores("interpret", *arguments))
        assert got.dtype == np.float32 and got.shape == (b, t, n * 128 // ratio)
        np.testing.assert_array_equal(got, run_scores("reference", *arguments))
        assert (np.isfinite(got).sum(-1) == visible).all()

    check()


def test_scores_of_many_heads_are_neighbours_of_the_reference():
    """Any weights: the kernel sums heads in an order of its own."""
    b, n, t, heads = 1, 4, 2, 32
    rng = np.random.default_rng(3)
    codes, scales, table = paged_keys(rng, b, n, 1, 128, scales=(120, 134))
    q, w = queries_and_weights(rng, b, t, heads, 128, exact=False)
    arguments = (128, q, w, codes, scales, 0, table, np.full((b, t), 128 * n, np.int32))
    got, want = run_scores("interpret", *arguments), run_scores("reference", *arguments)
    np.testing.assert_allclose(got, want, rtol=NEIGHBOUR, atol=CANCELLED * float(jnp.max(jnp.abs(want))))


@pytest.mark.parametrize(("ratio", "dim"), [(1, 96), (2, 128)])
def test_the_reference_reads_what_the_cache_writes(ratio, dim):
    layout = PageLayout(ratio, 128, dim, True, jnp.dtype(jnp.bfloat16))
    rng = np.random.default_rng(ratio + dim)
    table = rng.permutation(7)[:6].reshape(2, 3).astype(np.int32)
    entry = np.arange(3 * layout.entries)
    page, place = table[:, entry // layout.entries], np.broadcast_to(entry % layout.entries, (2, len(entry)))
    keys = jnp.asarray(
        rng.normal(size=(2, len(entry), dim)) * np.exp(rng.normal(size=(2, len(entry), 1))), jnp.bfloat16
    )

    @jax.jit
    def write_and_read(keys):
        pool = {name: jnp.zeros(s.shape, s.dtype) for name, s in layout.abstract_index(2, 7).items()}
        pool = layout.write_index(pool, 1, page, place, keys, jnp.ones(place.shape, bool))
        packed = indexer.PagedKeys(pool["codes"], pool["scales"], 1, jnp.asarray(table), layout.entries)
        return reference.unpack(packed, dim), layout.read_index(pool, 1, table), quant.fake_q4_index(keys)

    found, read, quantised = write_and_read(keys)
    np.testing.assert_array_equal(found, read)
    np.testing.assert_array_equal(found, quantised)


def drawn_scores(rng: np.random.Generator, shape: tuple, levels: int, hidden: float) -> np.ndarray:
    """Scores of so many levels (0: any float32, -1: any bf16), both zeros among them, a share of them -inf."""
    x = rng.normal(size=shape)
    if levels == -1:
        x = np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))
    elif levels > 0:
        x = (rng.integers(0, levels, shape) - levels // 2) * np.where(rng.random(shape) < 0.5, 1.0, -1.0)
    return np.where(rng.random(shape) < hidden, -np.inf, x).astype(np.float32)


def stable_best(row: np.ndarray, k: int) -> list[int]:
    """The k best of a row by NumPy: ascending, -1 at the end."""
    order = [i for i in np.argsort(-row, kind="stable") if row[i] > -np.inf]
    best = sorted(order[:k])
    return best + [-1] * (k - len(best))


LEVELS, HIDDEN = st.sampled_from([-1, 0, 1, 2, 5]), st.sampled_from([0.0, 0.5, 0.97, 1.0])


@pytest.mark.parametrize(("n", "k"), [(5000, 300), (70, 5), (128, 128), (9, 20)])
def test_selection_is_the_stable_best(n, k):
    @settings(max_examples=12 if n > 1000 else 25)
    @given(st.integers(0, 2**32 - 1), LEVELS, HIDDEN)
    def check(seed, levels, hidden):
        scores = drawn_scores(np.random.default_rng(seed), (2, 2, n), levels, hidden)
        got = np.asarray(run_select("interpret", scores, k))
        assert got.dtype == np.int32 and got.shape == (2, 2, k)
        for at in np.ndindex(2, 2):
            np.testing.assert_array_equal(got[at], stable_best(scores[at], k))
        np.testing.assert_array_equal(got, run_select("reference", scores, k))

    check()


@pytest.mark.parametrize(("n", "block", "topk"), [(3001, 8, 150), (200, 64, 2), (9, 1, 4), (66, 4, 40)])
def test_candidate_blocks_are_the_blocks_of_the_best(n, block, topk):
    @settings(max_examples=15)
    @given(st.integers(0, 2**32 - 1), LEVELS, HIDDEN)
    def check(seed, levels, hidden):
        rng = np.random.default_rng(seed)
        scores, visible = drawn_scores(rng, (2, 2, n), levels, hidden), some_visible(rng, (2, 2), n)
        blocks = -(-n // block)
        got = np.asarray(run_blocks("interpret", scores, visible, block, topk))
        np.testing.assert_array_equal(got, run_blocks("reference", scores, visible, block, topk))
        for at in np.ndindex(2, 2):
            seen = np.full(blocks * block, -np.inf, np.float32)
            seen[: visible[at]] = scores[at][: visible[at]]
            best = seen.reshape(blocks, block).max(-1)
            if visible[at]:
                best[(visible[at] - 1) // block] = np.inf
            np.testing.assert_array_equal(got[at], stable_best(best, min(topk, blocks)))

    check()


def drawn_pool(rng: np.random.Generator, visible: np.ndarray, p: int, block: int) -> np.ndarray:
    """Up to p blocks of each query, ascending, -1 at the end."""
    pool = np.full((*visible.shape, p), -1, np.int32)
    for at in np.ndindex(*visible.shape):
        blocks = -(-int(visible[at]) // block)
        kept = np.sort(rng.permutation(blocks)[: rng.integers(0, p + 1)])
        pool[at][: len(kept)] = kept
    return pool


# b, n pages, ratio, t, heads, dim, block, P: several tiles; two pages to a tile; blocks of a page's size; of one entry
POOLS = {
    "decode": (2, 9, 1, 1, 3, 128, 8, 90),
    "verify_ratio2": (1, 9, 2, 3, 2, 64, 8, 50),
    "large_blocks": (2, 5, 2, 1, 2, 32, 64, 3),
    "single_entries": (1, 2, 1, 2, 2, 96, 1, 40),
}


@pytest.mark.parametrize("shape", POOLS)
def test_pool_scores_and_selection_equal_the_reference(shape):
    b, n, ratio, t, heads, dim, block, p = POOLS[shape]
    k = min(40, p * block)

    @settings(max_examples=4)
    @given(st.integers(0, 2**32 - 1))
    def check(seed):
        rng = np.random.default_rng(seed)
        codes, scales, table = paged_keys(rng, b, n, ratio, dim)
        q, w = queries_and_weights(rng, b, t, heads, dim)
        visible = some_visible(rng, (b, t), n * 128 // ratio)
        pool = drawn_pool(rng, visible, p, block)
        arguments = (q, w, codes, scales, 1, table, visible)
        got = run_candidate_scores("interpret", 128 // ratio, block, *arguments, pool)
        np.testing.assert_array_equal(got, run_candidate_scores("reference", 128 // ratio, block, *arguments, pool))
        # The selection is that of all scores, the others hidden.
        everything = np.asarray(run_scores("reference", 128 // ratio, *arguments))
        inside = np.zeros(everything.shape, bool)
        for at in np.ndindex(b, t):
            for number in pool[at][pool[at] >= 0]:
                inside[at][number * block : (number + 1) * block] = True
        for implementation in ("interpret", "reference"):
            chosen = select_in_pool(implementation, got, pool, k, block)
            np.testing.assert_array_equal(chosen, run_select("reference", np.where(inside, everything, -np.inf), k))

    check()


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def select_in_pool(implementation, scores, pool, k, block):
    return indexer.select_candidates(scores, pool, k, block=block, implementation=implementation)


def keys_of(**changes) -> indexer.PagedKeys:
    arrays = {"codes": (1, 4, 16, 128), "scales": (1, 4, 128), "page_table": (2, 2)}
    made = {name: jnp.zeros(changes.pop(name, shape), jnp.int32) for name, shape in arrays.items()}
    return indexer.PagedKeys(**made, slot=0, entries=changes.pop("entries", 128))


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("queries.dtype", {"q": jnp.zeros((2, 1, 4, 128), jnp.float32)}),
        ("index head dim is 48", {"q": jnp.zeros((2, 1, 4, 48), jnp.bfloat16)}),
        ("weights.shape", {"w": jnp.zeros((2, 1, 3), jnp.bfloat16)}),
        ("keys.entries is 32", {"keys": keys_of(entries=32)}),
        ("keys.codes.shape", {"keys": keys_of(codes=(1, 4, 8, 128))}),
        ("keys.scales.shape", {"keys": keys_of(scales=(1, 3, 128))}),
        ("page_table", {"keys": keys_of(page_table=(3, 2))}),
        ("visible.shape", {"visible": jnp.zeros((2, 2), jnp.int32)}),
        ("'pallas' is unknown", {"implementation": "pallas"}),
    ],
)
def test_scores_refuse_what_no_kernel_takes(argument, changes):
    given_ = {
        "q": jnp.zeros((2, 1, 4, 128), jnp.bfloat16),
        "w": jnp.zeros((2, 1, 4), jnp.bfloat16),
        "keys": keys_of(),
        "visible": jnp.zeros((2, 1), jnp.int32),
        "implementation": "reference",
        **changes,
    }
    implementation = given_.pop("implementation")
    with pytest.raises(KernelError, match=argument):
        indexer.scores(*given_.values(), implementation=implementation)


def test_selection_refuses_what_no_kernel_takes():
    scores, one = jnp.zeros((1, 1, 64)), jnp.ones((1, 1), jnp.int32)
    with pytest.raises(KernelError, match="indexer.select: k is 0"):
        indexer.select(scores, 0)
    with pytest.raises(KernelError, match="dtype is bfloat16"):
        indexer.select(scores.astype(jnp.bfloat16), 4)
    with pytest.raises(KernelError, match="block is 3; allowed: a divisor of 64"):
        indexer.candidate_blocks(scores, one, block=3, topk=2, implementation="interpret")
    with pytest.raises(KernelError, match="select_candidates: scores.shape"):
        indexer.select_candidates(scores, jnp.zeros((1, 1, 4), jnp.int32), 4, block=8)
