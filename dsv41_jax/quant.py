"""Number formats and quantisers of the release (FP8 E4M3, FP4 E2M1, UE8M0 and E4M3 scales).

Three activation quantisers work on blocks of the last axis, in float32:

    name       block  scale                                   code   where
    q8         32     power of two >= amax / 448 (UE8M0)       E4M3   matmul inputs, window KV
    q4_index   32     power of two >= amax / 6   (UE8M0)       E2M1   index queries and keys
    q4_main    16     amax / 6 rounded to E4M3                 E2M1   main KV

Rounding is to nearest, ties to the even code; the sign of zero is kept. The `fake_*` forms return the dequantised
values and have straight-through gradients (identity).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

E4M3_MAX = 448.0
E2M1_MAX = 6.0
BLOCK = 32
MAIN_KV_BLOCK = 16

_Q8_FLOOR = 1e-4
_Q4_INDEX_FLOOR = 6.0 * 2.0**-126
_Q4_MAIN_FLOOR = 6.0 * 2.0**-9


def power_of_two_at_least(v: Array) -> Array:
    """Smallest power of two >= v for positive normal float32 v, from the exponent bits."""
    bits = jax.lax.bitcast_convert_type(v.astype(jnp.float32), jnp.uint32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return jax.lax.bitcast_convert_type((exponent << 23).astype(jnp.uint32), jnp.float32)


def round_e4m3(x: Array) -> Array:
    """Nearest E4M3 (finite-only) value of float32 x, saturating at +-448; the result is float32."""
    x = jnp.clip(x, -E4M3_MAX, E4M3_MAX)
    normal = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)
    subnormal = jnp.round(x * 512.0) * (1.0 / 512.0)  # spacing 2^-9 below 2^-6
    return jnp.where(jnp.abs(x) < 2.0**-6, subnormal, normal)


def round_e2m1(x: Array) -> Array:
    """Nearest E2M1 value (0, .5, 1, 1.5, 2, 3, 4, 6) of float32 x, saturating at +-6; the result is float32."""
    x = jnp.clip(x, -E2M1_MAX, E2M1_MAX)
    normal = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=1)
    subnormal = jnp.round(x * 2.0) * 0.5
    return jnp.where(jnp.abs(x) < 1.0, subnormal, normal)


def e8m0_to_f32(scale: Array) -> Array:
    """2^(byte - 127) of UE8M0 scales (float8_e8m0fnu or uint8), as float32. Byte 255 becomes NaN."""
    bits = scale if scale.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(scale, jnp.uint8)
    wide = bits.astype(jnp.uint32)
    word = jnp.where(wide == 0, jnp.uint32(0x00400000), wide << 23)  # byte 0 is 2^-127, subnormal in float32
    word = jnp.where(wide == 255, jnp.uint32(0x7FC00000), word)
    return jax.lax.bitcast_convert_type(word, jnp.float32)


def f32_to_e8m0(scale: Array) -> Array:
    """UE8M0 of float32 powers of two (normal range)."""
    bits = jax.lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.uint32) >> 23
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint8), jnp.float8_e8m0fnu)


def e2m1_codes(values: Array) -> Array:
    """uint8 codes 0..15 of float32 values that are exactly E2M1 (sign in bit 3, kept on zero)."""
    double = (jnp.abs(values) * 2.0).astype(jnp.int32)  # 0 1 2 3 4 6 8 12
    magnitude = jnp.where(double <= 4, double, jnp.where(double == 6, 5, jnp.where(double == 8, 6, 7)))
    sign = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32) >> 31
    return (magnitude.astype(jnp.uint8)) | (sign.astype(jnp.uint8) << 3)


def e2m1_values(codes: Array) -> Array:
    """float32 values of uint8 codes 0..15. Integer arithmetic only, so that no table lookup is needed on an
    accelerator.
    """
    c = codes.astype(jnp.uint32)
    double = (jnp.uint32(0xC8643210) >> (4 * (c & 7))) & 15
    value = double.astype(jnp.float32) * 0.5
    return jnp.where(c >= 8, -value, value)


def pack_fp4(codes: Array) -> Array:
    """[..., n] codes 0..15 -> [..., n/2] uint8, the even index in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: Array) -> Array:
    """[..., n/2] uint8 -> [..., n] codes 0..15, the low nibble first."""
    packed = packed.astype(jnp.uint8)
    return jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _blocks(x: Array, block: int) -> Array:
    if x.shape[-1] % block:
        raise ValueError(f"last axis {x.shape[-1]} is not a multiple of the quantisation block {block}")
    return x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // block, block)


def _amax(blocks: Array, floor: float) -> Array:
    return jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1, keepdims=True), jnp.float32(floor))


def _snap(ratio: Array) -> Array:
    """A ratio by a scale that is no power of two, so that ties stay ties.

    XLA may multiply by a rounded reciprocal, which can push a ratio that is exactly halfway between two codes to one
    side. Inputs have 8 significant bits and scales 4, so a ratio that is not a tie is further than 2^-12 from one:
    rounding to 16 bits mends the rest.
    """
    return jax.lax.reduce_precision(ratio, exponent_bits=8, mantissa_bits=16)


def _ratio_of_any(blocks: Array, scale: Array) -> Array:
    """blocks / scale for powers of two down to 2^-126; subnormal inputs, which XLA reads as zero, from their bits."""
    bits = jax.lax.bitcast_convert_type(blocks, jnp.uint32)
    tiny = (bits & 0x7FFFFF).astype(jnp.float32) * 2.0**-23 * (2.0**-126 / scale)
    tiny = jnp.where(bits >> 31 == 1, -tiny, tiny)
    return jnp.where((bits >> 23) & 0xFF == 0, tiny, blocks / scale)


def _q8_parts(x: Array) -> tuple[Array, Array]:
    blocks = _blocks(x, BLOCK)
    scale = power_of_two_at_least(_amax(blocks, _Q8_FLOOR) * jnp.float32(1.0 / E4M3_MAX))
    return round_e4m3(blocks / scale), scale  # exact: the scale is a power of two, far above subnormals


def _q4_index_parts(x: Array) -> tuple[Array, Array]:
    blocks = _blocks(x, BLOCK)
    scale = power_of_two_at_least(_amax(blocks, _Q4_INDEX_FLOOR) * jnp.float32(1.0 / E2M1_MAX))
    return round_e2m1(_ratio_of_any(blocks, scale)), scale


def _q4_main_parts(x: Array) -> tuple[Array, Array]:
    blocks = _blocks(x, MAIN_KV_BLOCK)
    scale = round_e4m3(_snap(_amax(blocks, _Q4_MAIN_FLOOR) / jnp.float32(E2M1_MAX)))
    return round_e2m1(_snap(blocks / scale)), scale


def q8(x: Array) -> tuple[Array, Array]:
    """Quantise [..., n] to E4M3 codes [..., n] (float8_e4m3fn) and UE8M0 scales [..., n/32]."""
    values, scale = _q8_parts(x)
    return values.reshape(x.shape).astype(jnp.float8_e4m3fn), f32_to_e8m0(scale[..., 0])


def q4_index(x: Array) -> tuple[Array, Array]:
    """Quantise [..., n] to E2M1 codes 0..15 [..., n] (uint8) and UE8M0 scales [..., n/32]."""
    values, scale = _q4_index_parts(x)
    return e2m1_codes(values).reshape(x.shape), f32_to_e8m0(scale[..., 0])


def q4_main(x: Array) -> tuple[Array, Array]:
    """Quantise [..., n] to E2M1 codes 0..15 [..., n] (uint8) and E4M3 scales [..., n/16] (float8_e4m3fn)."""
    values, scale = _q4_main_parts(x)
    return e2m1_codes(values).reshape(x.shape), scale[..., 0].astype(jnp.float8_e4m3fn)


def _fake(parts: Callable[[Array], tuple[Array, Array]]) -> Callable[[Array], Array]:
    @jax.custom_jvp
    def fake_quantise(x: Array) -> Array:
        values, scale = parts(x)
        return (values * scale).reshape(x.shape).astype(x.dtype)

    @fake_quantise.defjvp
    def _straight_through(primals, tangents):
        return fake_quantise(primals[0]), tangents[0]

    return fake_quantise


fake_q8 = _fake(_q8_parts)
fake_q4_index = _fake(_q4_index_parts)
fake_q4_main = _fake(_q4_main_parts)


def _expand(scale: Array, axis: int, block: int) -> Array:
    return jnp.repeat(scale, block, axis=axis)


def dequantize_weight(leaf: dict[str, Array], dtype: jnp.dtype = jnp.bfloat16) -> Array:
    """The [..., out, in] matrix of a weight leaf, exact in bf16 and float32.

    Args:
        leaf: {"weight"} in a float dtype; {"weight" float8_e4m3fn [..., out, in], "scale" [..., out/32, in/32]} (dense
            FP8) or [..., out, in/32] (per row); or {"weight" uint8 [..., out, in/2], "scale" [..., out, in/32]} (FP4).
        dtype: result dtype.

    Raises:
        ValueError: the scale's shape fits none of the released layouts.
    """
    weight = leaf["weight"]
    if "scale" not in leaf:
        return weight.astype(dtype)
    scale = e8m0_to_f32(leaf["scale"])
    if weight.dtype in (jnp.uint8, jnp.int8):
        values = e2m1_values(unpack_fp4(weight.astype(jnp.uint8)))
    else:
        values = weight.astype(jnp.float32)
    rows, columns = values.shape[-2:]
    if scale.shape[-1] * BLOCK != columns or scale.shape[-2] not in (rows, rows // BLOCK):
        raise ValueError(
            f"scale {scale.shape} does not belong to a weight of {values.shape}: expected one per 32 columns"
        )
    if scale.shape[-2] != rows:
        scale = _expand(scale, -2, BLOCK)
    return (values * _expand(scale, -1, BLOCK)).astype(dtype)


def _weight_parts(
    w: Array, limit: float, rounder: Callable[[Array], Array], tile: tuple[int, int]
) -> tuple[Array, Array]:
    """Round w [..., out, in] to `rounder`'s grid with one power-of-two scale per tile (rows, columns)."""
    r, c = tile
    out, inner = w.shape[-2:]
    tiles = w.astype(jnp.float32).reshape(*w.shape[:-2], out // r, r, inner // c, c)
    amax = jnp.max(jnp.abs(tiles), axis=(-3, -1), keepdims=True)
    scale = power_of_two_at_least(jnp.maximum(amax / jnp.float32(limit), jnp.float32(2.0**-126)))
    return rounder(tiles / scale), scale


def quantize_weight_fp8(w: Array, per_row: bool = False) -> tuple[Array, Array]:
    """FP8 weight [..., out, in] with UE8M0 scales per 32x32 block (or per row and 32 columns: Engram tables)."""
    values, scale = _weight_parts(w, E4M3_MAX, round_e4m3, (1 if per_row else BLOCK, BLOCK))
    return values.reshape(w.shape).astype(jnp.float8_e4m3fn), f32_to_e8m0(scale[..., 0, :, 0])


def quantize_weight_fp4(w: Array) -> tuple[Array, Array]:
    """FP4 weight packed to uint8 [..., out, in/2] with UE8M0 scales [..., out, in/32]."""
    values, scale = _weight_parts(w, E2M1_MAX, round_e2m1, (1, BLOCK))
    return pack_fp4(e2m1_codes(values).reshape(w.shape)), f32_to_e8m0(scale[..., 0, :, 0])


def _fake_weight(kind: str, w: Array) -> Array:
    limit, rounder, tile = {
        "fp8": (E4M3_MAX, round_e4m3, (BLOCK, BLOCK)),
        "fp8_rows": (E4M3_MAX, round_e4m3, (1, BLOCK)),
        "fp4": (E2M1_MAX, round_e2m1, (1, BLOCK)),
    }[kind]
    values, scale = _weight_parts(w, limit, rounder, tile)
    return (values * scale).reshape(w.shape).astype(w.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def fake_quantize_weight(kind: str, w: Array) -> Array:
    """Value of a float weight after storing it as `fp8` (32x32), `fp8_rows` or `fp4`; straight-through gradient."""
    return _fake_weight(kind, w)


@fake_quantize_weight.defjvp
def _fake_weight_jvp(kind, primals, tangents):
    return _fake_weight(kind, primals[0]), tangents[0]
