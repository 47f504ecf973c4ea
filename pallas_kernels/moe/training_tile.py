"""One expert on some rows, in training: the arithmetic, with JAX's own gradient."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from dsv41_jax.numerics import Numerics, einsum_f32
from pallas_kernels.moe.reference import swiglu


@dataclasses.dataclass(frozen=True)
class Options:
    """Static choices. limit: SwiGLU's clamp, 0 for none. numerics: what is rounded and quantised where. share: one in
    so many of the pairs is expected to be for these experts; tiles are sized by it.
    """

    limit: float
    numerics: Numerics
    share: int = 1


def hidden(options: Options, gate_up: Array, weight: Array) -> Array:
    """The input of w2 [..., inter] in the activation dtype, from float32 [..., 2 inter]; weight [..., 1]."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    a = options.numerics.round(swiglu(gate, up, options.limit) * weight)
    return quant.fake_q8(a) if options.numerics.quantizes("linear_inputs") else a


def one_tile(options: Options, x: Array, weight: Array, w13: Array, w2: Array) -> Array:
    """One expert on x [height, D], weight [height, 1] -> [height, D] in the activation dtype."""
    numerics = options.numerics
    a = hidden(options, numerics.round_f32(einsum_f32("tk,nk->tn", x, w13)), weight)
    return numerics.round(einsum_f32("tk,nk->tn", a, w2))
