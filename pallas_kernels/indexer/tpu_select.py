"""Exact selection of the k best scores on a TPU, without a sort.

A query's scores lie in VMEM as integers of the same order. The k-th best is found bit by bit, by counting; what is above
it, and the first ones of those equal to it, are kept; sums over triangles and a matrix of zeros and ones, all on the
matrix unit, turn the marks into a list of indices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.indexer.reference import LANES

_CHUNK = 256  # rows of 128 scores that are handled together
_VMEM_BYTES = 56 * 2**20
_LOWEST = np.int32(-(2**31))
_NEVER = np.int32(-0x7F800000)  # -inf, which is never chosen


def _ordered(x: Array) -> Array:
    """float32 -> int32 of the same order; -0 and +0 become 0, and bf16 values keep 16 zero bits."""
    bits = pltpu.bitcast(x, jnp.int32)
    return jnp.where(bits < 0, _LOWEST - bits, bits)


def _best_of_blocks(x: Array, index: Array, block: int, seen: Array) -> Array:
    """Every block's best visible score at its first index, -inf elsewhere; the newest visible block gets +inf."""
    x = jnp.where(index < seen, x, -jnp.inf)
    width = 1
    while width < block:
        x = jnp.maximum(x, pltpu.roll(x, LANES - width, 1))
        width *= 2
    first = (index & (block - 1)) == 0
    newest = (seen > 0) & (index == ((seen - 1) & ~(block - 1)))
    return jnp.where(newest, jnp.inf, jnp.where(first, x, -jnp.inf))


def _total(x: Array) -> Array:
    """Sum of everything, float32 [1, 1]; a scalar would have to leave the vector unit."""
    return jnp.sum(jnp.sum(x, axis=0, keepdims=True), axis=1, keepdims=True)


def _eight_rows(x: Array) -> Array:
    """Sums [8, 128] of float32 [rows, 128], with rows a multiple of 8."""
    return jnp.sum(x.reshape(-1, 8, LANES), axis=0)


def _kernel(k, width, block, visible, x, within_row, before_row, out, ordered):
    chunk = before_row.shape[0]
    chunks = ordered.shape[0] // chunk
    seen = visible[pl.program_id(0)]

    def rows(c):
        return pl.ds(pl.multiple_of(c * chunk, chunk), chunk)

    # Order. Find where the scores above -inf end, and whether all are bf16 values.
    def order(c, carry):
        end, low_bits = carry
        score = x[0, rows(c)]
        if block is not None:
            index = (c * chunk + jax.lax.broadcasted_iota(jnp.int32, score.shape, 0)) * LANES
            index = index + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
            score = _best_of_blocks(score, index, block, seen)
        u = _ordered(score)
        ordered[rows(c)] = u
        some = jnp.max(score.reshape(-1, 8, LANES), axis=0) > -jnp.inf
        low = functools.reduce(jnp.bitwise_or, [u[i : i + 8] for i in range(0, chunk, 8)])
        return jnp.where(some, c + 1, end), low_bits | low

    nothing = jnp.zeros((8, LANES), jnp.int32)
    end, low_bits = jax.lax.fori_loop(0, chunks, order, (nothing, nothing))
    end = jnp.max(end.astype(jnp.float32)).astype(jnp.int32)
    wide = jnp.max((low_bits & 0xFFFF).astype(jnp.float32)) > 0

    # The k-th best score: the largest `bound` of which at least k scores are at or above.
    def count(above: Array) -> Array:
        def add(c, sums):
            return sums + _eight_rows((ordered[rows(c)] >= above).astype(jnp.float32))

        return _total(jax.lax.fori_loop(0, end, add, jnp.zeros((8, LANES), jnp.float32)))

    def step(i, bound):
        higher = bound + jnp.left_shift(1, 30 - i)
        return jnp.where(count(higher) >= k, higher, bound)

    zero = jnp.zeros((1, 1), jnp.int32)
    bound = jnp.where(count(zero) >= k, zero, _LOWEST)
    bound = jax.lax.fori_loop(0, jnp.where(wide, 31, 15), step, bound)
    ties = jnp.where(bound > _NEVER, k - count(jnp.maximum(bound, _NEVER) + 1), 0.0)  # how many of them to keep
    bound = jnp.maximum(bound, _NEVER)

    # Column j of the result belongs to the j-th kept score. [incl <= j] marks the rows that lie wholly before it.
    column = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1).astype(jnp.float32)
    lane = jax.lax.broadcasted_iota(jnp.int32, (chunk, LANES), 1)
    row = jax.lax.broadcasted_iota(jnp.int32, (chunk, LANES), 0)

    def ranks(marks: Array) -> tuple[Array, Array, Array]:
        """Of marks bf16 [chunk, 128]: each one's rank within its row from 1, the row's count, that of rows before."""
        both = jnp.dot(marks, within_row[...], preferred_element_type=jnp.float32)
        counts = both[:, LANES:]
        before = jnp.dot(before_row[...], counts.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        return both[:, :LANES], counts, before

    def contract(a: Array, b: Array) -> Array:
        return jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    def compact(c, carry):
        kept_before, tied_before, picked, totals = carry
        u = ordered[rows(c)]
        tied = u == bound
        rank, counts, before = ranks(tied.astype(jnp.float32).astype(jnp.bfloat16))
        keep = (u > bound) | (tied & (rank + before + tied_before <= ties))
        tied_before = tied_before + (before + counts)[chunk - 1 :, :1]
        marks = keep.astype(jnp.float32)
        rank, counts, before = ranks(marks.astype(jnp.bfloat16))
        rank = rank * marks
        through = before + counts + kept_before
        tiles = [jnp.where(through <= column[:, i : i + LANES], 1.0, 0.0) for i in range(0, width, LANES)]
        wholly_before = jnp.concatenate(tiles, axis=1).astype(jnp.bfloat16)
        # The row of column j is the one after those wholly before: it adds the rank of its own, and takes the last.
        following = jnp.where(row == chunk - 1, 0.0, pltpu.roll(rank, chunk - 1, 0))
        picked = picked + contract((following - rank).astype(jnp.bfloat16), wholly_before)
        head = jnp.where(row[:16] == 0, rank[:16], 0.0).astype(jnp.bfloat16)
        opened = jnp.broadcast_to(jnp.where(kept_before <= column, 1.0, 0.0), (16, width)).astype(jnp.bfloat16)
        picked = picked + contract(head, opened)
        sums = jnp.where(lane == 0, counts, 1.0)[:, :8].astype(jnp.bfloat16)
        totals = totals + contract(sums, wholly_before)
        return through[chunk - 1 :, :1], tied_before, picked, totals

    none = jnp.zeros((1, 1), jnp.float32)
    start = (none, none, jnp.zeros((LANES, width), jnp.float32), jnp.zeros((8, width), jnp.float32))
    kept, _, picked, totals = jax.lax.fori_loop(0, end, compact, start)
    wanted = column - totals[:1] + 1  # its rank within its row
    lane = jax.lax.broadcasted_iota(jnp.int32, (LANES, width), 0).astype(jnp.float32)
    lane = jnp.sum(jnp.where(picked == wanted, lane, 0.0), axis=0, keepdims=True)
    index = (totals[1:2] * LANES + lane).astype(jnp.int32)
    out[0] = jnp.where(column < kept, index, -1)


def _indices(scores: Array, visible: Array, k: int, block: int | None, interpret: bool) -> Array:
    """Ascending indices int32 [B, t, k] of the k best; of the first entries of blocks, if there is a block size."""
    b, t, n = scores.shape
    rows = -(-n // LANES)
    chunks = -(-rows // _CHUNK)
    chunk = -(-rows // (16 * chunks)) * 16
    padded = chunks * chunk * LANES
    if padded != n:
        scores = jnp.pad(scores, ((0, 0), (0, 0), (0, padded - n)), constant_values=-jnp.inf)
    width = -(-k // LANES) * LANES
    within_row = np.concatenate([np.triu(np.ones((LANES, LANES))), np.ones((LANES, LANES))], axis=1)
    before_row = np.tril(np.ones((chunk, chunk)), -1)
    out = pl.pallas_call(
        functools.partial(_kernel, k, width, block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b * t,),
            in_specs=[
                pl.BlockSpec((1, chunks * chunk, LANES), lambda i, _: (i, 0, 0)),
                pl.BlockSpec(within_row.shape, lambda i, _: (0, 0)),
                pl.BlockSpec(before_row.shape, lambda i, _: (0, 0)),
            ],
            out_specs=pl.BlockSpec((1, 1, width), lambda i, _: (i, 0, 0)),
            scratch_shapes=[pltpu.VMEM((chunks * chunk, LANES), jnp.int32)],
        ),
        out_shape=jax.ShapeDtypeStruct((b * t, 1, width), jnp.int32),
        interpret=interpret,
        name="indexer_select",
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=_VMEM_BYTES),
    )(
        visible.reshape(-1).astype(jnp.int32),
        scores.reshape(b * t, chunks * chunk, LANES),
        jnp.asarray(within_row, jnp.bfloat16),
        jnp.asarray(before_row, jnp.bfloat16),
    )
    return out[:, 0, :k].reshape(b, t, k)


def select(scores: Array, k: int, *, interpret: bool) -> Array:
    """See `pallas_kernels.indexer.select`."""
    return _indices(scores, jnp.zeros(scores.shape[:2], jnp.int32), k, None, interpret)


def candidate_blocks(scores: Array, visible: Array, *, block: int, topk: int, interpret: bool) -> Array:
    """See `pallas_kernels.indexer.candidate_blocks`."""
    visible = jnp.minimum(visible, scores.shape[-1])
    first = _indices(scores, visible, min(topk, -(-scores.shape[-1] // block)), block, interpret)
    return jnp.where(first < 0, -1, first // block)
