"""Routed experts and dense FP8 maps."""

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.kernel_workloads.sizes import Sizes
from dsv41_jax.kernel_workloads.workload import Workload
from pallas_kernels import moe, quantized_linear

# Float32 sums in another order, then one rounding to 8 bits, of outputs with a deviation of about 1. Experts also round
# in between and quantise: a value at a tie of E4M3 rounding moves by 1/16 of itself, one of some thousand terms.
_LINEAR = (2.0**-7, 2.0**-8)
_EXPERTS = (2.0**-6, 2.0**-5)


def _scales(key: Array, shape: tuple[int, ...], center: int) -> Array:
    """UE8M0 scales 2^(center - 1) .. 2^(center + 1)."""
    bits = jax.random.randint(key, shape, center + 126, center + 129).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(bits, jnp.float8_e8m0fnu)


def _fp8(key: Array, layers: int, n: int, k: int) -> dict[str, Array]:
    """A dense leaf of weights with a deviation of about k^-1/2."""
    keys = jax.random.split(key)
    center = -round((k.bit_length() - 1) / 2)
    weight = jax.random.normal(keys[0], (layers, n, k), jnp.bfloat16).astype(jnp.float8_e4m3fn)
    return {"weight": weight, "scale": _scales(keys[1], (layers, n // 32, k // 32), center)}


def _fp4(key: Array, experts: int, n: int, k: int) -> dict[str, Array]:
    """A packed leaf of one layer's experts, weights with a deviation of about k^-1/2."""
    keys = jax.random.split(key)
    center = -round((k.bit_length() - 1) / 2) - 1  # codes have a deviation of about 3
    weight = jax.random.bits(keys[0], (1, experts, n, k // 2), jnp.uint8)
    return moe.pack({"weight": weight, "scale": _scales(keys[1], (1, experts, n, k // 32), center)})


def expert_workloads(sizes: Sizes) -> list[Workload]:
    """Routed experts of a decode step, of a large one, and of a prefill block. See `kernel_workloads.workloads`."""
    return [_experts(sizes, n) for n in (sizes.batch, sizes.many)]


def _experts(sizes: Sizes, n: int) -> Workload:
    d, hidden, experts, k = sizes.hidden, sizes.expert_hidden, sizes.experts, sizes.experts_per_token

    def make(key: Array):
        keys = jax.random.split(key, 6)
        order = jax.lax.top_k(jax.random.uniform(keys[1], (n, experts)), k)[1]
        return {
            "x": jax.random.normal(keys[0], (n, d), jnp.bfloat16),
            "chosen": jnp.sort(order, axis=-1).astype(jnp.int32),
            "weights": jax.random.uniform(keys[2], (n, k), minval=0.1, maxval=0.4),
            "w1": _fp4(keys[3], experts, hidden, d),
            "w3": _fp4(keys[4], experts, hidden, d),
            "w2": _fp4(keys[5], experts, d, hidden),
        }

    def call(a, implementation: str) -> Array:
        names = ("x", "chosen", "weights", "w1", "w3", "w2")
        return moe.experts(*(a[name] for name in names), jnp.int32(0), limit=10.0, implementation=implementation)

    touched = experts * (1 - (1 - k / experts) ** n)  # expected
    weights = 3 * d * hidden
    return Workload(
        f"experts n={n} k={k}",
        "moe",
        make,
        call,
        bytes=round(touched * weights * (4 + 8 / 32) / 8) + n * d * 2 * (1 + k),
        flops=2 * n * k * weights,
        tolerance=_EXPERTS,
        large=True,
        unit="weight",
        units=min(experts, n * k) * weights,  # as many experts as there can be: the schedule counts tiles for all
    )


def linear_workloads(sizes: Sizes) -> list[Workload]:
    """The maps of an attention layer. See `kernel_workloads.workloads`."""
    width = sizes.heads * sizes.head_dim
    joined = sizes.output_groups * sizes.output_rank
    shapes = {
        "wq_b": (width, sizes.query_rank, 1),
        "wkv": (sizes.head_dim, sizes.hidden, 1),
        "wo_a": (joined, width // sizes.output_groups, sizes.output_groups),
        "wo_b": (sizes.hidden, joined, 1),
    }
    rows = (sizes.batch, sizes.many)
    return [_linear(name, *shape, n, sizes.layers) for n in rows for name, shape in shapes.items()]


def _linear(name: str, out: int, k: int, groups: int, n: int, layers: int) -> Workload:
    layers = min(layers, 4)

    def make(key: Array):
        keys = jax.random.split(key)
        return jax.random.normal(keys[0], (n, groups * k), jnp.bfloat16), _fp8(keys[1], layers, out, k)

    def call(a, implementation: str) -> Array:
        layer = jnp.int32(layers - 1)
        if groups == 1:
            return quantized_linear.linear(*a, layer, implementation=implementation)
        return quantized_linear.grouped_linear(*a, layer, groups=groups, implementation=implementation)

    return Workload(
        f"{name} n={n} [{out}, {groups * k}]",
        "quantized_linear",
        make,
        call,
        bytes=out * k * (1024 + 1) // 1024 + 2 * n * (groups * k + out),
        flops=2 * n * out * k,
        tolerance=_LINEAR,
        unit="weight",
        units=out * k,
    )
