"""The Triton kernels of the indexer, interpreted, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import kernel_inputs
from pallas_kernels.indexer import PagedKeys, gpu, gpu_select, reference

# Sums of dots and of heads run in another order: a value at a tie of bf16 rounding falls to the other side, one unit in
# the last place of 8 bits, of a sum whose terms are below 8.
TOLERANCE = {"rtol": 2.0**-7, "atol": 2.0**-6}


def case(seed: int, dim: int, ratio: int, t: int = 1, heads: int = 5):
    """Queries, weights, keys and visible counts of two rows of 11 pages: all but a few entries, and hardly any."""
    keys = jax.random.split(jax.random.key(seed), 3)
    layout, b, each = kernel_inputs.layout(ratio, index_dim=dim), 2, 11
    codes, scales = kernel_inputs.index_pool(keys[0], layout, 2, 2 * each + 1)
    table = kernel_inputs.page_tables(keys[1], b, each, 2 * each + 1)
    queries, weights = kernel_inputs.index_queries(keys[2], b, t, heads, dim)
    visible = jnp.array([[each * layout.entries - 3 - t], [7]]) + jnp.arange(t)
    return queries, weights, PagedKeys(codes, scales, jnp.int32(1), table, layout.entries), visible


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), **TOLERANCE)


@pytest.mark.parametrize(("dim", "ratio", "t"), [(128, 1, 1), (64, 2, 3), (96, 1, 1)])
def test_scores(dim, ratio, t):
    arguments = case(dim, dim, ratio, t)
    close(gpu.scores(*arguments, interpret=True), reference.scores(*arguments))


@pytest.mark.parametrize(("dim", "ratio", "t"), [(128, 1, 1), (64, 2, 2)])
def test_candidate_scores(dim, ratio, t):
    queries, weights, keys, visible = case(dim, dim, ratio, t)
    blocks = 11 * keys.entries // 8
    pool = kernel_inputs.selections(jax.random.key(7), 2, t, blocks, 20).at[0, :, 17:].set(-1).at[1, :, 1:].set(-1)
    arguments = (queries, weights, keys, pool, visible)
    close(gpu.candidate_scores(*arguments, block=8, interpret=True), reference.candidate_scores(*arguments, block=8))


ROWS, N, K = 8, 700, 50


def rows_of_scores(seed: int) -> jax.Array:
    """[8, 1, 700]: bf16 with ties, float32, few valid, exactly K valid, all equal, signed zeros, nothing, negative."""
    keys = jax.random.split(jax.random.key(seed), 4)
    normal = jax.random.normal(keys[0], (ROWS, N))
    place = jnp.arange(N)
    rows = [
        normal[0].astype(jnp.bfloat16).astype(jnp.float32),
        normal[1],
        jnp.where(jax.random.permutation(keys[1], place) < K - 9, jnp.round(normal[2]), -jnp.inf),
        jnp.where(jax.random.permutation(keys[2], place) < K, normal[3], -jnp.inf),
        jnp.full((N,), -1.5),
        jnp.where(place % 2 == 0, -0.0, 0.0) * jnp.ones((N,)),
        jnp.full((N,), -jnp.inf),
        -jnp.abs(jnp.round(normal[7] * 2)) / 2 - 1,
    ]
    return jnp.stack(rows)[:, None]


@pytest.fixture(scope="module")
def interpreted():
    """`select` of K in tiles of 128, so that a row has several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_select, "_TILE", 128)
        yield jax.jit(lambda scores: gpu.select(scores, K, interpret=True)).lower(rows_of_scores(0)).compile()


@pytest.mark.parametrize("seed", range(5))
def test_select(interpreted, seed):
    scores = rows_of_scores(seed)
    np.testing.assert_array_equal(interpreted(scores), reference.select(scores, K))


def test_select_more_than_there_are():
    scores = rows_of_scores(3)[:2, :, :30]
    np.testing.assert_array_equal(gpu.select(scores, K, interpret=True), reference.select(scores, K))


def test_candidate_blocks():
    scores, visible = rows_of_scores(4)[:3], jnp.array([[N], [300], [0]])
    got = gpu.candidate_blocks(scores, visible, block=8, topk=12, interpret=True)
    np.testing.assert_array_equal(got, reference.candidate_blocks(scores, visible, block=8, topk=12))
    assert (got[0] == (N - 1) // 8).any() and (got[2] == -1).all()
