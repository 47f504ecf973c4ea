"""What the caches keep, on CUDA GPUs (Triton): a program norms, rotates, quantises and packs one row in registers and
stores it where it belongs; pools and rings are updated in place.

A channel's partner in the rotation is loaded a second time (from L1), so nothing is exchanged between threads. Products
may be contracted with the following sum, and the mean of squares is summed in a tree: a normed value at a tie of bf16
rounding can fall to the other side of the reference's.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from dsv41_jax import quant
from pallas_kernels import gpu_codes
from pallas_kernels.implementation import KernelError

_PARAMS = plt.CompilerParams(num_warps=4, num_stages=1)
_LANES = 128


@dataclasses.dataclass(frozen=True)
class _Row:
    """How a row of `dim` channels is made: `rope` of them turn."""

    dim: int
    rope: int
    eps: float
    interpret: bool

    def values(self, raw, norm, cos, sin) -> tuple[Array, Array]:
        """Normed and rotated channels float32 [d] (values of bf16) of this program's row, and the normed ones."""
        i, b = pl.program_id(0), pl.program_id(1)
        channel = jnp.arange(self.dim)
        x = plt.load(raw.at[b, i, channel]).astype(jnp.float32)
        factor = jax.lax.rsqrt(jnp.sum(x * x) / self.dim + self.eps)

        def normed(channel: Array, x: Array) -> Array:
            weight = plt.load(norm.at[channel]).astype(jnp.float32)
            return gpu_codes.rounded(x * factor * weight, self.interpret)

        own = normed(channel, x)
        partner = normed(channel ^ 1, plt.load(raw.at[b, i, channel ^ 1]).astype(jnp.float32))
        turns = channel >= self.dim - self.rope
        pair = jnp.where(turns, (channel - (self.dim - self.rope)) >> 1, 0)
        cosine = plt.load(cos.at[b, i, pair], mask=turns, other=1.0)
        sine = plt.load(sin.at[b, i, pair], mask=turns, other=0.0)
        sine = jnp.where((channel & 1) == 0, -sine, sine)
        return gpu_codes.rounded(own * cosine + partner * sine, self.interpret), own

    def blocks(self, x: Array, size: int, floor: float) -> tuple[Array, Array]:
        """x [d] as [blocks, size], and the largest magnitude of each block, at least `floor`."""
        x = x.reshape(self.dim // size, size)
        return x, jnp.maximum(jnp.max(jnp.abs(x), axis=1), floor)

    def scaled_by_power(self, x: Array, floor: float, most: float) -> tuple[Array, Array]:
        """x [d] in units of each block's power of two [d/32, 32], and the UE8M0 bytes int32 [d/32]."""
        x, peak = self.blocks(x, quant.BLOCK, floor)
        byte = gpu_codes.power_at_least(peak * jnp.float32(1.0 / most))
        return x * gpu_codes.e8m0(254 - byte)[:, None], byte


def _joined(codes: Array, fields: int) -> Array:
    """int32 codes [n] -> words [n / fields]: field f of word w is code f * n / fields + w."""
    planes = codes.reshape(fields, codes.size // fields)
    return jnp.sum(planes << ((32 // fields) * jnp.arange(fields))[:, None], axis=0)


def _scale_words(byte: Array) -> tuple[Array, int]:
    """Words of bytes int32 [n], n a power of two, and how many: byte b of word w is scale b * words + w."""
    n = byte.shape[0]
    if n >= 4:
        return _joined(byte, 4), n // 4
    return jnp.sum(byte << (8 * jnp.arange(n)), axis=0, keepdims=True), 1


def _main_kernel(row: _Row, page_rows: int, raw, norm, cos, sin, which, page, place, keep, _, words, latent):
    i, b = pl.program_id(0), pl.program_id(1)
    x, normed = row.values(raw, norm, cos, sin)
    plt.store(latent.at[b, i, jnp.arange(row.dim)], normed.astype(latent.dtype))
    x, peak = row.blocks(x, quant.MAIN_KV_BLOCK, quant.E2M1_MAX * 2.0**-9)
    byte = gpu_codes.e4m3_code(gpu_codes.snapped(peak / quant.E2M1_MAX))
    scale = gpu_codes.e4m3_scale(byte) * gpu_codes.E4M3_UNIT
    codes = gpu_codes.e2m1_code(gpu_codes.snapped(x / scale[:, None]))
    scales, scale_words = _scale_words(byte)
    first = page[b, i] * page_rows
    start = place[b, i] * (row.dim // 8 + scale_words)
    kept = keep[b, i] > 0

    def store(offset: int, value: Array) -> None:
        word = start + offset + jnp.arange(value.size)
        index = (which[0], first + jax.lax.div(word, _LANES), jax.lax.rem(word, _LANES))
        plt.store(words.at[index], value, mask=jnp.broadcast_to(kept, value.shape))

    store(0, _joined(codes.reshape(row.dim), 8))
    store(row.dim // 8, scales)


def _index_kernel(row: _Row, entries: int, raw, norm, cos, sin, which, page, place, keep, *pools):
    _, _, codes, scales = pools
    i, b = pl.program_id(0), pl.program_id(1)
    x, _ = row.values(raw, norm, cos, sin)
    x, byte = row.scaled_by_power(x, quant.E2M1_MAX * 2.0**-126, quant.E2M1_MAX)
    value = _joined(gpu_codes.e2m1_code(x).reshape(row.dim), 8)
    at, mine, kept = page[b, i], place[b, i], keep[b, i] > 0
    word = jnp.arange(value.size) * entries + mine
    index = (which[0], at, jax.lax.div(word, _LANES), jax.lax.rem(word, _LANES))
    plt.store(codes.at[index], value, mask=jnp.broadcast_to(kept, value.shape))
    together = _LANES // entries  # pages whose scales share a row
    lane = jax.lax.rem(at, together) * entries + mine + jnp.arange(1)
    scale, _ = _scale_words(byte)
    plt.store(scales.at[which[0], jax.lax.div(at, together), lane], scale, mask=jnp.broadcast_to(kept, (1,)))


def _window_kernel(row: _Row, size: int, raw, norm, cos, sin, which, start, valid, *outputs):
    _, _, codes, scales, own_codes, own_scales = outputs
    i, b = pl.program_id(0), pl.program_id(1)
    x, _ = row.values(raw, norm, cos, sin)
    x, byte = row.scaled_by_power(x, 1e-4, quant.E4M3_MAX)
    pairs = gpu_codes.e4m3_code(x).reshape(row.dim // 2, 2)
    pairs = jnp.sum(pairs << (8 * jnp.arange(2))[None, :], axis=1).astype(jnp.uint16)
    byte = byte.astype(jnp.uint8)
    pair, group = jnp.arange(row.dim // 2), jnp.arange(byte.size)
    plt.store(own_codes.at[b, i, pair], pairs)
    plt.store(own_scales.at[b, group, i], byte)
    count = valid[b]
    kept = (i < count) & (i >= count - size)
    slot = jax.lax.rem(start[b] + i, size)
    plt.store(codes.at[which[0], b, slot, pair], pairs, mask=jnp.broadcast_to(kept, pair.shape))
    plt.store(scales.at[which[0], b, group, slot], byte, mask=jnp.broadcast_to(kept, group.shape))


def _row(operation: str, raw: Array, cos: Array, eps: float, interpret: bool) -> _Row:
    dim = raw.shape[-1]
    if dim & (dim - 1):
        raise KernelError(f"kv_write.{operation} (gpu): {dim} channels; 32, 64, 128, 256 and 512 are supported")
    return _Row(dim, 2 * cos.shape[-1], eps, interpret)


def _call(kernel, raw: Array, inputs: list[Array], pools: list[Array], extra: list, name: str, interpret: bool):
    """Run a program for each row; `pools` are updated in place and come first among the outputs."""
    b, n, _ = raw.shape
    return pl.pallas_call(
        kernel,
        grid=(n, b),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools] + extra,
        input_output_aliases={len(inputs) + i: i for i in range(len(pools))},
        compiler_params=_PARAMS,
        interpret=interpret,
        name=name,
    )(*inputs, *pools)


def _scalar(x: Array | int) -> Array:
    return jnp.asarray(x, jnp.int32).reshape(1)


def _pairs(codes: Array) -> Array:
    """uint8 [..., d] as uint16 [..., d/2]."""
    return jax.lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], -1, 2), jnp.uint16)


def _bytes(pairs: Array) -> Array:
    return jax.lax.bitcast_convert_type(pairs, jnp.uint8).reshape(*pairs.shape[:-1], -1)


def main_entries(
    raw: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    words: Array,
    slot: Array | int,
    page: Array,
    place: Array,
    keep: Array,
    *,
    page_rows: int,
    eps: float,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `kv_write.main_entries`."""
    kernel = functools.partial(_main_kernel, _row("main_entries", raw, cos, eps, interpret), page_rows)
    inputs = [raw, norm, cos, sin, _scalar(slot), page, place, keep.astype(jnp.int32)]
    latent = jax.ShapeDtypeStruct(raw.shape, raw.dtype)
    return tuple(_call(kernel, raw, inputs, [words], [latent], "main_entries", interpret))


def index_entries(
    raw: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    codes: Array,
    scales: Array,
    slot: Array | int,
    page: Array,
    place: Array,
    keep: Array,
    *,
    page_entries: int,
    eps: float,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `kv_write.index_entries`."""
    kernel = functools.partial(_index_kernel, _row("index_entries", raw, cos, eps, interpret), page_entries)
    inputs = [raw, norm, cos, sin, _scalar(slot), page, place, keep.astype(jnp.int32)]
    return tuple(_call(kernel, raw, inputs, [codes, scales], [], "index_entries", interpret))


def window_rows(
    raw: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    codes: Array,
    scales: Array,
    layer: Array | int,
    start: Array,
    n_valid: Array,
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[Array, Array, Array, Array]:
    """See `kv_write.window_rows`. Codes are written in pairs: byte arrays of 2 to 4 GiB cannot be addressed."""
    b, t, d = raw.shape
    gpu_codes.require_addressable("kv_write.window_rows", "scales", scales)
    kernel = functools.partial(_window_kernel, _row("window_rows", raw, cos, eps, interpret), codes.shape[2])
    inputs = [raw, norm, cos, sin, _scalar(layer), start, n_valid]
    own = [
        jax.ShapeDtypeStruct((b, t, d // 2), jnp.uint16),
        jax.ShapeDtypeStruct((b, d // quant.BLOCK, t), jnp.uint8),
    ]
    pairs, scales, own_pairs, own_scales = _call(
        kernel, raw, inputs, [_pairs(codes), scales], own, "window_rows", interpret
    )
    return _bytes(pairs), scales, _bytes(own_pairs), own_scales
