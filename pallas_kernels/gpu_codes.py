"""Values of the small number formats inside Triton kernels, by bit arithmetic alone.

E2M1 and E4M3 bits, put into the exponent and mantissa of a float16, are the value times a power of two; subnormal
codes become subnormal float16, which the conversion to float32 reads exactly. The missing power of two belongs to the
scale: multiply by `E2M1_UNIT` or `E4M3_UNIT` there, once for each block and not for each code.
"""

import jax
import jax.numpy as jnp
from jax import Array

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
