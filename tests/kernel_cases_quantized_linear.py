"""Dense FP8 maps at released sizes, for ahead-of-time compilation: every map of a layer, for a decode step of 64
sequences and a prefill block of 512 tokens."""

import functools

import jax
import jax.numpy as jnp

from kernel_cases import Case
from pallas_kernels import quantized_linear

LAYERS = 40
MAPS = {  # rows and columns of the weight, groups
    "wq_a": (1280, 5120, 1),
    "wq_b": (32768, 1280, 1),
    "wkv": (512, 5120, 1),
    "wo_a": (8192, 4096, 8),
    "wo_b": (5120, 8192, 1),
    "shared_w1": (2304, 5120, 1),
    "shared_w2": (5120, 2304, 1),
}


def _spec(*shape: int, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def project(groups: int, implementation: str, x, weight, scale, layer):
    leaf = {"weight": weight, "scale": scale}
    if groups == 1:
        return quantized_linear.linear(x, leaf, layer, implementation=implementation)
    return quantized_linear.grouped_linear(x, leaf, layer, groups=groups, implementation=implementation)


def case(name: str, rows: int, implementation: str = "tpu") -> Case:
    """A map with `rows` rows of input; a temporary of half its weights is one too many."""
    n, k, groups = MAPS[name]
    specs = (
        _spec(rows, groups * k, dtype=jnp.bfloat16),
        _spec(LAYERS, n, k, dtype=jnp.float8_e4m3fn),
        _spec(LAYERS, n // 32, k // 32, dtype=jnp.float8_e8m0fnu),
        _spec(dtype=jnp.int32),
    )
    fn = functools.partial(project, groups, implementation)
    return Case(f"quantized_linear {name} {rows}", fn, specs, n * k // 2)


def aot_cases() -> list[Case]:
    return [case(name, rows) for rows in (64, 512) for name in MAPS]
