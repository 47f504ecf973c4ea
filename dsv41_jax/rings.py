"""Rings of the last rows of a sequence, by absolute position: window KV of a layer, raw compressor rows.

Position p stands in slot p mod R. A ring of window rows is a dict of leaves: {"codes" uint8 [L, B, R, d], E4M3 bits;
"scales" uint8 [L, B, d/32, R], UE8M0} where the numerics quantise (scales with the ring's axis last, so that tiles
of 128 lanes are not padded eightfold), or {"rows" [L, B, R, d]}.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from dsv41_jax.numerics import Numerics
from dsv41_jax.parallel import Parallel

Ring = dict[str, Array]

_RING_AXIS = {"codes": 1, "rows": 1, "scales": 2}  # of leaves without the layer axis


def abstract_ring(numerics: Numerics, layers: int, batch: int, size: int, dim: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a window ring of `size` rows."""
    if not numerics.quantize_activations:
        return {"rows": jax.ShapeDtypeStruct((layers, batch, size, dim), numerics.dtype)}
    return {
        "codes": jax.ShapeDtypeStruct((layers, batch, size, dim), jnp.uint8),
        "scales": jax.ShapeDtypeStruct((layers, batch, dim // quant.BLOCK, size), jnp.uint8),
    }


def ring_positions(end: Array, size: int) -> Array:
    """Position held by each slot of a ring after `end` tokens: int32 [B, size], negative for a slot not written yet."""
    last = end[:, None] - 1
    return last - (last - jnp.arange(size)) % size


def ring_slots(start: Array, n_valid: Array, t: int, size: int) -> Array:
    """Slot int32 [B, t] of each row of a block; `size` for rows that are not written: padding, and all but the last
    `size` valid rows.
    """
    i = jnp.arange(t)
    keep = (i < n_valid[:, None]) & (i >= n_valid[:, None] - size)
    return jnp.where(keep, (start[:, None] + i) % size, size)


def write_rows(ring: Array, lead: Any, rows: Array, start: Array, n_valid: Array) -> Array:
    """Write the last min(n_valid, size) valid rows into ring[lead] ([B, size, d]).

    Args:
        rows: [B, t, d], row i belongs to position start + i; rows past n_valid are padding and write nothing.
    """
    b, t, _ = rows.shape
    slot = ring_slots(start, n_valid, t, ring.shape[-2])
    return ring.at[lead, jnp.arange(b)[:, None], slot].set(rows.astype(ring.dtype), mode="drop")


def rows_before(ring: Array, lead: Any, start: Array, count: int) -> Array:
    """The rows of positions start - count .. start - 1 from ring[lead]: [B, count, d]."""
    slot = (start[:, None] - count + jnp.arange(count)) % ring.shape[-2]
    return ring[lead, jnp.arange(start.shape[0])[:, None], slot]


def stored_form(rows: Array, numerics: Numerics) -> Ring:
    """Window rows [B, t, d] as they are stored: leaves without the layer axis, ring axis t."""
    if not numerics.quantize_activations:
        return {"rows": rows.astype(numerics.dtype)}
    codes, scales = quant.q8(rows)
    bits = {
        name: jax.lax.bitcast_convert_type(leaf, jnp.uint8) for name, leaf in (("codes", codes), ("scales", scales))
    }
    return {"codes": bits["codes"], "scales": bits["scales"].swapaxes(-1, -2)}


def values_of(stored: Ring, numerics: Numerics) -> Array:
    """Values [B, t, d] of stored rows."""
    if "rows" in stored:
        return stored["rows"]
    codes = jax.lax.bitcast_convert_type(stored["codes"], jnp.float8_e4m3fn).astype(jnp.float32)
    scales = jnp.repeat(quant.e8m0_to_f32(stored["scales"].swapaxes(-1, -2)), quant.BLOCK, axis=-1)
    return (codes * scales).astype(numerics.dtype)


def write_window(ring: Ring, layer: Array | int, stored: Ring, start: Array, n_valid: Array) -> Ring:
    """Write stored rows of a block into the ring of a layer; see `write_rows`."""
    if "rows" in ring:
        return {"rows": write_rows(ring["rows"], layer, stored["rows"], start, n_valid)}
    b, t, _ = stored["codes"].shape
    slot = ring_slots(start, n_valid, t, ring["codes"].shape[-2])
    scales = stored["scales"].swapaxes(-1, -2)  # indexed axes come first
    scales = ring["scales"].at[layer, jnp.arange(b)[:, None], :, slot].set(scales, mode="drop")
    return {"codes": write_rows(ring["codes"], layer, stored["codes"], start, n_valid), "scales": scales}


def stored_before(ring: Ring, layer: Array | int, start: Array, count: int) -> Ring:
    """Stored rows of positions start - count .. start - 1: leaves without the layer axis, ring axis `count`."""
    if "rows" in ring:
        return {"rows": rows_before(ring["rows"], layer, start, count)}
    slot = (start[:, None] - count + jnp.arange(count)) % ring["codes"].shape[-2]
    scales = ring["scales"][layer, jnp.arange(start.shape[0])[:, None], :, slot].swapaxes(-1, -2)
    return {"codes": rows_before(ring["codes"], layer, start, count), "scales": scales}


def whole_block(stored: Ring, parallel: Parallel) -> Ring:
    """The stored rows of a block from all devices that hold parts of it; leaves without the layer axis."""
    return {name: parallel.gather_block(leaf, _RING_AXIS[name]) for name, leaf in stored.items()}


def part_of(stored: Ring, first: Array, count: int) -> Ring:
    """Rows first .. first + count - 1 of stored rows; leaves without the layer axis."""
    return {n: jax.lax.dynamic_slice_in_dim(x, first, count, _RING_AXIS[n]) for n, x in stored.items()}


def joined(first: Ring, second: Ring) -> Ring:
    """Stored rows (leaves without the layer axis), one after the other."""
    return {name: jnp.concatenate([first[name], second[name]], axis=_RING_AXIS[name]) for name in first}


def window_before(ring: Ring, layer: Array | int, start: Array, count: int, numerics: Numerics) -> Array:
    """Values [B, count, d] of positions start - count .. start - 1."""
    return values_of(stored_before(ring, layer, start, count), numerics)
