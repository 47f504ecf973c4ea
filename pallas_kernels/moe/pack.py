"""The form in which kernels read FP4 expert weights: still four bits a weight and one byte for 32 of them.

A matrix [N, K] becomes words [K/8, N], K running along rows so that the N outputs lie on lanes. In each 128 values of
K, 16 rows of words hold them four bytes to a word and two codes to a byte:

    byte p of row r: `low` code = K 4r + p, `high` code = K 64 + 4r + p        (r < 16, p < 4)
    bits of the byte, 7 to 0: low sign, high magnitude (3), low magnitude (3), high sign

`byte & 0x8E` then is the low weight as float8_e5m2, times 2^-14: E2M1's exponent and mantissa fall on E5M2's low
exponent bits and high mantissa bit, and 0.5, subnormal in E2M1, is subnormal in E5M2. One operation on a word decodes
four weights. Scales are words [K/128, N]: byte j is the E8M0 scale of K 32j .. 32j + 31. Their rows are padded to a
multiple of 8, so that XLA keeps the array in the layout that kernels read.

K and N are padded with zeros to multiples of 128. A padded input of w2 meets a padded output of w1 and w3, which is 0.
"""

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from pallas_kernels.implementation import KernelError

LANES = 128
E5M2_UNIT = 2.0**14  # E5M2 has exponent bias 15, E2M1 has 1
_ONE = 127  # the E8M0 byte of padding


def padded(size: int) -> int:
    """The next multiple of 128."""
    return -(-size // LANES) * LANES


def scale_rows(k: int) -> int:
    """Rows of scale words for K."""
    return -(-padded(k) // LANES // 8) * 8


def _pad_last_two(x: Array, rows: int, columns: int, value: int) -> Array:
    widths = [(0, 0)] * (x.ndim - 2) + [(0, rows - x.shape[-2]), (0, columns - x.shape[-1])]
    return jnp.pad(x, widths, constant_values=value)


def pack(leaf: dict[str, Array]) -> dict[str, Array]:
    """Released FP4 weights in the kernels' layout.

    Args:
        leaf: {"weight" uint8 [..., N, K/2], even K in the low nibble, "scale" float8_e8m0fnu (or its bits)
            [..., N, K/32]}.

    Returns:
        {"words" int32 [..., Kp/8, Np], "scales" int32 [..., scale_rows(K), Np]}, Kp and Np the padded sizes. Needs
        about three bytes a weight while it works: call it under jit for a layer, or fewer experts, at a time.

    Raises:
        KernelError: the leaf is not FP4.
    """
    if set(leaf) != {"weight", "scale"} or leaf["weight"].dtype not in (jnp.uint8, jnp.int8):
        given = {name: f"{x.dtype}{list(x.shape)}" for name, x in leaf.items()}
        raise KernelError(f'moe.pack: leaf is {given}; allowed: {{"weight" uint8 [..., N, K/2], "scale"}}')
    weight, scale = leaf["weight"].astype(jnp.uint8), leaf["scale"]
    n, k = weight.shape[-2], 2 * weight.shape[-1]
    if scale.shape != (*weight.shape[:-1], k // quant.BLOCK) or k % quant.BLOCK:
        raise KernelError(f"moe.pack: scale is {list(scale.shape)}; allowed: one per 32 of K={k}, [..., {n}, K/32]")
    np_, kp = padded(n), padded(k)
    lead = weight.shape[:-2]
    pairs = _pad_last_two(weight, np_, kp // 2, 0).reshape(*lead, np_, kp // LANES, 2, 32)
    codes = quant.unpack_fp4(pairs)  # [..., Np, Kp/128, half, 64]
    low, high = codes[..., 0, :], codes[..., 1, :]
    placed = (low & 8) << 4 | (high & 7) << 4 | (low & 7) << 1 | high >> 3
    words = jax.lax.bitcast_convert_type(placed.reshape(*lead, np_, kp // 8, 4), jnp.int32)
    if scale.dtype != jnp.uint8:
        scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    scale = _pad_last_two(scale, np_, kp // quant.BLOCK, _ONE)
    scales = jax.lax.bitcast_convert_type(scale.reshape(*lead, np_, kp // LANES, 4), jnp.int32)
    scales = _pad_last_two(jnp.swapaxes(scales, -1, -2), scale_rows(k), np_, 0)
    return {"words": jnp.swapaxes(words, -1, -2), "scales": scales}


def unpack(leaf: dict[str, Array]) -> dict[str, Array]:
    """{"weight" uint8 [..., Np, Kp/2], "scale" float8_e8m0fnu [..., Np, Kp/32]} of a packed leaf: inverts `pack`, but
    for the padding."""
    words, scales = (jnp.swapaxes(leaf[name], -1, -2) for name in ("words", "scales"))  # [..., Np, rows]
    lead, kp = words.shape[:-1], words.shape[-1] * 8
    placed = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*lead, kp // LANES, 64)
    low = placed >> 7 << 3 | placed >> 1 & 7
    high = (placed & 1) << 3 | placed >> 4 & 7
    codes = jnp.stack([low, high], axis=-2).reshape(*lead, kp)
    scale = jax.lax.bitcast_convert_type(scales, jnp.uint8).reshape(*lead, -1)[..., : kp // quant.BLOCK]
    return {"weight": quant.pack_fp4(codes), "scale": jax.lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)}


def as_released(leaf: dict[str, Array], n: int, k: int) -> dict[str, Array]:
    """A leaf of logical shape [..., N, K] with a scale for every 32 of K, as `quant.dequantize_weight` reads it."""
    if "words" in leaf:
        released = unpack(leaf)
        return {
            "weight": released["weight"][..., :n, : k // 2],
            "scale": released["scale"][..., :n, : k // quant.BLOCK],
        }
    if "scale" in leaf and leaf["scale"].shape[-1] != k // quant.BLOCK:  # one for each row
        return {**leaf, "scale": jnp.broadcast_to(leaf["scale"], (*leaf["scale"].shape[:-1], k // quant.BLOCK))}
    return leaf


def as_bf16(leaf: dict[str, Array]) -> dict[str, Array]:
    """The bf16 form {"weight" [..., N, K]} of released FP4 weights (exact)."""
    return {"weight": quant.dequantize_weight(leaf, jnp.bfloat16)}


def as_fp8(leaf: dict[str, Array]) -> tuple[dict[str, Array], Array]:
    """The FP8 form of released FP4 weights: one power-of-two scale for each row [N, 1].

    Returns:
        {"weight" float8_e4m3fn [..., N, K], "scale" float8_e8m0fnu [..., N, 1]}, and bool []: whether no weight was
        lost. It is exact unless the scales of a row differ by more than about 2^13; whoever loads decides what to do.
    """
    values = quant.dequantize_weight(leaf, jnp.float32)
    amax = jnp.max(jnp.abs(values), axis=-1, keepdims=True)
    scale = quant.power_of_two_at_least(jnp.maximum(amax / jnp.float32(quant.E4M3_MAX), jnp.float32(2.0**-126)))
    rounded = quant.round_e4m3(values / scale)
    exact = jnp.all(rounded * scale == values)
    return {"weight": rounded.astype(jnp.float8_e4m3fn), "scale": quant.f32_to_e8m0(scale)}, exact
