"""Routed experts in plain jax.numpy: the arithmetic that the kernels are held to.

The matrices of a few tiles at a time are gathered as they are stored, then widened.
"""

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from dsv41_jax.numerics import RELEASED, einsum_f32
from pallas_kernels.moe.groups import group_rows, place_weights, take_rows
from pallas_kernels.moe.pack import padded, unpack

Leaf = dict[str, Array]


def swiglu(gate: Array, up: Array, limit: float) -> Array:
    """Clamped SwiGLU of float32 gate and up."""
    if limit > 0:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up


def matrices(leaf: Leaf, layer: Array | int, experts: Array) -> Array:
    """bf16 [tiles, N, K] of the experts of some tiles, from any storage; exact."""
    taken = {name: x[layer, experts] for name, x in leaf.items()}
    if "words" in taken:
        taken = unpack(taken)
    if "scale" in taken and taken["scale"].shape[-1] == 1:  # FP8, one scale for each row
        return (taken["weight"].astype(jnp.float32) * quant.e8m0_to_f32(taken["scale"])).astype(jnp.bfloat16)
    return quant.dequantize_weight(taken, jnp.bfloat16)


def expert_tiles(x: Array, weight: Array, experts: Array, w1: Leaf, w3: Leaf, w2: Leaf, layer, limit: float) -> Array:
    """Experts [tiles] on quantised rows bf16 [tiles, height, D], weighted by float32 [tiles, height, 1] -> the same."""

    def matmul(x: Array, leaf: Leaf) -> Array:
        matrix = matrices(leaf, layer, experts)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, matrix.shape[-1] - x.shape[-1])])
        return RELEASED.round_f32(einsum_f32("etk,enk->etn", x, matrix))

    a = swiglu(matmul(x, w1), matmul(x, w3), limit) * weight
    return RELEASED.round(matmul(quant.fake_q8(RELEASED.round(a)), w2))[..., : x.shape[-1]]


def tile_height(rows: int, experts: int) -> int:
    """About the mean load, a power of two of at least 2 (one row would sum in another order)."""
    mean = max(1, rows // experts)
    return min(128, max(2, 1 << (mean - 1).bit_length()))


def experts(
    x: Array,
    chosen: Array,
    weights: Array,
    w1: Leaf,
    w3: Leaf,
    w2: Leaf,
    layer,
    limit: float,
    share: int,
    temporary_bytes: int,
) -> Array:
    """See `pallas_kernels.moe.experts`."""
    d = x.shape[-1]
    n_experts = next(iter(w1.values())).shape[1]
    groups = group_rows(chosen, n_experts, tile_height(chosen.size // share, n_experts))
    inputs = (
        take_rows(quant.fake_q8(x), groups.source, groups.height),
        place_weights(weights, groups),
        groups.expert,
    )

    def run(x: Array, weight: Array, experts: Array) -> Array:
        return expert_tiles(x, weight, experts, w1, w3, w2, layer, limit)

    tiles = groups.expert.shape[0]
    inter = w1["words"].shape[-1] if "words" in w1 else w1["weight"].shape[-2]
    together = max(1, temporary_bytes // (2 * 4 * padded(d) * inter))
    if together >= tiles:
        return run(*inputs).reshape(-1, d)[groups.position]
    steps = -(-tiles // together)
    parts = [jnp.pad(x, [(0, steps * together - tiles)] + [(0, 0)] * (x.ndim - 1)) for x in inputs]
    out = jax.lax.map(lambda part: run(*part), [x.reshape(steps, together, *x.shape[1:]) for x in parts])
    return out.reshape(-1, d)[groups.position]
