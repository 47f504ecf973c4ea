"""Exact selection of the k best scores on a TPU, without a sort.

A query's scores lie in VMEM as integers of the same order. The k-th best is found bit by bit, by counting. What is
above it is marked, and the first ones of those equal to it; products with triangles, and with a matrix of zeros and
ones, turn the marks of a chunk of scores into a piece of the list of indices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.implementation import traced_once
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


def _kernel(k, block, visible, x, within_row, before_row, out, ordered, marks):
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
            at_least = (ordered[rows(c)] >= above).astype(jnp.int32)
            return sums + jnp.sum(at_least.reshape(-1, 16, LANES), axis=0)

        return _total(jax.lax.fori_loop(0, end, add, jnp.zeros((16, LANES), jnp.int32)).astype(jnp.float32))

    def step(i, bound):
        higher = bound + jnp.left_shift(1, 30 - i)
        return jnp.where(count(higher) >= k, higher, bound)

    zero = jnp.zeros((1, 1), jnp.int32)
    bound = jnp.where(count(zero) >= k, zero, _LOWEST)
    bound = jax.lax.fori_loop(0, jnp.where(wide, 31, 15), step, bound)
    enough = bound > _NEVER
    bound = jnp.maximum(bound, _NEVER)
    ties = jnp.max(jnp.where(enough, k - count(bound + 1), 0.0)).astype(jnp.int32)  # of those at it, how many to keep

    lane = jax.lax.broadcasted_iota(jnp.int32, (chunk, LANES), 1)
    row = jax.lax.broadcasted_iota(jnp.int32, (chunk, LANES), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)

    def ranks(marked: Array) -> tuple[Array, Array, Array]:
        """Of marks float32 [chunk, 128]: a mark's rank within its row from 1, its row's count, that of rows before."""
        both = jnp.dot(marked.astype(jnp.bfloat16), within_row[...], preferred_element_type=jnp.float32)
        counts = both[:, LANES:]
        before = jnp.dot(before_row[...], counts.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        return both[:, :LANES], counts, before

    def after_first(x: Array) -> Array:
        """Every row moved to the next one, the first becoming 0."""
        return jnp.where(row == 0, 0.0, pltpu.roll(x, 1, 0))

    def contract(a: Array, b: Array) -> Array:
        return jax.lax.dot_general(
            a.astype(jnp.bfloat16), b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )

    def mark(c, taken):
        """Mark what is kept of a chunk; `taken` of the tied scores are in chunks before. Returns taken after it."""
        u = ordered[rows(c)]
        tied = jnp.where(u == bound, 1.0, 0.0)
        here = jnp.sum(tied).astype(jnp.int32)
        share = jnp.where(taken + here <= ties, 1.0, 0.0)
        marks[...] = jnp.where(u > bound, 1.0, tied * share)

        @pl.when((taken < ties) & (taken + here > ties))
        def _():
            rank, _, before = ranks(tied)
            first = jnp.where(rank + before <= (ties - taken).astype(jnp.float32), tied, 0.0)
            marks[...] = jnp.where(u > bound, 1.0, first)

        return taken + here

    def compact(c, carry):
        """List what is marked of a chunk. Column j of the result belongs to the j-th mark of all."""
        kept, taken = carry
        taken = mark(c, taken)
        marked = marks[...]
        rank, counts, before = ranks(marked)
        here = jnp.max((before + counts)[chunk - 8 :]).astype(jnp.int32)
        # A column's row is the last one with no more marks before it than the column's place. Summed over the rows up
        # to there, the steps of `rank` give that row's ranks, and the steps of `before` its marks before.
        rank = rank * marked
        steps = rank - after_first(rank)
        totals = jnp.where(lane == 0, after_first(counts), 1.0)[:, :8]

        def columns(tile, _):
            place = (column + tile * LANES - kept).astype(jnp.float32)
            up_to = jnp.where(before <= place, 1.0, 0.0).astype(jnp.bfloat16)
            total = contract(totals, up_to)
            number = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0).astype(jnp.float32)
            found = contract(steps, up_to) == place - total[:1] + 1
            at = jnp.sum(jnp.where(found, number, 0.0), axis=0, keepdims=True)
            index = c * chunk * LANES + ((total[1:2] - 1) * LANES + at).astype(jnp.int32)
            own = (place >= 0) & (place < here.astype(jnp.float32))
            out[0, pl.ds(tile, 1)] = jnp.where(own, index, out[0, pl.ds(tile, 1)])
            return 0

        end = jax.lax.div(kept + here + LANES - 1, LANES)
        jax.lax.fori_loop(jax.lax.div(kept, LANES), end, columns, 0)
        return kept + here, taken

    out[0] = jnp.full(out.shape[1:], -1, jnp.int32)
    jax.lax.fori_loop(0, end, compact, (jnp.int32(0), jnp.int32(0)))


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
        functools.partial(_kernel, k, block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b * t,),
            in_specs=[
                pl.BlockSpec((1, chunks * chunk, LANES), lambda i, _: (i, 0, 0)),
                pl.BlockSpec(within_row.shape, lambda i, _: (0, 0)),
                pl.BlockSpec(before_row.shape, lambda i, _: (0, 0)),
            ],
            out_specs=pl.BlockSpec((1, width // LANES, LANES), lambda i, _: (i, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((chunks * chunk, LANES), jnp.int32),
                pltpu.VMEM((chunk, LANES), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((b * t, width // LANES, LANES), jnp.int32),
        interpret=interpret,
        name="indexer_select",
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=_VMEM_BYTES),
    )(
        visible.reshape(-1).astype(jnp.int32),
        scores.reshape(b * t, chunks * chunk, LANES),
        jnp.asarray(within_row, jnp.bfloat16),
        jnp.asarray(before_row, jnp.bfloat16),
    )
    return out.reshape(b, t, width)[..., :k]


@traced_once("k", "interpret")
def select(scores: Array, k: int, *, interpret: bool) -> Array:
    """See `pallas_kernels.indexer.select`."""
    return _indices(scores, jnp.zeros(scores.shape[:2], jnp.int32), k, None, interpret)


@traced_once("block", "topk", "interpret")
def candidate_blocks(scores: Array, visible: Array, *, block: int, topk: int, interpret: bool) -> Array:
    """See `pallas_kernels.indexer.candidate_blocks`."""
    visible = jnp.minimum(visible, scores.shape[-1])
    first = _indices(scores, visible, min(topk, -(-scores.shape[-1] // block)), block, interpret)
    return jnp.where(first < 0, -1, first // block)
