"""Lightning indexer: scores of packed index keys, exact selection, candidate pools.

    scores             score every key of a source for every query
    select             the k best, exactly, without a sort
    candidate_blocks   the best blocks of consecutive entries: the pool of the two-level selection
    candidate_scores   score only the entries of a pool
    select_candidates  the k best entries of a pool

Memory: `scores` makes float32 [B, t, N]. Callers bound it by tiles of rows or of queries: no query's result depends on
the others. On a TPU the kernels pass it on in a layout of their own; jitted together with `select` or
`candidate_blocks` there is one array of that size, and with other users of t > 1 queries a second one.
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.implementation import KernelError, resolve
from pallas_kernels.indexer import reference
from pallas_kernels.indexer.reference import LANES, PagedKeys, index_scores

__all__ = [
    "PagedKeys",
    "candidate_blocks",
    "candidate_scores",
    "index_scores",
    "scores",
    "select",
    "select_candidates",
]

_MOST_ENTRIES = 2**21  # a query's scores and their order lie in VMEM


def _require(condition: bool, operation: str, argument: str, given: object, allowed: str) -> None:
    if not condition:
        raise KernelError(f"indexer.{operation}: {argument} is {given}; allowed: {allowed}")


def _check_keys(operation: str, queries: Array, weights: Array, keys: PagedKeys, visible: Array) -> None:
    """What every implementation of scoring asks for."""
    b, t, heads, dim = queries.shape
    _require(queries.dtype == jnp.bfloat16, operation, "queries.dtype", queries.dtype, "bfloat16")
    _require(weights.shape == (b, t, heads), operation, "weights.shape", weights.shape, f"{(b, t, heads)}")
    _require(weights.dtype == jnp.bfloat16, operation, "weights.dtype", weights.dtype, "bfloat16")
    _require(dim % 32 == 0 and 32 <= dim <= 128, operation, "index head dim", dim, "32, 64, 96 or 128")
    _require(keys.entries in (64, 128), operation, "keys.entries", keys.entries, "64 or 128 keys of a page")
    rows = -(-keys.entries * dim // 8 // LANES)
    for name in ("codes", "scales"):
        array = getattr(keys, name)
        _require(array.dtype == jnp.int32, operation, f"keys.{name}.dtype", array.dtype, "int32")
    shape = keys.codes.shape
    _require(
        len(shape) == 4 and shape[2:] == (rows, LANES), operation, "keys.codes.shape", shape, f"[S, P, {rows}, 128]"
    )
    pages = keys.codes.shape[1]
    shape, least = keys.scales.shape, -(-pages * keys.entries // LANES)
    fits = len(shape) == 3 and shape[1] >= least and shape[2] == LANES
    _require(fits, operation, "keys.scales.shape", shape, f"[S, {least} or more, 128]")
    shape = keys.page_table.shape
    _require(len(shape) == 2 and shape[0] == b, operation, "keys.page_table.shape", shape, f"[{b}, n]")
    _require(visible.shape == (b, t), operation, "visible.shape", visible.shape, f"{(b, t)}")


def _check_scores(operation: str, scores: Array, k: int) -> None:
    _require(scores.ndim == 3, operation, "scores.shape", scores.shape, "[B, t, N]")
    _require(scores.dtype == jnp.float32, operation, "scores.dtype", scores.dtype, "float32")
    _require(0 < scores.shape[-1] <= _MOST_ENTRIES, operation, "N", scores.shape[-1], f"1 .. {_MOST_ENTRIES}")
    _require(k >= 1, operation, "k", k, "1 or more")


def _check_block(operation: str, block: int) -> None:
    _require(block >= 1 and 64 % block == 0, operation, "block", block, "a divisor of 64")


def _kernels(chosen: str):
    """The module of a kernel, and whether to interpret it."""
    if chosen == "gpu":
        from pallas_kernels.indexer import gpu

        return gpu, False
    from pallas_kernels.indexer import tpu

    return tpu, chosen == "interpret"


def scores(queries: Array, weights: Array, keys: PagedKeys, visible: Array, *, implementation: str = "auto") -> Array:
    """Scores of all keys: bf16(sum over heads of bf16(relu(bf16(q . k)) * w)), the sum in float32.

    Args:
        queries: bf16 [B, t, heads, di], already fake-quantised.
        weights: bf16 [B, t, heads].
        keys: of one source. Kernels read scales from 2^-99 to 2^27 (a released key's lie within 2^-10 .. 2^10).
        visible: int32 [B, t], entries that each query may see: the first ones of its row.
        implementation: see `pallas_kernels.implementation`.

    Returns:
        float32 [B, t, N], N = n * entries, values of bf16; -inf from `visible` on.

    Raises:
        KernelError: an argument that no kernel takes.
    """
    chosen = resolve("indexer.scores", implementation)
    _check_keys("scores", queries, weights, keys, visible)
    if chosen == "reference":
        return reference.scores(queries, weights, keys, visible)
    module, interpret = _kernels(chosen)
    return module.scores(queries, weights, keys, visible, interpret=interpret)


def select(scores: Array, k: int, *, implementation: str = "auto") -> Array:
    """The k best scores of each query: the lowest index wins a tie, -0 ties with +0, -inf is never chosen.

    Args:
        scores: float32 [B, t, N], no NaN.
        k: how many.

    Returns:
        int32 [B, t, k] indices, ascending, -1 at the end where there are fewer than k.
    """
    chosen = resolve("indexer.select", implementation)
    _check_scores("select", scores, k)
    if chosen == "reference":
        return reference.select(scores, k)
    module, interpret = _kernels(chosen)
    return module.select(scores, k, interpret=interpret)


def candidate_blocks(scores: Array, visible: Array, *, block: int, topk: int, implementation: str = "auto") -> Array:
    """The pool of the two-level selection: the blocks of `block` consecutive entries with the best entry.

    Args:
        scores: float32 [B, t, N], no NaN.
        visible: int32 [B, t], entries that each query may see; the block of the newest one is always kept.
        block: candidate_block_size. topk: candidate_topk_blocks.

    Returns:
        int32 [B, t, min(topk, ceil(N / block))] block numbers, ascending, -1 at the end.
    """
    chosen = resolve("indexer.candidate_blocks", implementation)
    _check_scores("candidate_blocks", scores, topk)
    if chosen == "reference":
        return reference.candidate_blocks(scores, visible, block=block, topk=topk)
    _check_block("candidate_blocks", block)
    module, interpret = _kernels(chosen)
    return module.candidate_blocks(scores, visible, block=block, topk=topk, interpret=interpret)


def candidate_scores(
    queries: Array,
    weights: Array,
    keys: PagedKeys,
    pool: Array,
    visible: Array,
    *,
    block: int,
    implementation: str = "auto",
) -> Array:
    """Scores of the entries of each query's pool only; the cost of the kernels does not grow with N.

    Args:
        queries, weights, keys, visible: as in `scores`.
        pool: int32 [B, t, P] block numbers, ascending, -1 at the end.
        block: entries of a block.

    Returns:
        float32 [B, t, P * block]; -inf for entries that are not visible and where the pool has no block.
    """
    chosen = resolve("indexer.candidate_scores", implementation)
    _check_keys("candidate_scores", queries, weights, keys, visible)
    shape = (*queries.shape[:2], "P")
    _require(pool.ndim == 3 and pool.shape[:2] == shape[:2], "candidate_scores", "pool.shape", pool.shape, f"{shape}")
    if chosen == "reference":
        return reference.candidate_scores(queries, weights, keys, pool, visible, block=block)
    _check_block("candidate_scores", block)
    module, interpret = _kernels(chosen)
    return module.candidate_scores(queries, weights, keys, pool, visible, block=block, interpret=interpret)


def select_candidates(scores: Array, pool: Array, k: int, *, block: int, implementation: str = "auto") -> Array:
    """The k best entries of each query's pool, as `select` chooses.

    Args:
        scores: float32 [B, t, P * block] of `candidate_scores`. pool: int32 [B, t, P], ascending.
        k: how many. block: entries of a block.

    Returns:
        int32 [B, t, k] entry numbers, ascending, -1 at the end.
    """
    chosen = resolve("indexer.select_candidates", implementation)
    _check_scores("select_candidates", scores, k)
    expected = (*pool.shape[:2], pool.shape[2] * block)
    _require(scores.shape == expected, "select_candidates", "scores.shape", scores.shape, f"{expected}")
    if chosen == "reference":
        return reference.select_candidates(scores, pool, k, block=block)
    module, interpret = _kernels(chosen)
    return reference.entry_numbers(module.select(scores, k, interpret=interpret), pool, block)
