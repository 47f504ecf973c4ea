"""The small number formats inside Triton kernels, by bit arithmetic alone.

E2M1 and E4M3 bits, put into the exponent and mantissa of a float16, are the value times a power of two; subnormal
codes become subnormal float16, which the conversion to float32 reads exactly. The missing power of two belongs to the
scale: multiply by `E2M1_UNIT` or `E4M3_UNIT` there, once for each block and not for each code.

Quantising has the bits of `dsv41_jax.quant`. Triton has neither round nor reduce_precision: they are integer additions.
"""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.implementation import KernelError

E2M1_UNIT = 2.0**14  # float16 has exponent bias 15, E2M1 has 1
E4M3_UNIT = 2.0**8  # and E4M3 has 7


def power_of_two(n: int) -> int:
    """The smallest power of two >= n: Triton's arrays have such sizes."""
    return 1 << max(n - 1, 0).bit_length()


def _half(bits: Array) -> Array:
    """float32 of 16 bits of a float16."""
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def e2m1(words: Array, nibble: int) -> Array:
    """Nibble 0..7 of int32 words: float32 values / E2M1_UNIT."""

    def field(mask: int, at: int) -> Array:  # the bits of the mask, of a nibble moved to `at`
        shift = 4 * nibble - at
        moved = jax.lax.shift_right_logical(words, jnp.int32(shift)) if shift > 0 else words << -shift
        return moved & mask

    return _half((field(0x8000, 12) | field(0x0E00, 9)).astype(jnp.int16))


def e4m3_pairs(pairs: Array) -> Array:
    """uint16 [..., n], two E4M3 each (low byte first): float32 values / E4M3_UNIT [..., 2 * n]."""
    pairs = jax.lax.bitcast_convert_type(pairs, jnp.int16)
    low = ((pairs << 7) & jnp.int16(0x3F80)) | ((pairs << 8) & jnp.int16(-0x8000))
    high = ((pairs >> 1) & jnp.int16(0x3F80)) | (pairs & jnp.int16(-0x8000))
    both = jnp.stack([_half(low), _half(high)], axis=-1)
    return both.reshape(*pairs.shape[:-1], 2 * pairs.shape[-1])


def e4m3_scale(byte: Array) -> Array:
    """int32 bits 0..127 of positive E4M3: float32 values / E4M3_UNIT."""
    return _half((byte << 7).astype(jnp.int16))


def e8m0(byte: Array) -> Array:
    """float32 2^(byte - 127) of int32 bytes 1..254."""
    return jax.lax.bitcast_convert_type(byte << 23, jnp.float32)


def rounded(x: Array, interpret: bool) -> Array:
    """float32 x rounded to bf16. XLA drops a pair of conversions, and Triton has no reduce_precision."""
    if interpret:
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _nearest(bits: Array, drop: int) -> Array:
    """Bits of float32 without the last `drop`, rounded to nearest, ties to even."""
    return (bits + (2 ** (drop - 1) - 1) + ((bits >> drop) & 1)) >> drop


def _code(x: Array, most: float, mantissa: int, bias: int) -> Array:
    """int32 sign, exponent and mantissa of float32 x in a small format, saturating."""
    size = jnp.minimum(jnp.abs(x), most)
    normal = _nearest(jax.lax.bitcast_convert_type(size, jnp.int32), 23 - mantissa) - ((127 - bias) << mantissa)
    units = size * 2.0 ** (bias + mantissa - 1)  # of a subnormal
    whole = units.astype(jnp.int32)
    part = units - whole.astype(jnp.float32)
    subnormal = whole + ((part > 0.5) | ((part == 0.5) & ((whole & 1) == 1))).astype(jnp.int32)
    return jnp.where(size < 2.0 ** (1 - bias), subnormal, normal)


def _sign(x: Array) -> Array:
    return jax.lax.shift_right_logical(jax.lax.bitcast_convert_type(x, jnp.int32), jnp.int32(31))


def e2m1_code(x: Array) -> Array:
    """int32 codes 0..15 of float32 x, saturating at 6."""
    return _code(x, 6.0, 1, 1) | (_sign(x) << 3)


def e4m3_code(x: Array) -> Array:
    """int32 codes 0..255 of float32 x, saturating at 448."""
    return _code(x, 448.0, 3, 7) | (_sign(x) << 7)


def snapped(x: Array) -> Array:
    """float32 x rounded to 16 bits after the point, the sign of zero kept; see `quant._snap`."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    near = (_nearest(bits & 0x7FFFFFFF, 7) << 7) | (bits & jnp.int32(-(2**31)))
    return jax.lax.bitcast_convert_type(near, jnp.float32)


def power_at_least(x: Array) -> Array:
    """int32 UE8M0 byte of the smallest power of two >= positive normal float32 x."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).astype(jnp.int32)


def require_addressable(operation: str, name: str, array: Array) -> None:
    """KernelError for byte arrays whose offsets Pallas computes in 32 bits although they pass 2^31."""
    if array.dtype.itemsize == 1 and 2**31 < array.size <= 2**32:
        raise KernelError(
            f"{operation} (gpu): {name} has {array.size} bytes; a byte array of 2 to 4 GiB cannot be addressed"
        )
