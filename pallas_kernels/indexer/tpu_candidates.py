"""Scores of the entries of each query's candidate pool on a TPU: work and traffic depend on the pool, not on context.

The page of every block of the pool is copied into VMEM, and the lanes of its entries are rotated to where the pool's
order has them. What results is packed like any page, and is unpacked and scored like one (`tpu_keys`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.implementation import traced_once
from pallas_kernels.indexer.reference import LANES, PagedKeys
from pallas_kernels.indexer.tpu_keys import Packing, PageBuffers, head_sums, pad_to, round_bf16, row_weights

_FETCHED = 256  # blocks, at most, that are fetched together
_TILE = 16  # rows of 128 entries, at most, that are fetched together
_GROUP = 4  # of these, scored together
_VMEM_BYTES = 48 * 2**20


def _kernel(packing, block, rows, interpret, visible, held, slot, table, after, pool, pool_after, q, w, codes, scales,
            out, *scratch):  # fmt: skip
    """Scores of the pool of one query."""
    buffers = PageBuffers(packing, slot, codes, scales, scratch)
    fetched = buffers.codes.shape[1]
    tile_rows = fetched * block // LANES
    block_bits = (packing.entries // block).bit_length() - 1  # of the blocks of a page
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    part, row = pl.program_id(0), pl.program_id(1)
    r = part * rows + row

    def tiles_of(query):
        return jax.lax.div(held[query] + fetched - 1, fetched)

    def page_of(row_table, row_pool, number):
        return row_table[0, 0, row_pool[0, 0, number] >> block_bits]

    def start(row_table, row_pool, tile, buffer):
        unroll = 1 if interpret else 8
        buffers.start(buffer, lambda i: page_of(row_table, row_pool, tile * fetched + i), unroll)

    pl.when(row == 0)(buffers.reset)
    tiles = tiles_of(r)
    following = jnp.where(row + 1 < rows, held[jnp.minimum(r + 1, held.shape[0] - 1)], 0)
    out[...] = jnp.full_like(out, -jnp.inf)
    pl.when((tiles > 0) & (buffers.state[1] == 0))(lambda: start(table, pool, 0, buffers.state[0]))

    def score(tile, _):
        buffer = buffers.advance(
            tile + 1 < tiles,
            lambda other: start(table, pool, tile + 1, other),
            following > 0,
            lambda other: start(after, pool_after, 0, other),
        )
        jax.lax.fori_loop(0, tile_rows // group_rows, functools.partial(group, tile, buffer), 0)
        return 0

    group_rows = min(_GROUP, tile_rows)
    per_row = LANES // block

    def group(tile, buffer, g, _):
        words, words_scales, shown = [], [], []
        for i in range(group_rows):
            first = (g * group_rows + i) * per_row
            gathered = jax.lax.fori_loop(
                0,
                per_row,
                functools.partial(place_block, tile, buffer, first),
                (
                    jnp.zeros((packing.rows, LANES), jnp.int32),
                    jnp.zeros((1, LANES), jnp.int32),
                    jnp.zeros((1, LANES), jnp.int32),
                ),
                unroll=not interpret,
            )
            for rest, part in zip((words, words_scales, shown), gathered, strict=True):
                rest.append(part)
        scale_rows = packing.scales(jnp.concatenate(words_scales, axis=0))
        parts = [packing.unpack(words[i], [scale[i : i + 1] for scale in scale_rows]) for i in range(group_rows)]
        sums = head_sums(q[0], w[0], jnp.concatenate(parts, axis=1), 1, interpret)
        for i in range(group_rows):
            part = round_bf16(sums[:, i * LANES : (i + 1) * LANES], interpret)
            at = tile * tile_rows + g * group_rows + i
            out[0, pl.ds(at, 1)] = jnp.where(lane < shown[i], part, -jnp.inf)
        return 0

    def place_block(tile, buffer, first, i, carry):
        """Rotate a block's lanes to its place in a row, number `first` + i of a tile."""
        words, words_scales, shown = carry
        number = first + i
        entry = pool[0, 0, tile * fetched + number] * block
        place = entry & (packing.entries - 1)
        own = lane >> (block.bit_length() - 1) == i
        target = i * block

        def rotate(x, origin):
            return pltpu.roll(x, (target - origin) & (LANES - 1), 1)

        fetched_words = buffers.codes[buffer, number]
        if packing.pages == 1:
            moved, scale_place = rotate(fetched_words, place), place
        else:  # even words are in the left half of a page's rows, odd ones in the right half
            halves = [rotate(fetched_words, place), rotate(fetched_words, place + LANES // 2)]
            moved = jnp.concatenate(halves, axis=0)
            scale_place = place + (page_of(table, pool, tile * fetched + number) & 1) * (LANES // 2)
        words = jnp.where(own, moved, words)
        words_scales = jnp.where(own, rotate(buffers.scales[buffer, pl.ds(number, 1)], scale_place), words_scales)
        # Lanes below this are visible entries.
        return words, words_scales, jnp.where(own, visible[r] - entry + target, shown)

    jax.lax.fori_loop(0, tiles, score, 0)


@traced_once("block", "interpret")
def candidate_scores(
    queries: Array, weights: Array, keys: PagedKeys, pool: Array, visible: Array, *, block: int, interpret: bool
) -> Array:
    """See `pallas_kernels.indexer.candidate_scores`. Grid: halves of the queries, queries of a half."""
    b, t, _, dim = queries.shape
    packing = Packing(dim, keys.entries)
    queries, weights = (pad_to(x, 2, 8) for x in (queries, weights))
    q, w = packing.queries(queries).reshape(b * t, queries.shape[2], -1), row_weights(weights.reshape(b * t, -1))
    n, blocks = keys.page_table.shape[1] * keys.entries, pool.shape[2]
    fetched = min(_FETCHED, _TILE * LANES // block, -(-blocks * block // (_GROUP * LANES)) * _GROUP * LANES // block)
    held = jnp.sum((pool >= 0) & (pool < n // block), axis=2, dtype=jnp.int32).reshape(-1)
    # No block is the one after the last: nobody sees it, and there is a page to fetch.
    pool = jnp.where(pool < 0, n // block, jnp.minimum(pool, n // block))
    pool = pad_to(pool.reshape(b * t, blocks), 1, fetched, n // block)
    table = jnp.pad(jnp.clip(keys.page_table, 0, keys.codes.shape[1] - 1), ((0, 0), (0, 1)))[:, None]
    visible = jnp.minimum(visible, n)
    out_rows = pool.shape[1] * block // LANES
    pool = pool[:, None]

    total = b * t
    parts = 2 if total % 2 == 0 else 1
    rows = total // parts

    def spec(shape, index, **kwargs):
        return pl.BlockSpec((1, *shape), lambda part, row, *_: (index(part * rows + row), 0, 0), **kwargs)

    def own(r):
        return r

    def following(r):
        return jnp.minimum(r + 1, total - 1)

    smem = functools.partial(spec, memory_space=pltpu.SMEM)
    out = pl.pallas_call(
        functools.partial(_kernel, packing, block, rows, interpret),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(parts, rows),
            in_specs=[
                smem(table.shape[1:], lambda r: jax.lax.div(r, t)),
                smem(table.shape[1:], lambda r: jax.lax.div(following(r), t)),
                smem(pool.shape[1:], own),
                smem(pool.shape[1:], following),
                spec(q.shape[1:], own),
                spec(w.shape[1:], own),
                pl.BlockSpec(memory_space=pltpu.HBM),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=spec((out_rows, LANES), own),
            scratch_shapes=PageBuffers.scratch(packing, fetched),
        ),
        out_shape=jax.ShapeDtypeStruct((total, out_rows, LANES), jnp.float32),
        interpret=interpret,
        name="indexer_candidate_scores",
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES, disable_bounds_checks=True
        ),
    )(
        visible.reshape(-1).astype(jnp.int32),
        held,
        jnp.asarray(keys.slot, jnp.int32).reshape(1),
        table,
        table,
        pool,
        pool,
        q,
        w,
        keys.codes,
        keys.scales,
    )
    return out.reshape(b, t, -1)[..., : blocks * block]
