"""The model's linear maps: y = x W^T, float32 accumulation, one rounding, no bias.

A subtree is {"weight"} in a float dtype, or {"weight", "scale"} in a stored format (see `quant.dequantize_weight`).
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from dsv41_jax.numerics import Numerics, project_rows
from pallas_kernels import quantized_linear

_POINTS = {"fp8": "dense_weights", "fp4": "expert_weights"}


def weight_matrix(leaf: dict[str, Array], numerics: Numerics, stored_as: str | None) -> Array:
    """The matrix a matmul uses: dequantised, or in training rounded through the format it will be stored in.

    Args:
        leaf: weight subtree, [..., out, in].
        numerics: the numerics in use.
        stored_as: "fp8", "fp4" or None (bf16 storage: nothing to round to).
    """
    if "scale" in leaf:
        return quant.dequantize_weight(leaf, numerics.dtype)
    weight = leaf["weight"]
    if stored_as is not None and numerics.quantizes(_POINTS[stored_as]):
        weight = quant.fake_quantize_weight(stored_as, weight)
    # Master weights are float32; what they are quantised to is exact in bf16.
    return weight.astype(numerics.dtype) if weight.dtype == jnp.float32 else weight


def stored_leaf(module: nn.Module, shape: tuple[int, ...]) -> dict[str, Array]:
    """The weight subtree of a module as it is stored: {"weight"} of `shape`, or whatever forms a stored format has
    (weight or words, scales; for kernels, stacked over layers, the "layer").
    """
    stored = {"words", "scale", "scales", "layer"}
    names = [name for name in ("weight", *sorted(stored)) if module.has_variable("params", name)]
    if stored.intersection(names):
        return {name: module.get_variable("params", name) for name in names}
    return {"weight": module.param("weight", nn.initializers.normal(0.02), shape)}


def kernel_linear(x: Array, leaf: dict[str, Array], numerics: Numerics) -> Array:
    """x [..., in] times an FP8 leaf [out, in], or one stacked over layers with its "layer", by a kernel; x is quantised
    there.
    """
    weights = {name: part for name, part in leaf.items() if name != "layer"}
    return quantized_linear.linear(x, weights, leaf.get("layer"), implementation=numerics.implementation)


class Linear(nn.Module):
    """x [..., in] -> [..., features] in the activation dtype.

    Attributes:
        features: rows of the weight.
        numerics: numerics of activations.
        quantized: the weight is stored in FP8, and the input is quantised to FP8 first (in numerics that quantise).
    """

    features: int
    numerics: Numerics
    quantized: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        leaf = stored_leaf(self, (self.features, x.shape[-1]))
        if self.numerics.kernels and "scale" in leaf:
            return kernel_linear(x, leaf, self.numerics)
        if self.quantized and self.numerics.quantizes("linear_inputs"):
            x = quant.fake_q8(x)
        matrix = weight_matrix(leaf, self.numerics, "fp8" if self.quantized else None)
        return self.numerics.round(project_rows(x, matrix))


class LinearF32(nn.Module):
    """x [..., in] -> float32 [..., features], unrounded: for weights the release stores in bf16 and multiplies in
    float32."""

    features: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        weight = self.param("weight", nn.initializers.normal(0.02), (self.features, x.shape[-1]))
        return project_rows(x.astype(jnp.float32), weight.astype(jnp.float32))
