"""Scores of paged FP4 index keys on a TPU.

Pages are copied by hand into double-buffered tiles of keys and unpacked on the way to the matrix unit (`tpu_keys`);
nothing but the scores is written.
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

_TILE = 16  # rows of 128 keys that are fetched together
_GROUP = 4  # of these, scored together
_SPAN = 64  # at most, of a grid step
_QUERIES = 64  # at most, of a grid step
_TOGETHER = 8  # queries scored together
_VMEM_BYTES = 48 * 2**20


def _kernel(packing: Packing, sizes, interpret, visible, limit, slot, table, after, q, w, codes, scales, out, *scratch):
    """Scores of `count` queries of a row for the keys of a span; see `scores` for the grid."""
    rows, blocks, count, span = sizes
    buffers = PageBuffers(packing, slot, codes, scales, scratch)
    part, row, block, step = (pl.program_id(i) for i in range(4))
    b = part * rows + row
    tile_keys, tile_pages = _TILE * LANES, _TILE * packing.pages
    tiles = jax.lax.div(limit[b] + tile_keys - 1, tile_keys)  # of this row that hold a visible key

    def start(row_table, tile, buffer):
        unroll = 1 if interpret else tile_pages
        buffers.start(buffer, lambda i: row_table[0, 0, tile * tile_pages + i], unroll)

    pl.when((row == 0) & (block == 0) & (step == 0))(buffers.reset)
    first = step * (span // _TILE)
    here = jnp.clip(tiles - first, 0, span // _TILE)
    following = jnp.where(row + 1 < rows, limit[jnp.minimum(b + 1, limit.shape[0] - 1)], 0)
    pl.when((here > 0) & (buffers.state[1] == 0))(lambda: start(table, first, buffers.state[0]))

    def score(i, _):
        tile = first + i
        last = tile + 1 == tiles
        buffer = buffers.advance(
            ~(last & (block + 1 == blocks)),
            lambda other: start(table, jnp.where(last, 0, tile + 1), other),
            following > 0,
            lambda other: start(after, 0, other),
        )
        _score_tile(buffers, count, interpret, table, tile, buffer, q, w, out, i)
        return 0

    jax.lax.fori_loop(0, here, score, 0)

    key = (step * span + jax.lax.broadcasted_iota(jnp.int32, (span, LANES), 0)) * LANES
    key = key + jax.lax.broadcasted_iota(jnp.int32, (span, LANES), 1)

    def hide(i, _):
        seen = visible[(b * blocks + block) * count + i]
        out[0, i] = jnp.where(key < seen, round_bf16(out[0, i], interpret), -jnp.inf)
        return 0

    jax.lax.fori_loop(0, count, hide, 0)


def _score_tile(buffers, count, interpret, table, tile, buffer, q, w, out, place):
    """Sums over heads of one tile of keys into rows 16 * place .. of `out`."""
    packing, pages = buffers.packing, buffers.packing.pages
    lanes = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    together = min(count, _TOGETHER)
    heads = q.shape[1] // count

    def words_of(r):
        if pages == 1:
            return buffers.codes[buffer, r]
        a, b = buffers.codes[buffer, 2 * r], buffers.codes[buffer, 2 * r + 1]
        left = lanes < LANES // 2
        even = jnp.where(left, a, pltpu.roll(b, LANES // 2, 1))
        odd = jnp.where(left, pltpu.roll(a, LANES // 2, 1), b)
        return jnp.concatenate([even, odd], axis=0)

    def scale_words_of(r):
        if pages == 1:
            return buffers.scales[buffer, pl.ds(r, 1)]
        halves = []
        for side in range(2):  # the side of the row that a page's scales are on is the page's own
            page = table[0, 0, (tile * _TILE + r) * 2 + side]
            scale = buffers.scales[buffer, pl.ds(2 * r + side, 1)]
            halves.append(pltpu.roll(scale, ((page + side) & 1) * (LANES // 2), 1))
        return jnp.where(lanes < LANES // 2, *halves)

    def group(g, _):
        scales = packing.scales(jnp.concatenate([scale_words_of(g * _GROUP + i) for i in range(_GROUP)], axis=0))
        parts = []
        for i in range(_GROUP):
            parts.append(packing.unpack(words_of(g * _GROUP + i), [scale[i : i + 1] for scale in scales]))
        keys = jnp.concatenate(parts, axis=1)

        def queries(j, _):
            rows = pl.ds(pl.multiple_of(j * together * heads, 8), together * heads)
            sums = head_sums(q[0, rows], w[0, rows], keys, together, interpret)
            for i in range(_GROUP):
                part = sums[:, i * LANES : (i + 1) * LANES]
                out[0, pl.ds(j * together, together), place * _TILE + g * _GROUP + i] = part
            return 0

        jax.lax.fori_loop(0, count // together, queries, 0, unroll=count == together)
        return 0

    unroll = count == together and not interpret
    jax.lax.fori_loop(0, _TILE // _GROUP, group, 0, unroll=unroll)


@traced_once("interpret")
def scores(queries: Array, weights: Array, keys: PagedKeys, visible: Array, *, interpret: bool) -> Array:
    """See `pallas_kernels.indexer.scores`.

    Grid: halves of the batch (one for each core of a chip that has two), rows of a half, blocks of queries, spans of
    keys. Only tiles that hold a visible key are fetched.
    """
    b, t, heads, dim = queries.shape
    packing = Packing(dim, keys.entries)
    count = t if t <= _TOGETHER else min(_QUERIES, -(-t // _TOGETHER) * _TOGETHER)
    queries, weights = (pad_to(pad_to(x, 1, count), 2, 8) for x in (queries, weights))
    visible = pad_to(jnp.clip(visible, 0, keys.page_table.shape[1] * keys.entries), 1, count)
    padded, heads = queries.shape[1:3]
    blocks = padded // count
    n = keys.page_table.shape[1] * keys.entries
    tiles = -(-n // (_TILE * LANES))
    span = _TILE * min(tiles, _SPAN // _TILE)
    table = jnp.clip(keys.page_table, 0, keys.codes.shape[1] - 1)
    table = pad_to(table, 1, span * packing.pages)[:, None]
    spans = table.shape[2] // (span * packing.pages)

    q = packing.queries(queries).reshape(b, padded * heads, -1)
    w = row_weights(weights.reshape(b, padded * heads))
    parts = 2 if b % 2 == 0 else 1
    rows = b // parts

    def of_row(shape, index, **kwargs):
        """Block of a row's array: `index` takes the row, the block of queries and the span."""
        return pl.BlockSpec(shape, lambda part, row, block, step, *_: index(part * rows + row, block, step), **kwargs)

    smem = functools.partial(of_row, (1, 1, table.shape[2]), memory_space=pltpu.SMEM)
    out = pl.pallas_call(
        functools.partial(_kernel, packing, (rows, blocks, count, span), interpret),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(parts, rows, blocks, spans),
            in_specs=[
                smem(lambda i, block, step: (i, 0, 0)),
                smem(lambda i, block, step: (jnp.minimum(i + 1, b - 1), 0, 0)),
                of_row((1, count * heads, q.shape[-1]), lambda i, block, step: (i, block, 0)),
                of_row((1, count * heads, LANES), lambda i, block, step: (i, block, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=of_row((1, count, span, LANES), lambda i, block, step: (i, block, step, 0)),
            scratch_shapes=PageBuffers.scratch(packing, _TILE * packing.pages),
        ),
        out_shape=jax.ShapeDtypeStruct((b, padded, spans * span, LANES), jnp.float32),
        interpret=interpret,
        name="indexer_scores",
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=_VMEM_BYTES,
            disable_bounds_checks=True,
        ),
    )(
        visible.reshape(-1).astype(jnp.int32),
        jnp.max(visible, axis=1).astype(jnp.int32),
        jnp.asarray(keys.slot, jnp.int32).reshape(1),
        table,
        table,
        q,
        w,
        keys.codes,
        keys.scales,
    )
    return out.reshape(b, padded, -1)[:, :t, :n]
