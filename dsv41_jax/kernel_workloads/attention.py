"""Sparse attention: decode, a verify block, prefill."""

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import kernel_inputs, quant
from dsv41_jax.kernel_workloads.sizes import Sizes
from dsv41_jax.kernel_workloads.workload import Workload
from dsv41_jax.rings import ring_positions
from pallas_kernels import sparse_attention

# Probabilities are rounded to bf16 relative to different maxima: 2^-8 of the keys' mean magnitude (about 2.5); the
# result is rounded to 8 bits.
_TOLERANCE = (2.0**-7, 3 * 2.0**-8)
_VERIFY = 6  # a committed token and the drafts of a block


def workloads(sizes: Sizes) -> list[Workload]:
    """See `kernel_workloads.workloads`."""
    return [
        _attention(sizes, "decode", sizes.batch, 1),
        _attention(sizes, "decode", sizes.many, 1),
        _attention(sizes, "verify", sizes.batch, _VERIFY),
        _attention(sizes, "prefill", 1, sizes.prefill),
    ]


def _attention(sizes: Sizes, what: str, batch: int, t: int) -> Workload:
    layout = kernel_inputs.layout(1, sizes.head_dim, sizes.index_dim)
    few = t <= _VERIFY
    rows = sizes.window if what == "decode" else sizes.window - 1 + t
    each = sizes.pages
    pages = batch * each
    layers = sizes.layers if few else 1
    entries = each * layout.entries
    heads, dim, k = sizes.heads, sizes.head_dim, sizes.index_topk

    def make(key: Array):
        keys = jax.random.split(key, 6)
        table = kernel_inputs.page_tables(keys[1], batch, each, pages)
        selection = kernel_inputs.selections(keys[2], batch, t, entries, k)
        end = jnp.full((batch,), entries, jnp.int32)
        before = end[:, None] - rows + jnp.arange(rows)  # in order, as a prefill block has them
        return {
            "q": jax.random.normal(keys[0], (batch, t, heads, dim), jnp.bfloat16),
            "at": end[:, None] - t + jnp.arange(t),
            "ring": kernel_inputs.window_ring(keys[3], layers, batch, rows, dim),
            "position": ring_positions(end, rows) if few else before,
            "words": kernel_inputs.main_pool(keys[4], layout, 1, pages),
            "place": kernel_inputs.entry_places(layout, table, selection),
            "sink": jax.random.normal(keys[5], (heads,)),
        }

    def call(a, implementation: str) -> Array:
        window = sparse_attention.WindowKeys(*a["ring"], jnp.int32(layers - 1), a["position"])
        entries = sparse_attention.Entries(a["words"], jnp.int32(0), *a["place"])
        return sparse_attention.attend(
            a["q"], a["at"], window, entries, a["sink"], width=sizes.window, implementation=implementation
        )

    def part(a):
        first = min(batch, 64)
        cut = {name: jax.tree.map(lambda x: x[:first], a[name]) for name in ("q", "at", "position", "place")}
        return {**a, **cut, "ring": tuple(x[:, :first] for x in a["ring"])}

    queries = batch * t
    window_row = dim + dim // quant.BLOCK
    window = batch * rows * (window_row + 4)
    return Workload(
        f"{what} B={batch} t={t}",
        "sparse_attention",
        make,
        call,
        bytes=queries * (k * (4 * layout.main_words + 8) + 4 * heads * dim) + window,
        flops=4 * queries * heads * dim * (k + sizes.window),
        tolerance=_TOLERANCE,
        part=part,
        large=batch == sizes.many,
        unit="query",
        units=queries,
    )
