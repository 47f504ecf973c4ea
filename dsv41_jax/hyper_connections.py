"""Single-pass manifold-constrained hyper-connections (mHC): C residual streams, mixed by coefficients made from the
streams.

A sublayer (attention or FFN) reads one collapsed stream and its output is spread over all of them. The collapse weights
lag by one sublayer: what a sublayer reads was mixed by the weights of the sublayer before it, and its own `pre` is
handed on.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.norms import rms_scale
from dsv41_jax.numerics import Numerics, einsum_f32, project_rows
from pallas_kernels import mhc
from pallas_kernels.mhc.reference import coefficients

__all__ = [
    "HyperConnection",
    "coefficients",
    "collapse",
    "connect",
    "expand",
    "identity_mix",
    "stream_mean",
]


class HyperConnection(nn.Module):
    """Coefficients of one sublayer from the streams.

    Parameters: `fn` [(2+C)C, C*D], `base` [(2+C)C], `scale` [3], all float32.
    """

    iterations: int
    hc_eps: float
    norm_eps: float

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array, Array]:
        """x [..., C, D] -> pre [..., C], post [..., C], comb [..., C source, C destination], float32."""
        c, d = x.shape[-2:]
        rows = (2 + c) * c
        fn = self.param("fn", nn.initializers.normal(0.02), (rows, c * d))
        base = self.param("base", nn.initializers.zeros, (rows,))
        scale = self.param("scale", nn.initializers.ones, (3,))
        return coefficients(self.mix(x, fn), base, scale, c, self.iterations, self.hc_eps)

    def mix(self, x: Array, fn: Array) -> Array:
        """Projection of the flattened streams (copy-major); the norm's factor multiplies after it."""
        *lead, c, d = x.shape
        v = x.astype(jnp.float32).reshape(*lead, c * d)
        return project_rows(v, fn.astype(jnp.float32)) * rms_scale(v, self.norm_eps)


def identity_mix(shape: tuple[int, ...], c: int) -> Array:
    """The first block's collapse weights: one on copy 0. [*shape, C] float32."""
    return jnp.broadcast_to(jax.nn.one_hot(0, c, dtype=jnp.float32), (*shape, c))


def collapse(x: Array, pre: Array, numerics: Numerics) -> Array:
    """Weighted sum of the streams: x [..., C, D], pre [..., C] -> [..., D]."""
    if numerics.dtype == jnp.float32:
        return einsum_f32("...c,...cd->...d", pre, x)  # a dot: XLA on CPU would recompute sums inside every consumer
    total = sum(pre[..., c, None] * x[..., c, :].astype(jnp.float32) for c in range(x.shape[-2]))
    return numerics.round(total)


def connect(
    x: Array,
    update: tuple[Array, Array, Array] | None,
    pre: Array,
    weights: dict[str, Array],
    iterations: int,
    hc_eps: float,
    norm_eps: float,
    numerics: Numerics,
) -> tuple[Array, Array, Array, Array, Array]:
    """Everything between two sublayers in one pass over the streams, by a kernel: `expand`, `collapse`, the norm, and
    the coefficients.

    Args:
        x: [..., C, D]. update: output [..., D], post [..., C] and comb [..., C, C] of the sublayer before, or None.
        pre: [..., C]. weights: {"fn", "base", "scale", "norm"}, stacked over layers if there is a "layer" among them.

    Returns:
        streams, normed input of the next sublayer [..., D], and its pre, post and comb.
    """
    lead = x.shape[:-2]
    stacked = dict(weights)
    layer = stacked.pop("layer", None)
    if layer is None:
        stacked, layer = jax.tree.map(lambda w: w[None], stacked), 0

    def rows(a: Array) -> Array:
        return a.reshape(-1, *a.shape[len(lead) :])

    out = mhc.connect(
        rows(x),
        None if update is None else tuple(map(rows, update)),
        rows(pre),
        stacked["fn"],
        stacked["base"],
        stacked["scale"],
        stacked["norm"],
        layer,
        iterations=iterations,
        hc_eps=hc_eps,
        norm_eps=norm_eps,
        implementation=numerics.implementation,
    )
    return tuple(a.reshape(*lead, *a.shape[1:]) for a in out)


def expand(u: Array, x: Array, post: Array, comb: Array, numerics: Numerics) -> Array:
    """Spread a sublayer's output u [..., D] over the streams x [..., C, D]: x'_k = post_k u + sum_j comb[j, k] x_j, one
    rounding.
    """
    if numerics.kernels:
        c, d = x.shape[-2:]
        flat = (x.reshape(-1, c, d), u.reshape(-1, d), post.reshape(-1, c), comb.reshape(-1, c, c))
        return mhc.expand(*flat, implementation=numerics.implementation).reshape(x.shape)
    total = post[..., :, None] * u.astype(jnp.float32)[..., None, :]
    if numerics.dtype == jnp.float32:
        return total + einsum_f32("...jk,...jd->...kd", comb, x)  # see `collapse`
    for j in range(x.shape[-2]):
        total = total + comb[..., j, :, None] * x[..., j, None, :].astype(jnp.float32)
    return numerics.round(total)


def stream_mean(x: Array, numerics: Numerics) -> Array:
    """Plain mean of the copies [..., C, D] -> [..., D]: what the drafter taps."""
    return numerics.round(jnp.mean(x.astype(jnp.float32), axis=-2))
