"""Rows as columns of 128 lanes, inside a TPU kernel: norm, rotation, the quantisers and the packing into words.

A row of d channels is a list of ceil(d / 128) arrays [rows, 128]; channels past d are zero. Nothing here divides by a
scale: an E2M1 code is found by comparing with multiples of the scale, which are exact, and powers of two are inverted
in their exponent. So codes do not depend on how a chip divides, and ties stay ties. Values too small for a normal
float32 do not occur: the rotation before has flushed them.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

LANES = 128
SUBLANES = 8

Columns = list[Array]

# Up to which multiple of the scale a value has the next lower E2M1 code, and whether a tie goes up: to the even code.
_E2M1_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def lane_numbers(rows: int) -> Array:
    """int32 [rows, 128]: the lane of each element."""
    return jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _keep_mantissa(x: Array, bits: int) -> Array:
    """float32 x rounded to nearest even at so many explicit mantissa bits, by integers: no pass can undo it."""
    drop = 23 - bits
    raw = _bits(x)
    return _float((raw + (2 ** (drop - 1) - 1) + ((raw >> drop) & 1)) & ~(2**drop - 1))


def round_bf16(x: Array) -> Array:
    """float32 x at the nearest bf16 value, still float32."""
    return _keep_mantissa(x, 7)


def rms_norm(x: Columns, weight: Columns, d: int, eps: float) -> Columns:
    """Columns [rows, 128] of d channels, normed and rounded to bf16 (float32 values); weight [1, 128] each."""
    mean = jnp.sum(sum(column * column for column in x), axis=1, keepdims=True) / d
    factor = jax.lax.rsqrt(mean + jnp.float32(eps))
    return [round_bf16(column * factor * w) for column, w in zip(x, weight, strict=True)]


def _tail_angles(parts: Columns, number: int, still: int) -> Array:
    """Angles of the pairs in column `number`: lanes 2i and 2i + 1 get that of their pair.

    Args:
        parts: columns of one value for each pair, the first pair being channels `still` and `still` + 1.
    """
    lane = lane_numbers(parts[0].shape[0])
    first = (LANES * number - still) // 2  # pair of lane 0; negative where the tail begins inside the column
    pairs = jnp.zeros(lane.shape, jnp.float32)
    for q, part in enumerate(parts):
        begin, turn = LANES * q - first, (LANES * q - first) % LANES
        moved = pltpu.roll(part, turn, 1) if turn else part
        pairs = jnp.where((lane >= begin) & (lane < begin + LANES), moved, pairs)
    for bit in (32, 16, 8, 4, 2, 1):  # pair m, at lane m, moves on by its own number
        pairs = jnp.where(lane & (2 * bit) != 0, pltpu.roll(pairs, bit, 1), pairs)
    return jnp.where(lane & 1 != 0, pltpu.roll(pairs, 1, 1), pairs)


def rotate(x: Columns, cos: Columns, sin: Columns, still: int) -> Columns:
    """Pairs of channels from `still` on turned by angles (columns of pairs), rounded to bf16.

    Channels before them turn by the angle 0, which may change the sign of a zero.
    """
    lane = lane_numbers(x[0].shape[0])
    even = lane & 1 == 0
    turned = []
    for number, column in enumerate(x):
        partner = jnp.where(even, pltpu.roll(column, LANES - 1, 1), pltpu.roll(column, 1, 1))
        if LANES * (number + 1) <= still:
            turned.append(column + partner * 0.0)
            continue
        tail = lane + LANES * number >= still
        same = jnp.where(tail, _tail_angles(cos, number, still), 1.0)
        other = jnp.where(tail, _tail_angles(sin, number, still), 0.0)
        turned.append(round_bf16(column * same + partner * jnp.where(even & tail, -other, other)))
    return turned


def _amax(column: Array, block: int, floor: float) -> Array:
    """Largest magnitude of each element's block of lanes, at least `floor`."""
    lane, top, distance = lane_numbers(column.shape[0]), jnp.abs(column), 1
    while distance < block:
        other = jnp.where(lane & distance != 0, pltpu.roll(top, distance, 1), pltpu.roll(top, LANES - distance, 1))
        top, distance = jnp.maximum(top, other), 2 * distance
    return jnp.maximum(top, jnp.float32(floor))


def _sign(column: Array) -> Array:
    return jax.lax.shift_right_logical(_bits(column), 31)


def _power_of_two_at_least(v: Array) -> Array:
    """Biased exponent, int32, of the smallest power of two >= v for positive normal float32 v."""
    raw = _bits(v)
    return (raw >> 23) + jnp.where(raw & 0x7FFFFF != 0, 1, 0)


def _e2m1(column: Array, scale: Array | float) -> Array:
    """Codes 0..15 of column / scale."""
    size, code = jnp.abs(column), jnp.zeros(column.shape, jnp.int32)
    for step, up in _E2M1_STEPS:
        edge = scale * step
        code = code + jnp.where(size >= edge if up else size > edge, 1, 0)
    return code | (_sign(column) << 3)


def _e4m3(size: Array) -> Array:
    """E4M3 bits 0..126 of float32 values >= 0, saturating."""
    size = jnp.minimum(size, 448.0)
    normal = (_bits(_keep_mantissa(size, 3)) >> 20) - (120 << 3)
    subnormal = _bits(size + 2.0**14) & 15  # float32 has the spacing 2^-9 from 2^14 on
    return jnp.where(size < 2.0**-6, subnormal, normal)


def _e4m3_value(bits: Array) -> Array:
    return jnp.where(bits < 8, bits.astype(jnp.float32) * 2.0**-9, _float((bits + (120 << 3)) << 20))


def q4_main(column: Array) -> tuple[Array, Array]:
    """E2M1 codes, and the E4M3 bits of the scale of each element's block of 16; see `quant.q4_main`."""
    # The product with a rounded sixth is the tie itself where a sixth is a tie between two scales (five bits), and any
    # other sixth of a bf16 number is further than 2^-12 from one.
    scale = _e4m3(_amax(column, 16, 6.0 * 2.0**-9) * jnp.float32(1.0 / 6.0))
    return _e2m1(column, _e4m3_value(scale)), scale


def q4_index(column: Array) -> tuple[Array, Array]:
    """E2M1 codes, and the UE8M0 bits of the scale of each element's block of 32; see `quant.q4_index`."""
    scale = _power_of_two_at_least(_amax(column, 32, 6.0 * 2.0**-126) * jnp.float32(1.0 / 6.0))
    return _e2m1(column * _float((254 - scale) << 23), 1.0), scale


def q8(column: Array) -> tuple[Array, Array]:
    """E4M3 codes 0..255, and the UE8M0 bits of the scale of each element's block of 32; see `quant.q8`."""
    scale = _power_of_two_at_least(_amax(column, 32, 1e-4) * jnp.float32(1.0 / 448.0))
    return _e4m3(jnp.abs(column) * _float((254 - scale) << 23)) | (_sign(column) << 7), scale


def place(columns: Columns, moves: list[tuple[int, int, int, int, int]]) -> Array:
    """int32 [rows, 128]: parts of int32 columns, shifted, moved to other lanes and joined by OR.

    Args:
        moves: (first channel, channels, bits to the left, lane of the first); channels may span columns.
    """
    lane = lane_numbers(columns[0].shape[0])
    parts: dict[tuple[int, int, int], Array] = {}  # by turn and source lanes, so that a turn and a mask serve many
    for first, count, shift, target in moves:
        done = 0
        while done < count:
            number, start = divmod(first + done, LANES)
            here = min(count - done, LANES - start)
            key = (target + done - start) % LANES, start, here
            part = columns[number] << shift
            parts[key] = parts[key] | part if key in parts else part
            done += here
    turns: dict[int, Array] = {}
    for (turn, start, count), part in parts.items():
        part = jnp.where((lane >= start) & (lane < start + count), part, 0)
        turns[turn] = turns[turn] | part if turn in turns else part
    joined = jnp.zeros(lane.shape, jnp.int32)
    for turn, part in turns.items():
        joined = joined | (pltpu.roll(part, turn, 1) if turn else part)
    return joined


def word_moves(d: int, block: int, scale_words: int, scale_lane: int) -> tuple[list, list]:
    """Moves of E2M1 codes to the words on lanes 0 .. d/8 - 1, and of their blocks' scales to words from a lane on.

    Nibble k of word w is channel k * d/8 + w; byte b of scale word w is scale b * scale_words + w.
    """
    codes = [(k * d // 8, d // 8, 4 * k, 0) for k in range(8)]
    scales = [(g * block, 1, 8 * (g // scale_words), scale_lane + g % scale_words) for g in range(d // block)]
    return codes, scales
