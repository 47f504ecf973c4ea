"""kv_write: what a block of tokens leaves in the caches."""

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import kernel_inputs, quant
from dsv41_jax.kernel_workloads.sizes import Sizes
from dsv41_jax.kernel_workloads.workload import Workload
from pallas_kernels import kv_write

_EPS = 1e-20
# The mean of squares is summed in another order: some normed values at a tie of bf16 rounding fall to the other side,
# one unit in the last place of 8 bits, and with a few of them a code.
_LATENT = (2.0**-7, 0.0)


def _flips(numbers: int) -> int:
    """Codes of that many that may differ."""
    return 2 + numbers // 10000


def workloads(sizes: Sizes) -> list[Workload]:
    """See `kernel_workloads.workloads`."""
    return [
        build(sizes, batch, n)
        for build in (_main_entries, _index_entries, _window_rows)
        for batch, n in ((sizes.batch, 1), (sizes.many, 1), (1, sizes.prefill))
    ]


def _rows(sizes: Sizes, key: Array, batch: int, n: int, dim: int):
    keys = jax.random.split(key, 3)
    angle = jax.random.uniform(keys[2], (batch, n, sizes.rope_dim // 2), maxval=6.0)
    raw = jax.random.normal(keys[0], (batch, n, dim), jnp.bfloat16)
    norm = 1 + 0.1 * jax.random.normal(keys[1], (dim,))
    return {"raw": raw, "norm": norm.astype(jnp.bfloat16), "cos": jnp.cos(angle), "sin": jnp.sin(angle)}


def _places(sizes: Sizes, key: Array, batch: int, n: int):
    """Consecutive entries of each row, from a random one on, in pages of its own."""
    each = max(sizes.pages, n // 128 + 2)
    keys = jax.random.split(key)
    table = kernel_inputs.page_tables(keys[0], batch, each, batch * each)
    first = jax.random.randint(keys[1], (batch, 1), 0, (each - 1) * 128 - n + 1)
    entry = first + jnp.arange(n)
    page = jnp.take_along_axis(table, entry // 128, axis=1)
    return {"page": page, "place": entry % 128, "keep": jnp.ones((batch, n), bool)}, batch * each


def _main_entries(sizes: Sizes, batch: int, n: int) -> Workload:
    layout = kernel_inputs.layout(1, sizes.head_dim, sizes.index_dim)

    def make(key: Array):
        keys = jax.random.split(key, 3)
        places, pages = _places(sizes, keys[1], batch, n)
        rows = _rows(sizes, keys[0], batch, n, sizes.head_dim)
        return {**rows, **places, "words": kernel_inputs.main_pool(keys[2], layout, 1, pages)}

    def call(a, implementation: str):
        return kv_write.main_entries(
            a["raw"],
            a["norm"],
            a["cos"],
            a["sin"],
            a["words"],
            jnp.int32(0),
            a["page"],
            a["place"],
            a["keep"],
            page_entries=layout.entries,
            page_rows=layout.main_rows,
            eps=_EPS,
            implementation=implementation,
        )

    flips = _flips(batch * n * sizes.head_dim)
    size = batch * n * (4 * sizes.head_dim + 4 * layout.main_words)
    updates = {"words": 0}
    return Workload(
        f"main_entries B={batch} n={n}",
        "kv_write",
        make,
        call,
        size,
        0,
        _LATENT,
        flips,
        updates=updates,
        unit="row",
        units=batch * n,
    )


def _index_entries(sizes: Sizes, batch: int, n: int) -> Workload:
    layout = kernel_inputs.layout(1, sizes.head_dim, sizes.index_dim)

    def make(key: Array):
        keys = jax.random.split(key, 3)
        places, pages = _places(sizes, keys[1], batch, n)
        codes, scales = kernel_inputs.index_pool(keys[2], layout, 1, pages)
        return {**_rows(sizes, keys[0], batch, n, sizes.index_dim), **places, "codes": codes, "scales": scales}

    def call(a, implementation: str):
        return kv_write.index_entries(
            a["raw"],
            a["norm"],
            a["cos"],
            a["sin"],
            a["codes"],
            a["scales"],
            jnp.int32(0),
            a["page"],
            a["place"],
            a["keep"],
            page_entries=layout.entries,
            eps=_EPS,
            implementation=implementation,
        )

    flips = _flips(batch * n * sizes.index_dim)
    size = batch * n * (2 * sizes.index_dim + sizes.index_dim // 2 + 4)
    updates = {"codes": 0, "scales": 1}
    return Workload(
        f"index_entries B={batch} n={n}",
        "kv_write",
        make,
        call,
        size,
        0,
        _LATENT,
        flips,
        updates=updates,
        unit="row",
        units=batch * n,
    )


def _window_rows(sizes: Sizes, batch: int, t: int) -> Workload:
    def make(key: Array):
        keys = jax.random.split(key, 3)
        codes, scales = kernel_inputs.window_ring(keys[0], sizes.layers, batch, sizes.window, sizes.head_dim)
        start = jax.random.randint(keys[2], (batch,), 0, 1000)
        rows = _rows(sizes, keys[1], batch, t, sizes.head_dim)
        return {**rows, "codes": codes, "scales": scales, "start": start, "n_valid": jnp.full((batch,), t)}

    def call(a, implementation: str):
        return kv_write.window_rows(
            a["raw"],
            a["norm"],
            a["cos"],
            a["sin"],
            a["codes"],
            a["scales"],
            jnp.int32(sizes.layers - 1),
            a["start"],
            a["n_valid"],
            eps=_EPS,
            implementation=implementation,
        )

    stored = sizes.head_dim + sizes.head_dim // quant.BLOCK
    flips = _flips(2 * batch * t * sizes.head_dim)
    size = batch * (2 * t * sizes.head_dim + (t + min(t, sizes.window)) * stored)
    updates = {"codes": 0, "scales": 1}
    return Workload(
        f"window_rows B={batch} t={t}",
        "kv_write",
        make,
        call,
        size,
        0,
        _LATENT,
        flips,
        updates=updates,
        unit="row",
        units=batch * t,
    )
