"""Dense FP8 maps: y = Q8(x) W^T, with W in E4M3 and a power-of-two scale per 32x32 block, stacked over layers.

The weights are read as they are stored, once; nothing of their size is written. The quantisation of the input is part
of the operation. See `reference` for the arithmetic.
"""

import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from pallas_kernels.implementation import KernelError, resolve
from pallas_kernels.quantized_linear import reference

_OPERATION = "quantized_linear"


def linear(
    x: Array, leaf: dict[str, Array], layer: Array | int | None = None, *, implementation: str = "auto"
) -> Array:
    """A dense map of quantised rows.

    Args:
        x: bf16 [..., K].
        leaf: {"weight" float8_e4m3fn [L, N, K], "scale" float8_e8m0fnu [L, N/32, K/32]}, or without L and `layer` None.
        layer: which of the L.

    Returns:
        bf16 [..., N], rounded once from a float32 sum.

    Raises:
        KernelError: a dtype or shape that is not the above, or an unknown implementation.
    """
    chosen = resolve(_OPERATION, implementation)
    weight, scale, layer = _stacked(x, leaf, layer, 1)
    if chosen == "reference":
        return reference.linear(x, weight, scale, layer)
    return _kernel(chosen, x, weight, scale, layer, groups=1, quantize=True)


def grouped_linear(
    x: Array, leaf: dict[str, Array], layer: Array | int | None = None, *, groups: int, implementation: str = "auto"
) -> Array:
    """A block-diagonal map: part g of x times rows g * r .. of the weight. The input is not quantised.

    Args:
        x: bf16 [..., G * k].
        leaf: {"weight" float8_e4m3fn [L, G * r, k], "scale" float8_e8m0fnu [L, G * r/32, k/32]}, or without L.

    Returns:
        bf16 [..., G * r].

    Raises:
        KernelError: as `linear`.
    """
    chosen = resolve(_OPERATION, implementation)
    weight, scale, layer = _stacked(x, leaf, layer, groups)
    if chosen == "reference":
        return reference.grouped_linear(x, weight, scale, layer, groups)
    return _kernel(chosen, x, weight, scale, layer, groups=groups, quantize=False)


def _kernel(chosen: str, x: Array, weight: Array, scale: Array, layer: Array, *, groups: int, quantize: bool) -> Array:
    if chosen == "gpu":
        from pallas_kernels.quantized_linear import gpu as kernels
    else:
        from pallas_kernels.quantized_linear import tpu as kernels
    rows = x.reshape(-1, x.shape[-1])
    y = kernels.project(rows, weight, scale, layer, groups=groups, quantize=quantize, interpret=chosen == "interpret")
    return y.reshape(*x.shape[:-1], -1)


def _stacked(x: Array, leaf: dict[str, Array], layer: Array | int | None, groups: int) -> tuple[Array, Array, Array]:
    """Weight [L, N, K], scale [L, N/32, K/32] and layer of a leaf that fits x."""
    weight, scale = leaf["weight"], leaf.get("scale")
    if weight.dtype != jnp.float8_e4m3fn or scale is None or scale.dtype != jnp.float8_e8m0fnu:
        given = f"weight {weight.dtype}, scale {None if scale is None else scale.dtype}"
        raise KernelError(f"{_OPERATION}: leaf has {given}; it takes weight float8_e4m3fn and scale float8_e8m0fnu")
    if x.dtype != jnp.bfloat16:
        raise KernelError(f"{_OPERATION}: x is {x.dtype}; it takes bfloat16")
    if layer is None:
        weight, scale, layer = weight[None], scale[None], 0
    if weight.ndim != 3:
        raise KernelError(
            f"{_OPERATION}: weight {weight.shape} with layer={layer}; it takes [L, N, K], or [N, K] with layer=None"
        )
    n_layers, n, k = weight.shape
    expected = (n_layers, n // quant.BLOCK, k // quant.BLOCK)
    if n % (quant.BLOCK * groups) or k % quant.BLOCK or scale.shape != expected:
        raise KernelError(
            f"{_OPERATION}: weight {weight.shape} in {groups} groups with scale {scale.shape}; rows of a group and "
            f"columns must be multiples of {quant.BLOCK}, one scale per {quant.BLOCK}x{quant.BLOCK} block"
        )
    if x.shape[-1] != groups * k:
        raise KernelError(f"{_OPERATION}: x has {x.shape[-1]} columns; weight {weight.shape} takes {groups * k}")
    return weight, scale, jnp.asarray(layer, jnp.int32)
