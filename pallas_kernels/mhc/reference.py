"""Hyper-connections in plain `jax.numpy`, with the bits of `dsv41_jax.hyper_connections` in numerics `released`."""

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.norms import rms_scale
from dsv41_jax.numerics import RELEASED, project_rows


def expand(x: Array, u: Array, post: Array, comb: Array) -> Array:
    """See `mhc.expand`."""
    total = post[..., :, None] * u.astype(jnp.float32)[..., None, :]
    for j in range(x.shape[-2]):
        total = total + comb[..., j, :, None] * x[..., j, None, :].astype(jnp.float32)
    return RELEASED.round(total)


def collapse(x: Array, pre: Array) -> Array:
    """Weighted sum of the streams: bf16 x [..., C, D], pre [..., C] -> bf16 [..., D]."""
    return RELEASED.round(sum(pre[..., c, None] * x[..., c, :].astype(jnp.float32) for c in range(x.shape[-2])))


def sinkhorn(logits: Array, iterations: int, eps: float) -> Array:
    """Doubly stochastic [C, C, n] from logits [C, C, n] (source, destination, token); ends on a column pass."""
    m = jax.nn.softmax(logits, axis=1) + eps
    m = m / (jnp.sum(m, axis=0, keepdims=True) + eps)

    def normalise(_, m):
        m = m / (jnp.sum(m, axis=1, keepdims=True) + eps)
        return m / (jnp.sum(m, axis=0, keepdims=True) + eps)

    return jax.lax.fori_loop(0, iterations - 1, normalise, m)


def coefficients(
    mix: Array, base: Array, scale: Array, c: int, iterations: int, hc_eps: float
) -> tuple[Array, Array, Array]:
    """pre [..., C], post [..., C] and comb [..., C, C] from mix [..., (2+C)C]."""
    lead = mix.shape[:-1]
    mix = mix.reshape(-1, mix.shape[-1])
    pre = jax.nn.sigmoid(mix[:, :c] * scale[0] + base[:c]) + hc_eps
    post = 2.0 * jax.nn.sigmoid(mix[:, c : 2 * c] * scale[1] + base[c : 2 * c])
    logits = mix[:, 2 * c :] * scale[2] + base[2 * c :]
    comb = sinkhorn(logits.T.reshape(c, c, -1), iterations, hc_eps)  # tokens last: vector lanes
    comb = jnp.moveaxis(comb, -1, 0)
    return pre.reshape(*lead, c), post.reshape(*lead, c), comb.reshape(*lead, c, c)


def connect(
    x: Array,
    update: tuple[Array, Array, Array] | None,
    pre: Array,
    fn: Array,
    base: Array,
    scale: Array,
    norm: Array,
    layer: Array | int,
    *,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Array, Array, Array, Array, Array]:
    """See `mhc.connect`."""
    if update is not None:
        x = expand(x, *update)
    *lead, c, d = x.shape
    read = collapse(x, pre).astype(jnp.float32)
    y = RELEASED.round(read * rms_scale(read, norm_eps) * norm[layer].astype(jnp.float32))
    v = x.astype(jnp.float32).reshape(*lead, c * d)
    mix = project_rows(v, fn[layer]) * rms_scale(v, norm_eps)
    return x, y, *coefficients(mix, base[layer], scale[layer], c, iterations, hc_eps)
