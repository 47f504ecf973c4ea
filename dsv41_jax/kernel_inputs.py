"""Random inputs of the kernels in the layouts of the caches, at any size: for tests, device checks and benchmarks.

Packed arrays are made packed (random codes under moderate scales), so that a pool of many gigabytes is made on the
device in its own size.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from dsv41_jax.pages import LANES, PageLayout

RELEASED_DTYPE = jnp.dtype(jnp.bfloat16)


def layout(ratio: int, head_dim: int = 512, index_dim: int = 128) -> PageLayout:
    """The packed layout of pages of a ratio."""
    return PageLayout(ratio, head_dim, index_dim, True, RELEASED_DTYPE)


def _words(key: Array, shape: tuple[int, ...]) -> Array:
    return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint32), jnp.int32)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def main_pool(key: Array, pages_of: PageLayout, sources: int, pages: int) -> Array:
    """Main KV words int32 [S, P * rows, 128]: any codes, scales 0.5 to 1.875 (E4M3)."""
    words = _words(key, (sources, pages * pages_of.main_rows, LANES))
    row = jnp.arange(words.shape[1]) % pages_of.main_rows
    word = (row[:, None] * LANES + jnp.arange(LANES)) % pages_of.main_words
    return jnp.where(word >= pages_of.head_dim // 8, (words & 0x0F0F0F0F) | 0x30303030, words)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def index_pool(key: Array, pages_of: PageLayout, sources: int, pages: int) -> tuple[Array, Array]:
    """Index codes int32 [S, P, rows, 128] and scales int32 [S, scale rows, 128]: any codes, scales 1/4 to 2 (UE8M0)."""
    shapes = pages_of.abstract_index(sources, pages)
    keys = jax.random.split(key)
    scales = _words(keys[1], shapes["scales"].shape) & 0x03030303
    return _words(keys[0], shapes["codes"].shape), scales + 0x7D7D7D7D


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def window_ring(key: Array, layers: int, batch: int, size: int, dim: int) -> tuple[Array, Array]:
    """Ring codes uint8 [L, B, R, d] and scales uint8 [L, B, d/32, R]: codes up to 3.75, scales 1/4 to 2."""
    keys = jax.random.split(key)
    codes = jax.random.bits(keys[0], (layers, batch, size, dim), jnp.uint8)
    codes = jnp.where(codes & 0x7F > 0x47, codes & 0xBF, codes)
    scales = jax.random.bits(keys[1], (layers, batch, dim // quant.BLOCK, size), jnp.uint8)
    return codes, (scales & 3) + jnp.uint8(125)


def page_tables(key: Array, batch: int, each: int, pages: int) -> Array:
    """Page table int32 [B, each]: disjoint pages in random order. `pages` of the pool are at least batch * each."""
    return jax.random.permutation(key, pages)[: batch * each].reshape(batch, each).astype(jnp.int32)


def entry_places(pages_of: PageLayout, table: Array, selection: Array) -> tuple[Array, Array]:
    """Row and lane int32 [B, t, K] at which the selected entries (-1: none) of page tables [B, n] begin."""
    entry = jnp.maximum(selection, 0)
    page = jnp.take_along_axis(table[:, None], entry // pages_of.entries, axis=-1)
    row, lane = pages_of.main_start(page, entry % pages_of.entries)
    return jnp.where(selection >= 0, row, -1), lane


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def selections(key: Array, batch: int, t: int, entries: int, k: int) -> Array:
    """int32 [B, t, K] ascending numbers of distinct entries below `entries` (one from each of K equal runs)."""
    run = max(entries // k, 1)
    number = jnp.arange(k) * run + jax.random.randint(key, (batch, t, k), 0, run)
    return jnp.where(number < entries, number, -1).astype(jnp.int32)


def index_queries(key: Array, batch: int, t: int, heads: int, dim: int) -> tuple[Array, Array]:
    """Index queries bf16 [B, t, heads, dim] as the indexer quantises them, and head weights bf16 [B, t, heads]."""
    keys = jax.random.split(key)
    queries = quant.fake_q4_index(jax.random.normal(keys[0], (batch, t, heads, dim), RELEASED_DTYPE))
    weights = jax.random.normal(keys[1], (batch, t, heads), jnp.float32) * (heads * dim) ** -0.5
    return queries, weights.astype(RELEASED_DTYPE)
