"""Manifold-constrained hyper-connections between two sublayers, in one pass over the residual streams.

    connect   spread a sublayer's output over the streams, read the next sublayer's input, and mix its coefficients
    expand    spread a sublayer's output only: after the last one

The arithmetic is that of `dsv41_jax.hyper_connections` and `dsv41_jax.norms` in numerics `released`: bf16 streams,
float32 coefficients.
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.implementation import KernelError, resolve
from pallas_kernels.mhc import reference

Update = tuple[Array, Array, Array]


def connect(
    x: Array,
    update: Update | None,
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
    implementation: str = "auto",
) -> tuple[Array, Array, Array, Array, Array]:
    """Streams after a sublayer's update, the next sublayer's normed input, and the next coefficients.

    Args:
        x: streams, bf16 [..., C, D].
        update: the sublayer's output u bf16 [..., D] and its post float32 [..., C] and comb float32 [..., C source, C
            destination]; None: the streams stay as they are.
        pre: float32 [..., C], the weights by which the next sublayer's input is collapsed.
        fn: float32 [L, (2+C)C, C*D]. base: float32 [L, (2+C)C]. scale: float32 [L, 3]. norm: [L, D], the next
            sublayer's norm.
        layer: int32 scalar, which of L.
        iterations, hc_eps: of the Sinkhorn normalisation. norm_eps: of both norms.
        implementation: see `pallas_kernels.implementation`.

    Returns:
        x' bf16 [..., C, D]; y = RMSNorm(collapse(x', pre)) bf16 [..., D]; pre', post', comb' of x', float32.

    Raises:
        KernelError: an argument that the operation does not take.
    """
    how = resolve("mhc.connect", implementation)
    lead, c, d = _check_streams("connect", x, how)
    if update is not None:
        _check_update("connect", x, *update)
    rows = (2 + c) * c
    layers = fn.shape[:1]
    _check_shapes(
        "connect",
        pre=(pre, (*lead, c)),
        fn=(fn, (*layers, rows, c * d)),
        base=(base, (*layers, rows)),
        scale=(scale, (*layers, 3)),
        norm=(norm, (*layers, d)),
    )
    if iterations < 1:
        raise KernelError(f"mhc.connect: iterations={iterations}, which must be 1 or more")
    options = {"iterations": iterations, "hc_eps": hc_eps, "norm_eps": norm_eps}
    stacked = fn, base, scale, norm, layer
    if how == "reference":
        return reference.connect(x, update, pre, *stacked, **options)
    update = None if update is None else _flat_update(*update)
    arguments = x.reshape(-1, c, d), update, pre.reshape(-1, c), *stacked
    if how == "gpu":
        from pallas_kernels.mhc import gpu

        out = gpu.connect(*arguments, **options)
    else:
        from pallas_kernels.mhc import tpu

        out = tpu.connect(*arguments, **options, interpret=how == "interpret")
    return tuple(part.reshape(*lead, *part.shape[1:]) for part in out)


def expand(x: Array, u: Array, post: Array, comb: Array, *, implementation: str = "auto") -> Array:
    """Streams bf16 [..., C, D] after a sublayer's output u bf16 [..., D]: x'_k = post_k u + sum_j comb[j, k] x_j.

    Raises:
        KernelError: an argument that the operation does not take.
    """
    how = resolve("mhc.expand", implementation)
    _, c, d = _check_streams("expand", x, how)
    _check_update("expand", x, u, post, comb)
    if how == "reference":
        return reference.expand(x, u, post, comb)
    arguments = x.reshape(-1, c, d), *_flat_update(u, post, comb)
    if how == "gpu":
        from pallas_kernels.mhc import gpu

        return gpu.expand(*arguments).reshape(x.shape)
    from pallas_kernels.mhc import tpu

    return tpu.expand(*arguments, interpret=how == "interpret").reshape(x.shape)


def _flat_update(u: Array, post: Array, comb: Array) -> Update:
    c = post.shape[-1]
    return u.reshape(-1, u.shape[-1]), post.reshape(-1, c), comb.reshape(-1, c, c)


def _check_streams(op: str, x: Array, how: str) -> tuple[tuple[int, ...], int, int]:
    if x.ndim < 3 or x.dtype != jnp.bfloat16:
        raise KernelError(f"mhc.{op}: x is {x.dtype} {x.shape}, not bfloat16 [..., C, D]")
    *lead, c, d = x.shape
    if how != "reference" and not (2 <= c <= 4 and d % 32 == 0):
        raise KernelError(f"mhc.{op}: {c} streams of {d}; the kernels take 2 to 4 of a multiple of 32")
    return tuple(lead), c, d


def _check_update(op: str, x: Array, u: Array, post: Array, comb: Array) -> None:
    *lead, c, d = x.shape
    if u.dtype != jnp.bfloat16:
        raise KernelError(f"mhc.{op}: u is {u.dtype}, not bfloat16")
    _check_shapes(op, u=(u, (*lead, d)), post=(post, (*lead, c)), comb=(comb, (*lead, c, c)))


def _check_shapes(op: str, **given: tuple[Array, tuple[int, ...]]) -> None:
    for name, (array, shape) in given.items():
        if array.shape != shape:
            raise KernelError(f"mhc.{op}: {name} is {array.shape}, not {shape}")
        if name != "u" and name != "norm" and array.dtype != jnp.float32:
            raise KernelError(f"mhc.{op}: {name} is {array.dtype}, not float32")
