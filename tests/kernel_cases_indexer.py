"""The indexer's kernels at released sizes: 32 heads of 128 channels, 512 of up to a million entries, 2,048 blocks.

A batch of 64 rows of 262,144 entries has a pool of 131,072 pages (1.07 GB of codes); temporaries may not grow with it.
"""

import jax
import jax.numpy as jnp

from kernel_cases import Case
from pallas_kernels import indexer

HEADS, DIM, TOPK, BLOCK, BLOCKS = 32, 128, 512, 8, 2048


def spec(*shape: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def scoring_specs(b: int, t: int, n: int, entries: int, sources: int) -> tuple:
    """Queries, weights, codes, scales, page table, visible: a pool with half as many pages as the rows could hold."""
    pages = b * n // entries // 2
    rows = entries * DIM // 8 // 128
    return (
        spec(b, t, HEADS, DIM, dtype=jnp.bfloat16),
        spec(b, t, HEADS, dtype=jnp.bfloat16),
        spec(sources, pages, rows, 128),
        spec(sources, pages * entries // 128, 128),
        spec(b, n // entries),
        spec(b, t),
    )


def scores_and_selection(entries: int, queries, weights, codes, scales, table, visible):
    """A full source: scores and the selection. Between the two is float32 [B, t, N] and nothing else of its size."""
    keys = indexer.PagedKeys(codes, scales, codes.shape[0] - 1, table, entries)
    found = indexer.scores(queries, weights, keys, visible, implementation="tpu")
    return indexer.select(found, TOPK, implementation="tpu")


def pool_of(scores, visible):
    return indexer.candidate_blocks(scores, visible, block=BLOCK, topk=BLOCKS, implementation="tpu")


def selection_in_pool(entries: int, queries, weights, codes, scales, table, visible, pool):
    """A source after the candidate source."""
    keys = indexer.PagedKeys(codes, scales, 0, table, entries)
    found = indexer.candidate_scores(queries, weights, keys, pool, visible, block=BLOCK, implementation="tpu")
    return indexer.select_candidates(found, pool, TOPK, block=BLOCK, implementation="tpu")


def aot_cases() -> list[Case]:
    """Every kernel, both page sizes, decoding, a verify block and a block of a prefill."""
    cases = []
    for name, b, t, n, entries, sources in [
        ("decode", 64, 1, 262144, 128, 1),
        ("decode_ratio2", 64, 1, 131072, 64, 3),
        ("verify", 8, 6, 262144, 128, 1),
        ("million", 8, 1, 1048576, 128, 1),
        ("prefill", 1, 64, 262144, 128, 1),
    ]:
        codes = 64 * b * n // 2  # bytes of one source's
        scores = 4 * b * t * n

        def full(*arrays, entries=entries):
            return scores_and_selection(entries, *arrays)

        specs = scoring_specs(b, t, n, entries, sources)
        most = scores + (4 << 20)  # the scores themselves are handed on
        cases.append(Case(f"indexer_{name}", full, specs, min(codes, scores) // 2, temporary_bytes=most))

        def in_pool(*arrays, entries=entries):
            return selection_in_pool(entries, *arrays)

        if name != "prefill":
            cases.append(Case(f"indexer_pool_{name}", in_pool, (*specs, spec(b, t, BLOCKS)), min(codes, scores) // 2))
    for b, n in [(64, 262144), (8, 1048576)]:
        specs = (spec(b, 1, n, dtype=jnp.float32), spec(b, 1))
        cases.append(Case(f"indexer_candidate_blocks_{n}", pool_of, specs, 2 * b * n))
    return cases
