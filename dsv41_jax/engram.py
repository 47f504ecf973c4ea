"""Engram: n-gram memory. Rows of a huge table, addressed by the last few tokens, are gated into the residual streams.

    rows (24 x 256)  -> wkv -> one key per stream, one value for all
    gate_c           = sigmoid(signed root of <stream_c, key_c>), both normalised
    stream_c        += gate_c * value

Which rows: `engram_hash`. Where they come from: `gather_rows` here (table on the device), or `engram_tables` (host
memory, file).
Source: report, Engram; spec section 10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from dsv41_jax.linear import Linear
from dsv41_jax.norms import rms_scale
from dsv41_jax.numerics import Numerics, row_sum
from dsv41_jax.parallel import AXES, CONTEXT, Parallel

if TYPE_CHECKING:
    from dsv41_jax.config import ModelConfig

# The root is taken of at least this, so that its slope stays finite where stream and key are orthogonal.
_MIN_DOT = 1e-6

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def gather_rows(table: dict[str, Array], ids: Array, numerics: Numerics) -> Array:
    """Rows of a table on the device, dequantised.

    Args:
        table: {"weight" [rows, width] in float8_e4m3fn, "scale" [rows, width/32] in float8_e8m0fnu}, or {"weight"} in a
            float type.
        ids: int32 [...], each inside the table (`EngramHasher` guarantees it; nothing is checked here).

    Returns:
        [..., width] in the activation dtype. Gathering comes first, so nothing of the table's size is made; the index
        counts rows, which int32 holds, not numbers, which it does not.
    """
    if numerics.parallel.devices == 1:
        rows = {name: leaf.at[ids].get(mode="promise_in_bounds") for name, leaf in table.items()}
    else:
        rows = {name: distant_rows(numerics.parallel, leaf, ids) for name, leaf in table.items()}
    if numerics.quantizes("tables") and "scale" not in rows:
        return quant.fake_quantize_weight("fp8_rows", rows["weight"]).astype(numerics.dtype)
    return quant.dequantize_weight(rows, numerics.dtype)


def distant_rows(parallel: Parallel, share: Array, ids: Array) -> Array:
    """Rows of a table that is split over all devices.

    Args:
        share: this device's rows [rows / devices, width]. ids: int32 [b, ...] of this device's tokens, counted in the
            whole table.

    Returns:
        [b, ..., width]. Every device reads what it holds of the rows that any device wants; the parts are summed, of
        which only one is not zero: numbers of 8 bits as integers, others as they are, so that there is a gradient.
    """
    axes, held = parallel.token_axes, share.shape[0]
    wanted = jax.lax.all_gather(ids, axes, axis=0, tiled=True) - jax.lax.axis_index(AXES) * held
    here = (wanted >= 0) & (wanted < held)
    rows = share.at[jnp.where(here, wanted, 0)].get(mode="promise_in_bounds")
    if share.dtype.itemsize > 1:
        return sum_parts(parallel, jnp.where(here[..., None], rows, 0))
    part = jnp.where(here[..., None], as_words(rows), 0)
    return from_words(sum_parts(parallel, part), share.dtype, share.shape[1])


def sum_parts(parallel: Parallel, part: Array) -> Array:
    """The sum over all devices of their parts [tokens of all, ...] -> [b, ...], each device its own tokens."""
    if parallel.context > 1 and parallel.parts == 1:
        part = jax.lax.psum(part, CONTEXT)
    return jax.lax.psum_scatter(part, parallel.token_axes, scatter_dimension=0, tiled=True)


def as_words(rows: Array) -> Array:
    """The bits of rows [..., width] as uint32 [..., width * itemsize / 4]; widths that are no whole words are widened
    to a word for each number.
    """
    size = rows.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(rows, _UNSIGNED[size])
    per_word = 4 // size
    if rows.shape[-1] % per_word or per_word == 1:
        return bits.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(bits.reshape(*bits.shape[:-1], -1, per_word), jnp.uint32)


def from_words(words: Array, dtype: jnp.dtype, width: int) -> Array:
    """The rows [..., width] that `as_words` was given."""
    bits = _UNSIGNED[jnp.dtype(dtype).itemsize]
    if words.shape[-1] != width:
        words = jax.lax.bitcast_convert_type(words, bits).reshape(*words.shape[:-1], width)
    return jax.lax.bitcast_convert_type(words.astype(bits), dtype)


def engram_gate(x: Array, key: Array, q_weight: Array, k_weight: Array, eps: float) -> Array:
    """How much of the value each stream takes: float32 [B, T, C] in (0, 1).

    Args:
        x: residual streams [B, T, C, D].
        key: one key per stream [B, T, C, D].
        q_weight, k_weight: norm gains of the two [C, D].
        eps: of both norms.
    """
    x, key = x.astype(jnp.float32), key.astype(jnp.float32)
    gain = q_weight.astype(jnp.float32) * k_weight.astype(jnp.float32)
    dot = row_sum(x * gain * key) * (rms_scale(x, eps) * rms_scale(key, eps))[..., 0]
    dot = dot * jnp.float32(x.shape[-1] ** -0.5)
    root = jnp.sqrt(jnp.maximum(jnp.abs(dot), jnp.float32(_MIN_DOT)))
    return jax.nn.sigmoid(jnp.where(jnp.signbit(dot), -root, root))


class Engram(nn.Module):
    """Adds what the n-grams remember to the residual streams, before the block of its layer.

    Parameters: wkv {weight, scale} [(C+1) D, columns * width], q_weight and k_weight [C, D]. The table is not among
    them: its rows are an input.
    """

    config: ModelConfig
    numerics: Numerics

    @nn.compact
    def __call__(self, x: Array, rows: Array, image_mask: Array | None = None) -> Array:
        """New residual streams.

        Args:
            x: residual streams [B, T, C, D], activation dtype.
            rows: [B, T, columns, width], dequantised.
            image_mask: bool [B, T], True inside image spans, which take nothing; None is text only.
        """
        streams, width = x.shape[-2:]
        ones = nn.initializers.ones
        q_weight = self.param("q_weight", ones, (streams, width))
        k_weight = self.param("k_weight", ones, (streams, width))
        memory = rows.astype(self.numerics.dtype).reshape(*rows.shape[:-2], -1)
        columns, parallel = (streams + 1) * width, self.numerics.parallel
        project = Linear(parallel.share(columns), self.numerics, name="wkv")
        kv = parallel.by_columns(project, memory, columns).reshape(*x.shape[:-2], streams + 1, width)
        key, value = kv[..., :streams, :], kv[..., streams:, :]  # [B, T, C, D], [B, T, 1, D]
        gate = engram_gate(x, key, q_weight, k_weight, self.config.rms_norm_eps)
        if image_mask is not None:
            gate = jnp.where(image_mask[..., None], 0.0, gate)
        return self.numerics.round(x.astype(jnp.float32) + gate[..., None] * value.astype(jnp.float32))
