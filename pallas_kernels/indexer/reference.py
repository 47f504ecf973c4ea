"""What is right: scores of index keys, exact selection and candidate pools in plain jax.numpy.

Scores are rounded to the activation dtype in three places (per-head dot, weighted head, head sum), as the release does:
they decide ties. Everywhere the lowest index wins a tie, -0 ties with +0, and -inf is never chosen.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from dsv41_jax.numerics import RELEASED, Numerics, einsum_f32

LANES = 128


@flax.struct.dataclass
class PagedKeys:
    """Packed index keys of one source in a pool of pages (`dsv41_jax.pages` describes the layout).

    Attributes:
        codes: int32 [S, P, rows, 128], E2M1 codes channel-major: word w of all keys of a page, then word w + 1; nibble
            k of word w is channel k * di/8 + w.
        scales: int32 [S, scale rows, 128], the UE8M0 bytes of a page's keys side by side, one word a key; byte b is
            the scale of channels 32 b .. 32 b + 31 (for at most 128 channels).
        slot: int32 scalar or int, the source.
        page_table: int32 [B, n], the pages of each row's sequence in order.
        entries: keys of a page, static.
    """

    codes: Array
    scales: Array
    slot: Array | int
    page_table: Array
    entries: int = flax.struct.field(pytree_node=False)


def _bytes_of(words: Array, bits: int) -> Array:
    """int32 [..., n] -> its fields of `bits` bits, lowest first: uint8 [..., 32 // bits, n]."""
    shift = bits * jnp.arange(32 // bits, dtype=jnp.uint32)[:, None]
    fields = jax.lax.bitcast_convert_type(words, jnp.uint32)[..., None, :] >> shift
    return (fields & (2**bits - 1)).astype(jnp.uint8)


def unpack(keys: PagedKeys, dim: int) -> Array:
    """Keys in the order of the page table, bf16 [B, n * entries, dim]. Exact: a code times its scale fits bf16."""
    b, n = keys.page_table.shape
    width, size = dim // 8, keys.entries
    tiles = keys.codes.at[keys.slot, keys.page_table].get(mode="promise_in_bounds").reshape(b, n, -1)
    words = tiles[..., : width * size].reshape(b, n, width, size).swapaxes(-1, -2)
    values = quant.e2m1_values(_bytes_of(words, 4).reshape(b, n, size, dim))

    scale_words = -(-dim // (4 * quant.BLOCK))
    count = size * scale_words  # words of a page
    together = max(1, LANES // count)  # pages that share a row
    word = jnp.arange(size)[:, None] + size * jnp.arange(scale_words)
    page = keys.page_table[..., None, None]
    row = page // together * -(-count // LANES) + word // LANES
    lane = page % together * count + word % LANES
    scales = keys.scales.at[keys.slot, row, lane].get(mode="promise_in_bounds")
    scales = _bytes_of(scales, 8).reshape(b, n, size, 4 * scale_words)[..., : dim // quant.BLOCK]
    values = values * jnp.repeat(quant.e8m0_to_f32(scales), quant.BLOCK, axis=-1)
    return values.astype(jnp.bfloat16).reshape(b, n * size, dim)


def index_scores(queries: Array, weights: Array, keys: Array, numerics: Numerics) -> Array:
    """Scores float32 [B, t, N] (rounded to the activation dtype) of unpacked keys [B, N, dim]; nothing is hidden.

    Args:
        queries: [B, t, heads, dim]. weights: [B, t, heads].
    """
    e = numerics.round_f32(einsum_f32("bthd,bnd->bthn", queries, keys))
    e = numerics.round_f32(jax.nn.relu(e) * weights.astype(jnp.float32)[..., None])
    return numerics.round_f32(jnp.sum(e, axis=2))


def scores(queries: Array, weights: Array, keys: PagedKeys, visible: Array) -> Array:
    """See `pallas_kernels.indexer.scores`."""
    all_scores = index_scores(queries, weights, unpack(keys, queries.shape[-1]), RELEASED)
    return jnp.where(jnp.arange(all_scores.shape[-1]) < visible[..., None], all_scores, -jnp.inf)


def one_zero(scores: Array) -> Array:
    """-0 becomes +0, so that the two tie: top_k ranks -0 lower. XLA would drop an addition of 0.0."""
    return jnp.where(scores == 0.0, 0.0, scores)


def select(scores: Array, k: int) -> Array:
    """See `pallas_kernels.indexer.select`."""
    n = scores.shape[-1]
    values, index = jax.lax.top_k(one_zero(scores), min(k, n))
    index = jnp.sort(jnp.where(values > -jnp.inf, index, n), axis=-1)
    index = jnp.where(index < n, index, -1).astype(jnp.int32)
    return jnp.pad(index, [(0, 0)] * (index.ndim - 1) + [(0, k - index.shape[-1])], constant_values=-1)


def candidate_blocks(scores: Array, visible: Array, *, block: int, topk: int) -> Array:
    """See `pallas_kernels.indexer.candidate_blocks`."""
    n = scores.shape[-1]
    blocks = -(-n // block)
    seen = jnp.where(jnp.arange(n) < visible[..., None], scores, -jnp.inf)
    padded = jnp.pad(seen, ((0, 0), (0, 0), (0, blocks * block - n)), constant_values=-jnp.inf)
    best = jnp.max(padded.reshape(*scores.shape[:2], blocks, block), axis=-1)
    newest = (visible - 1) // block  # negative, no block, where nothing is visible
    best = jnp.where(jnp.arange(blocks) == newest[..., None], jnp.inf, best)
    return select(best, min(topk, blocks))


def pool_entries(pool: Array, block: int) -> Array:
    """Entry numbers int32 [B, t, P * block] of a pool of block numbers [B, t, P]; -1 where there is no block."""
    entry = pool[..., None] * block + jnp.arange(block)
    return jnp.where(pool[..., None] < 0, -1, entry).reshape(*pool.shape[:-1], -1)


def candidate_scores(
    queries: Array, weights: Array, keys: PagedKeys, pool: Array, visible: Array, *, block: int
) -> Array:
    """See `pallas_kernels.indexer.candidate_scores`."""
    all_scores = scores(queries, weights, keys, visible)
    entry = pool_entries(pool, block)
    held = (entry >= 0) & (entry < all_scores.shape[-1])
    found = jnp.take_along_axis(all_scores, jnp.where(held, entry, 0), axis=-1)
    return jnp.where(held, found, -jnp.inf)


def select_candidates(scores: Array, pool: Array, k: int, *, block: int) -> Array:
    """See `pallas_kernels.indexer.select_candidates`."""
    return entry_numbers(select(scores, k), pool, block)


def entry_numbers(place: Array, pool: Array, block: int) -> Array:
    """Entry numbers of places 0 .. P * block - 1 in a pool's scores; -1 stays -1."""
    number = jnp.take_along_axis(pool, jnp.maximum(place, 0) // block, axis=-1)
    return jnp.where(place < 0, -1, number * block + place % block)
