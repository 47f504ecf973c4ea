"""Exact selection on CUDA GPUs (Triton) without a sort.

Scores are ordered as int32. The k-th best is found four bits at a time: a kernel counts, over many blocks of each row,
the scores at or above 15 thresholds, and the sums over blocks give the next digit. Then each block of a row knows how
many it keeps and where they go, and a last kernel writes their numbers. One long row occupies the whole device as many
short ones do.

Index scores have the 16 bits of bf16. A row in which all have is done after four digits: its later kernels return at
once.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import gpu_codes

_LEAST = np.int32(-(2**31))
_NEVER = np.int32(-0x7F800001)  # the order of -inf: never chosen
_TILE = 8192  # scores of a program
_DIGITS, _SHARP = 8, 4  # digits of an order; digits after which a bf16 is known
_PARAMS = plt.CompilerParams(num_warps=8, num_stages=1)


def _order(scores, row: Array, place: Array) -> tuple[Array, Array]:
    """int32 orders of a tile of scores (the least where there are none), and the bits that no bf16 has."""
    inside = place < scores.shape[1]
    value = plt.load(scores.at[row, place], mask=inside, other=-jnp.inf)
    bits = jax.lax.bitcast_convert_type(jnp.where(value == 0.0, 0.0, value), jnp.int32)  # -0 ties with +0
    order = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return jnp.where(inside, order, _LEAST), bits & 0xFFFF


def _count_kernel(tile: int, scores, shift, prefix, is_open, counts, fine):
    """Counts at or above the 15 thresholds of a digit, two in a word: of 1 .. 8 low and of 9 .. 15 high."""
    block, row = pl.program_id(0), pl.program_id(1)

    @pl.when(plt.load(is_open.at[row]) > 0)
    def _():
        order, extra = _order(scores, row, block * tile + jnp.arange(tile))
        known, at = plt.load(prefix.at[row]), shift[0]
        for j in range(8):
            both = (order >= known + (jnp.int32(j + 1) << at)).astype(jnp.int32)
            if j < 7:
                both += (order >= known + (jnp.int32(j + 9) << at)).astype(jnp.int32) << 16
            counts[row, block, j] = jnp.sum(both)
        plt.store(fine.at[row, block], jnp.max(extra))


def _tally_kernel(tile: int, scores, threshold, above, equal):
    block, row = pl.program_id(0), pl.program_id(1)
    order, _ = _order(scores, row, block * tile + jnp.arange(tile))
    least = plt.load(threshold.at[row])
    plt.store(above.at[row, block], jnp.sum((order > least).astype(jnp.int32)))
    plt.store(equal.at[row, block], jnp.sum((order == least).astype(jnp.int32)))


def _keep_kernel(tile: int, k: int, scores, threshold, ties, first, first_tie, total, out):
    block, row = pl.program_id(0), pl.program_id(1)
    place = block * tile + jnp.arange(tile)
    order, _ = _order(scores, row, place)
    least = plt.load(threshold.at[row])
    tie = order == least
    rank = jnp.cumsum(tie.astype(jnp.int32)) + plt.load(first_tie.at[row, block])
    keep = (order > least) | (tie & (rank <= plt.load(ties.at[row])))
    target = plt.load(first.at[row, block]) + jnp.cumsum(keep.astype(jnp.int32)) - 1
    # A masked store of the interpreter rewrites what is there: places that keep nothing point behind the row.
    plt.store(out.at[row, jnp.where(keep, target, k)], place, mask=keep)

    @pl.when(block == 0)
    def _():
        column = jnp.arange(gpu_codes.power_of_two(k))
        empty = (column >= plt.load(total.at[row])) & (column < k)
        plt.store(out.at[row, column], jnp.full(column.shape, -1, jnp.int32), mask=empty)


def _threshold(scores: Array, k: int, tile: int, interpret: bool) -> Array:
    """int32 [rows]: the order of the k-th best score, or that of -inf where there are fewer than k."""
    rows, n = scores.shape
    blocks = pl.cdiv(n, tile)
    count = pl.pallas_call(
        functools.partial(_count_kernel, tile),
        grid=(blocks, rows),
        out_shape=[
            jax.ShapeDtypeStruct((rows, blocks, 8), jnp.int32),
            jax.ShapeDtypeStruct((rows, blocks), jnp.int32),
        ],
        compiler_params=_PARAMS,
        interpret=interpret,
        name="select_count",
    )

    def find_digit(digit: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        prefix, extra = carry
        shift = 4 * (_DIGITS - 1 - digit)
        is_open = jnp.where(digit < _SHARP, 1, extra)
        counts, fine = count(scores, shift.reshape(1), prefix, is_open)
        counts = jnp.stack([counts & 0xFFFF, counts >> 16], axis=-2).reshape(rows, blocks, 16)[..., :15]
        value = jnp.sum(jnp.sum(counts, axis=1) >= k, axis=-1, dtype=jnp.int32)
        # In a closed row the low bits of a bf16 are 0, and the order of a negative number is inverted.
        value = jnp.where(is_open > 0, value, jnp.where(prefix < 0, 15, 0))
        return prefix + (value << shift), jnp.where(digit == 0, jnp.max(fine, axis=1), extra)

    start = jnp.full((rows,), _LEAST), jnp.zeros((rows,), jnp.int32)
    return jnp.maximum(jax.lax.fori_loop(0, _DIGITS, find_digit, start)[0], _NEVER)


def select(scores: Array, k: int, *, interpret: bool = False) -> Array:
    """See `pallas_kernels.indexer.select`."""
    b, t, n = scores.shape
    rows, tile = b * t, min(_TILE, gpu_codes.power_of_two(max(n, 128)))
    blocks = pl.cdiv(n, tile)
    scores = scores.reshape(rows, n)
    threshold = _threshold(scores, k, tile, interpret)
    options = {"grid": (blocks, rows), "compiler_params": _PARAMS, "interpret": interpret}
    count = jax.ShapeDtypeStruct((rows, blocks), jnp.int32)
    above, equal = pl.pallas_call(
        functools.partial(_tally_kernel, tile), out_shape=[count, count], name="select_tally", **options
    )(scores, threshold)
    ties = jnp.where(threshold == _NEVER, 0, k - jnp.sum(above, axis=1))
    first_tie = jnp.cumsum(equal, axis=1) - equal
    kept = above + jnp.clip(ties[:, None] - first_tie, 0, equal)
    first = jnp.cumsum(kept, axis=1) - kept
    out = pl.pallas_call(
        functools.partial(_keep_kernel, tile, k),
        out_shape=jax.ShapeDtypeStruct((rows, k), jnp.int32),
        name="select_keep",
        **options,
    )(scores, threshold, ties, first, first_tie, jnp.sum(kept, axis=1))
    return out.reshape(b, t, k)


def candidate_blocks(scores: Array, visible: Array, *, block: int, topk: int, interpret: bool = False) -> Array:
    """See `pallas_kernels.indexer.candidate_blocks`: XLA takes the best of each block, `select` the best blocks."""
    n = scores.shape[-1]
    blocks = pl.cdiv(n, block)
    seen = jnp.where(jnp.arange(n) < visible[..., None], scores, -jnp.inf)
    padded = jnp.pad(seen, ((0, 0), (0, 0), (0, blocks * block - n)), constant_values=-jnp.inf)
    best = jnp.max(padded.reshape(*scores.shape[:2], blocks, block), axis=-1)
    newest = (visible - 1) // block  # negative, no block, where nothing is visible
    best = jnp.where(jnp.arange(blocks) == newest[..., None], jnp.inf, best)
    return select(best, min(topk, blocks), interpret=interpret)
