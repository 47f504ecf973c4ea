"""The indexer: scores, selection, and the two-level form through candidate blocks."""

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import kernel_inputs
from dsv41_jax.kernel_workloads.sizes import Sizes
from dsv41_jax.kernel_workloads.workload import Workload
from pallas_kernels import indexer

# Dots and head sums are float32 sums in another order: a result at a tie of bf16 rounding falls to the other side, one
# unit in the last place of 8 bits, of a sum whose terms are up to about 8.
_SCORES = (2.0**-7, 2.0**-6)


def workloads(sizes: Sizes) -> list[Workload]:
    """See `kernel_workloads.workloads`."""
    n = sizes.index_pages * 128
    return [
        _scores(sizes, sizes.batch, sizes.index_pages),
        _scores(sizes, sizes.many, sizes.index_pages),
        _select(sizes, sizes.batch, n),
        _select(sizes, sizes.many, n),
        _select(sizes, 1, sizes.long_row),
        _candidate_blocks(sizes, sizes.batch, n),
        _candidate_scores(sizes, sizes.batch),
        _select_candidates(sizes, sizes.batch),
    ]


def _paged(sizes: Sizes, key: Array, batch: int, each: int):
    layout = kernel_inputs.layout(1, sizes.head_dim, sizes.index_dim)
    keys = jax.random.split(key)
    codes, scales = kernel_inputs.index_pool(keys[0], layout, 1, batch * each)
    return {"codes": codes, "scales": scales, "table": kernel_inputs.page_tables(keys[1], batch, each, batch * each)}


def _keys(a) -> indexer.PagedKeys:
    return indexer.PagedKeys(a["codes"], a["scales"], jnp.int32(0), a["table"], 128)


def _queries(sizes: Sizes, key: Array, batch: int):
    queries, weights = kernel_inputs.index_queries(key, batch, 1, sizes.index_heads, sizes.index_dim)
    return {"queries": queries, "weights": weights}


def _entry_bytes(sizes: Sizes) -> int:
    return sizes.index_dim // 2 + 4


def _scores(sizes: Sizes, batch: int, each: int) -> Workload:
    n = each * 128

    def make(key: Array):
        keys = jax.random.split(key, 3)
        visible = n - jax.random.randint(keys[2], (batch, 1), 0, 100)
        return {**_paged(sizes, keys[0], batch, each), **_queries(sizes, keys[1], batch), "visible": visible}

    def call(a, implementation: str) -> Array:
        return indexer.scores(a["queries"], a["weights"], _keys(a), a["visible"], implementation=implementation)

    def part(a):
        return {**a, **{name: a[name][:8] for name in ("queries", "weights", "visible", "table")}}

    return Workload(
        f"scores B={batch} N={n}",
        "indexer",
        make,
        call,
        bytes=batch * n * (_entry_bytes(sizes) + 4),
        flops=2 * batch * n * sizes.index_heads * sizes.index_dim,
        tolerance=_SCORES,
        part=part,
        large=batch == sizes.many,
        unit="key",
        units=batch * n,
    )


def _random_scores(key: Array, batch: int, n: int) -> Array:
    """Values of bf16, as scores are: with many ties."""
    return jax.random.normal(key, (batch, 1, n), jnp.bfloat16).astype(jnp.float32)


def _select(sizes: Sizes, batch: int, n: int) -> Workload:
    def make(key: Array) -> Array:
        return _random_scores(key, batch, n)

    def call(scores: Array, implementation: str) -> Array:
        return indexer.select(scores, sizes.index_topk, implementation=implementation)

    size = 4 * batch * (n + sizes.index_topk)
    return Workload(
        f"select B={batch} N={n}",
        "indexer",
        make,
        call,
        size,
        0,
        part=lambda a: a[:16],
        large=batch == sizes.many,
        unit="row",
        units=batch,
    )


def _candidate_blocks(sizes: Sizes, batch: int, n: int) -> Workload:
    def make(key: Array):
        keys = jax.random.split(key)
        return _random_scores(keys[0], batch, n), n - jax.random.randint(keys[1], (batch, 1), 0, 100)

    def call(a, implementation: str) -> Array:
        return indexer.candidate_blocks(*a, block=sizes.block, topk=sizes.topk_blocks, implementation=implementation)

    size = 4 * batch * (n + min(sizes.topk_blocks, n // sizes.block))
    name = f"candidate_blocks B={batch} N={n}"
    return Workload(name, "indexer", make, call, size, 0, unit="row", units=batch)


def _pool(sizes: Sizes, key: Array, batch: int, each: int) -> Array:
    blocks = each * 128 // sizes.block
    return kernel_inputs.selections(key, batch, 1, blocks, min(sizes.topk_blocks, blocks))


def _candidate_scores(sizes: Sizes, batch: int) -> Workload:
    each = sizes.index_pages

    def make(key: Array):
        keys = jax.random.split(key, 3)
        cached = {**_paged(sizes, keys[0], batch, each), **_queries(sizes, keys[1], batch)}
        return {**cached, "pool": _pool(sizes, keys[2], batch, each), "visible": jnp.full((batch, 1), each * 128 - 3)}

    def call(a, implementation: str) -> Array:
        return indexer.candidate_scores(
            a["queries"],
            a["weights"],
            _keys(a),
            a["pool"],
            a["visible"],
            block=sizes.block,
            implementation=implementation,
        )

    def part(a):
        return {**a, **{name: a[name][:8] for name in ("queries", "weights", "visible", "table", "pool")}}

    entries = batch * sizes.topk_blocks * sizes.block
    return Workload(
        f"candidate_scores B={batch} P={sizes.topk_blocks}",
        "indexer",
        make,
        call,
        bytes=entries * (_entry_bytes(sizes) + 4),
        flops=2 * entries * sizes.index_heads * sizes.index_dim,
        tolerance=_SCORES,
        part=part,
        unit="query",
        units=batch,
    )


def _select_candidates(sizes: Sizes, batch: int) -> Workload:
    def make(key: Array):
        keys = jax.random.split(key)
        pool = _pool(sizes, keys[0], batch, sizes.index_pages)
        return _random_scores(keys[1], batch, pool.shape[-1] * sizes.block), pool

    def call(a, implementation: str) -> Array:
        return indexer.select_candidates(*a, sizes.index_topk, block=sizes.block, implementation=implementation)

    size = 4 * batch * (sizes.topk_blocks * (sizes.block + 1) + sizes.index_topk)
    name = f"select_candidates B={batch} P={sizes.topk_blocks}"
    return Workload(name, "indexer", make, call, size, 0, unit="row", units=batch)
