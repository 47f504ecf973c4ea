"""Sparse attention on CUDA GPUs (Triton): one program for a query and a block of its heads.

The program walks the chunks of the window that hold a visible key, then the query's entries, under a running maximum.
Probabilities are rounded to bf16 relative to the running maximum, as in the released kernel; `reference` rounds
relative to the final one. Entries are gathered by pointers straight from the pool and become bf16 in registers.
Decoding, verify blocks and prefill are this one kernel: it needs no temporary array that grows with the block.

Triton's arrays have power-of-two sizes, so the 8 channel planes of an entry (nibble k of its words is plane k) are
padded by masks when d/8 is not one. Offsets: Pallas computes them in 64 bits for arrays over 4 GiB and in signed 32
bits below; the ring is read as uint16, since an array of bytes between 2 and 4 GiB would overflow, and the pool by
granules (the largest power of two of words at whose multiples entries begin), so that one int32 names an entry of any
pool.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import gpu_codes
from pallas_kernels.implementation import KernelError, traced_once
from pallas_kernels.sparse_attention.keys import LANES, Entries, WindowKeys, entry_words, scale_words

_NONE = -1e30  # the running maximum before the first key


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Heads of a program, keys of a step, warps, software pipeline stages."""

    heads: int
    keys: int
    warps: int
    stages: int


# By major CUDA compute capability; chosen by what the compiler reports, not yet by measurements. 64 heads unpack an
# entry once for all of them, and two stages fetch the next entries meanwhile. The tensor memory of Blackwell (10) has
# no room for 64 x 512 sums, and the matmuls of Ampere (8) need no 64 rows.
BLOCKS = {8: Blocks(32, 32, 8, 2), 9: Blocks(64, 32, 8, 2), 10: Blocks(32, 32, 8, 2)}


def default_blocks() -> Blocks:
    """Those of the first device; of Blackwell, which compile for every GPU, where there is none."""
    capability = getattr(jax.devices()[0], "compute_capability", "10.0")
    return BLOCKS.get(int(str(capability).split(".")[0]), BLOCKS[10])


@dataclasses.dataclass(frozen=True)
class _Planes:
    """How the 8 channel planes of a row are cut: into `groups` runs of `run` channels, each run under one scale.

    `real` of the runs exist; the others are padding. Pool entries begin at multiples of `granule` words.
    """

    dim: int
    granule: int

    @property
    def size(self) -> int:
        return self.dim // 8

    @property
    def run(self) -> int:
        return math.gcd(self.size, 16)

    @property
    def real(self) -> int:
        return self.size // self.run

    @property
    def groups(self) -> int:
        return max(gpu_codes.power_of_two(self.real), 16 // self.run)  # a matmul needs 16 channels

    @property
    def padded(self) -> int:
        return self.groups * self.run


def _kernel(planes: _Planes, blocks: Blocks, shape: tuple, width: int, has_entries: bool, *refs):
    t, heads, ring = shape
    if has_entries:
        which, q_ref, codes, scales, position, query, bounds, sink, words, granule, out = refs
    else:
        which, q_ref, codes, scales, position, query, bounds, sink, out = refs
    n = pl.program_id(1)
    b = jax.lax.div(n, t)
    head = pl.program_id(0) * blocks.heads + jnp.arange(blocks.heads)
    at_head = head < heads
    channel = jnp.arange(planes.padded)
    mask = (at_head[:, None] & (channel < planes.size)[None, :]) if planes.padded != planes.size else at_head[:, None]
    group, inside = jnp.arange(planes.groups), jnp.arange(planes.run)

    def spot(k: int) -> tuple:  # of plane k in an array [n, heads, d]
        return n, head[:, None], (k * planes.size + channel)[None, :]

    def load_q(k: int) -> Array:
        return plt.load(q_ref.at[spot(k)], mask=mask, other=0.0)

    q = [load_q(k) for k in range(8)]
    layer, slot = which[0], which[1]
    query_position = query[n]

    def flat(plane: Array) -> Array:  # [keys, groups, run] float32 -> bf16 [keys, padded]
        if planes.groups != planes.real:
            plane = jnp.where((group < planes.real)[None, :, None], plane, 0.0)
        return plane.reshape(blocks.keys, planes.padded).astype(jnp.bfloat16)

    def update(carry: tuple, keys: list[Array], visible: Array) -> tuple:
        peak, total, sums = carry
        logits = jnp.zeros((blocks.heads, blocks.keys), jnp.float32)
        for k in range(8):
            logits += plt.dot(q[k], keys[k], trans_b=True)
        logits = jnp.where(visible[None, :], logits * planes.dim**-0.5, _NONE)
        new = jnp.maximum(peak, jnp.max(logits, axis=1))
        shrink = jnp.exp(peak - new)
        p = jnp.where(visible[None, :], jnp.exp(logits - new[:, None]), 0.0)
        rounded = p.astype(jnp.bfloat16)
        sums = tuple(s * shrink[:, None] + plt.dot(rounded, keys[k]) for k, s in enumerate(sums))
        return new, total * shrink + jnp.sum(p, axis=1), sums

    def window_step(step: Array, carry: tuple) -> tuple:
        row = step * blocks.keys + jnp.arange(blocks.keys)
        there = row < ring
        at = plt.load(position.at[b, row], mask=there, other=-1)
        visible = (at >= 0) & (at <= query_position) & (at > query_position - width)

        def plane(k: int) -> Array:
            first = k * planes.size + group * planes.run  # channel of each run
            half = planes.run // 2
            pair = k * (planes.size // 2) + (group * half)[:, None] + jnp.arange(half)[None, :]
            real = there[:, None] if planes.groups == planes.real else there[:, None] & (group < planes.real)[None, :]
            index = (layer, b, row[:, None, None], pair[None])
            code = plt.load(codes.at[index], mask=real[:, :, None], other=0)
            index = (layer, b, jax.lax.div(first, 32)[None, :], row[:, None])
            scale = gpu_codes.e8m0(plt.load(scales.at[index], mask=real, other=127).astype(jnp.int32))
            return flat(gpu_codes.e4m3_pairs(code) * (scale * gpu_codes.E4M3_UNIT)[:, :, None])

        return update(carry, [plane(k) for k in range(8)], visible)

    def entry_step(step: Array, carry: tuple) -> tuple:
        column = step * blocks.keys + jnp.arange(blocks.keys)
        first = plt.load(granule.at[n, column], mask=column < granule.shape[1], other=-1)
        visible = first >= 0
        first = jnp.maximum(first, 0)

        def load(word: Array, real: Array | None) -> Array:  # words [...] of each entry
            index = [first.reshape(-1, *[1] * word.ndim) + jax.lax.div(word, planes.granule)[None]]
            index.append(jax.lax.rem(word, planes.granule)[None])
            if real is None:
                return plt.load(words.at[slot, index[0], index[1]])
            return plt.load(words.at[slot, index[0], index[1]], mask=real[None], other=0)

        padding = None if planes.groups == planes.real else group < planes.real
        real = None if padding is None else padding[:, None] & (inside >= 0)[None, :]
        code = load(group[:, None] * planes.run + inside[None, :], real)

        def plane(k: int) -> Array:
            number = jax.lax.div(k * planes.size + group * planes.run, 16)  # of the scale of each run
            word = load(planes.size + jax.lax.rem(number, scale_words(planes.dim)), padding)
            byte = jax.lax.shift_right_logical(word, (8 * jax.lax.div(number, scale_words(planes.dim)))[None, :]) & 0x7F
            scale = gpu_codes.e4m3_scale(byte) * (gpu_codes.E4M3_UNIT * gpu_codes.E2M1_UNIT)
            return flat(gpu_codes.e2m1(code, k) * scale[:, :, None])

        return update(carry, [plane(k) for k in range(8)], visible)

    carry = (
        jnp.full((blocks.heads,), _NONE, jnp.float32),
        jnp.zeros((blocks.heads,), jnp.float32),
        tuple(jnp.zeros((blocks.heads, planes.padded), jnp.float32) for _ in range(8)),
    )
    carry = jax.lax.fori_loop(bounds[n, 0], bounds[n, 1], window_step, carry)
    if has_entries:
        carry = jax.lax.fori_loop(0, bounds[n, 2], entry_step, carry)
    peak, total, sums = carry
    total += jnp.exp(plt.load(sink.at[head], mask=at_head, other=0.0) - peak)
    share = jnp.where(peak > _NONE, 1.0 / total, 0.0)  # no key at all: exactly 0
    for k in range(8):
        plt.store(out.at[spot(k)], (sums[k] * share[:, None]).astype(out.dtype), mask=mask)


def _steps(window_position: Array, query_position: Array, entry_row: Array | None, width: int, keys: int) -> Array:
    """int32 [B, t, 3]: first and last + 1 step of the window's visible keys, steps of the entries."""
    at, query = window_position[:, None], query_position[:, :, None]
    visible = (at >= 0) & (at <= query) & (at > query - width)
    row = jnp.arange(at.shape[-1])
    first = jnp.min(jnp.where(visible, row, at.shape[-1]), axis=-1) // keys
    last = -(-jnp.max(jnp.where(visible, row + 1, 0), axis=-1) // keys)
    entries = jnp.zeros_like(last)
    if entry_row is not None:
        column = jnp.arange(1, entry_row.shape[-1] + 1)
        entries = -(-jnp.max(jnp.where(entry_row >= 0, column, 0), axis=-1) // keys)
    return jnp.stack([first, last, entries], axis=-1).astype(jnp.int32)


@traced_once("width", "temporary_bytes", "interpret", "blocks")
def attend(
    q: Array,
    query_position: Array,
    window: WindowKeys,
    entries: Entries | None,
    sink: Array,
    *,
    width: int,
    temporary_bytes: int = 0,
    interpret: bool = False,
    blocks: Blocks | None = None,
) -> Array:
    """See `pallas_kernels.sparse_attention.attend`.

    Args:
        temporary_bytes: not used; there is no temporary array to bound.
        blocks: None for those of the device.

    Raises:
        KernelError: a pool whose granules cannot be counted in int32.
    """
    b, t, heads, dim = q.shape
    gpu_codes.require_addressable("sparse_attention", "window.scales", window.scales)
    if entries is not None and not entries.row.shape[-1]:
        entries = None
    granule = LANES if entries is not None and entries.padded else math.gcd(entry_words(dim), LANES)
    planes, blocks = _Planes(dim, granule), blocks or default_blocks()
    rows = min(blocks.heads, max(16, gpu_codes.power_of_two(heads)))
    blocks = dataclasses.replace(blocks, heads=rows)
    slot, row = (0, None) if entries is None else (entries.slot, entries.row)
    steps = _steps(window.position, query_position, row, width, blocks.keys)
    codes = window.codes.reshape(*window.codes.shape[:-1], dim // 2, 2)
    args = [
        jnp.stack([jnp.asarray(window.layer, jnp.int32), jnp.asarray(slot, jnp.int32)]),
        q.reshape(b * t, heads, dim),
        jax.lax.bitcast_convert_type(codes, jnp.uint16),
        window.scales,
        window.position,
        query_position.reshape(b * t),
        steps.reshape(b * t, 3),
        sink,
    ]
    if entries is not None:
        sources, pool_rows, _ = entries.words.shape
        granules = pool_rows * (LANES // granule)
        if granules >= 2**31:
            raise KernelError(
                f"sparse_attention (gpu): entries.words has {pool_rows} rows; at head dim {dim} it may have "
                f"{2**31 // (LANES // granule) - 1}"
            )
        first = entries.row * (LANES // granule) + entries.lane // granule
        args.append(entries.words.reshape(sources, granules, granule))
        args.append(jnp.where(entries.row >= 0, first, -1).reshape(b * t, -1))
    shape = (t, heads, window.codes.shape[2])
    out = pl.pallas_call(
        functools.partial(_kernel, planes, blocks, shape, width, entries is not None),
        grid=(-(-heads // rows), b * t),  # the head blocks of a query run side by side and share its entries in L2
        out_shape=jax.ShapeDtypeStruct((b * t, heads, dim), q.dtype),
        compiler_params=plt.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name="sparse_attention",
    )(*args)
    return out.reshape(q.shape)
