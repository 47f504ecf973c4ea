"""Arithmetic of a program, counted from its jaxpr: products of matrices and convolutions.

XLA's own cost analysis counts the body of a loop once, whatever its length, and nothing of a kernel; here a scan counts
as often as it runs, and `pallas_kernels.flops` knows the kernels. Nothing is compiled and no array is made, so
full-size steps can be counted from abstract arguments. Sums, exponentials and sorting are not counted, and exchanges
between devices cost nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from pallas_kernels.flops import BF16, F32, FP4, FP8, MEGABLOX, ONE_HOT_SCOPE, PRECISIONS, KernelCall, kernel_flops

KINDS = ("matmul", "convolution")
ONE_HOT = "one_hot"  # products that only move values, see `ONE_HOT_SCOPE`

# Their body runs once, as part of the program around it. That of a shard_map runs on every device.
_CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat2": "jaxpr"}
_CALLS |= {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "shard_map": "jaxpr"}
# Arithmetic that the jaxpr does not show, or that is not counted here.
_OPAQUE = {"ffi_call", "ragged_dot_general", "pure_callback", "io_callback"}

Counts = dict[tuple[str, str], float]  # by kind and precision


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What a jaxpr does not tell; see `jaxpr_work`."""

    expert_rows: float | None = None
    while_trips: float | None = None
    counted: bool = True


def work(
    function: Callable, *args: Any, expert_rows: float | None = None, while_trips: float | None = None
) -> dict[str, float]:
    """Floating-point operations of `function(*args)` by precision; a multiplication and an addition are two.

    Args:
        function: anything `jax.make_jaxpr` traces; bind static arguments with functools.partial.
        args: arrays or jax.ShapeDtypeStruct.
        expert_rows, while_trips: see `jaxpr_work`.

    Returns, raises: see `jaxpr_work`.
    """
    return jaxpr_work(jax.make_jaxpr(function)(*args), expert_rows=expert_rows, while_trips=while_trips)


def jaxpr_work(
    jaxpr: ClosedJaxpr | Jaxpr,
    *,
    expert_rows: float | None = None,
    while_trips: float | None = None,
    spread_only: bool = False,
) -> dict[str, float]:
    """Floating-point operations of a jaxpr by precision.

    A scan counts as often as it runs, a conditional as its dearest branch, a shard_map as one device's share.

    Args:
        jaxpr: also `jax.jit(f).trace(*args).jaxpr`, which can be lowered and compiled after it.
        expert_rows: (token, slot) rows that each call of an expert kernel computes; its arrays have room for any
            routing. Needed where there is such a kernel.
        while_trips: how often the body of each while loop runs; needed where one does arithmetic. The exchange of
            tokens for experts in rounds has one for further rounds, which runs 0 times where the load is even.
        spread_only: count what stands inside a shard_map only; outside of it shapes are those of all devices together.

    Returns:
        {"fp4", "fp8", "bf16", "f32", "one_hot"}. A kernel counts by the precision that the release multiplies in, any
        other product by the wider of its operands (on a CPU, `numerics.einsum_f32` widens to float32). "one_hot" are
        products with zeros and ones that only move values.

    Raises:
        ValueError: arithmetic whose amount the jaxpr and the arguments do not tell, or an unknown kernel.
    """
    total = dict.fromkeys((*PRECISIONS, ONE_HOT), 0)
    for (kind, precision), count in _count(jaxpr, _Facts(expert_rows, while_trips, not spread_only)).items():
        total[ONE_HOT if kind == ONE_HOT else precision] += count
    return total


def flops(function: Callable, *args: Any, **kwargs: Any) -> dict[str, float]:
    """Floating-point operations of `function(*args, **kwargs)` by kind.

    Args:
        function: anything `jax.make_jaxpr` traces; bind static arguments with functools.partial.
        args, kwargs: arrays or jax.ShapeDtypeStruct.

    Returns:
        {"matmul": .., "convolution": ..}.

    Raises:
        ValueError: see `jaxpr_work`.
    """
    return jaxpr_flops(jax.make_jaxpr(function)(*args, **kwargs))


def jaxpr_flops(
    jaxpr: ClosedJaxpr | Jaxpr, *, expert_rows: float | None = None, while_trips: float | None = None
) -> dict[str, float]:
    """As `jaxpr_work`, by kind instead of precision: {"matmul": .., "convolution": ..}, one-hot products left out."""
    total = dict.fromkeys(KINDS, 0)
    for (kind, _), count in _count(jaxpr, _Facts(expert_rows, while_trips)).items():
        if kind in total:
            total[kind] += count
    return total


def _count(jaxpr: ClosedJaxpr | Jaxpr, facts: _Facts) -> Counts:
    total: Counts = {}
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        counts = _equation(equation, facts)
        if ONE_HOT_SCOPE in str(equation.source_info.name_stack).split("/"):
            counts = {(ONE_HOT, BF16): sum(counts.values())}
        total = _sum(total, counts)
    return total


def _sum(a: Counts, b: Counts) -> Counts:
    return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}


def _times(counts: Counts, factor: float) -> Counts:
    return {key: factor * count for key, count in counts.items()}


def _equation(equation: JaxprEqn, facts: _Facts) -> Counts:
    name, params = equation.primitive.name, equation.params
    if name == "shard_map":
        facts = dataclasses.replace(facts, counted=True)
    if not facts.counted and name in ("dot_general", "conv_general_dilated", "pallas_call"):
        return {}
    if name == "dot_general":
        return {("matmul", _precision(equation)): _matmul(equation)}
    if name == "conv_general_dilated":
        return {("convolution", _precision(equation)): _convolution(equation)}
    if name == "pallas_call":
        return {("matmul", precision): count for precision, count in _kernel(equation, facts).items()}
    if name in _CALLS:
        return _count(params[_CALLS[name]], facts)
    if name == "scan":
        return _times(_count(params["jaxpr"], facts), params["length"])
    if name == "cond":
        branches = [_count(branch, facts) for branch in params["branches"]]
        return max(branches, key=lambda counts: sum(counts.values()))
    if name in _OPAQUE:
        raise ValueError(f"the arithmetic of {name} cannot be counted from the jaxpr")
    if name == "while" and facts.while_trips is not None:
        condition, body = (_count(params[key], facts) for key in ("cond_jaxpr", "body_jaxpr"))
        return _sum(_times(condition, facts.while_trips + 1), _times(body, facts.while_trips))
    for body in _bodies(params):
        if any(_count(body, facts).values()):
            hint = "; use a scan, or say so with while_trips" if name == "while" else ""
            raise ValueError(f"{name} does arithmetic, and the jaxpr does not tell how often{hint}")
    return {}


def _bodies(params: dict[str, Any]) -> list[ClosedJaxpr | Jaxpr]:
    values = [item for value in params.values() for item in (value if isinstance(value, (tuple, list)) else [value])]
    return [value for value in values if isinstance(value, (ClosedJaxpr, Jaxpr))]


def _kernel(equation: JaxprEqn, facts: _Facts) -> dict[str, float]:
    def described(variables: list) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables)

    bounds = equation.params["grid_mapping"].num_dynamic_grid_bounds  # come before the arrays
    inputs, outputs = described(equation.invars[bounds:]), described(equation.outvars)
    name = equation.params["name"] or MEGABLOX  # JAX's own grouped matmuls are the only kernels here without a name
    return kernel_flops(KernelCall(name, inputs, outputs, facts.expert_rows))


def _precision(equation: JaxprEqn) -> str:
    bits = max(_bits(v.aval.dtype) for v in equation.invars[:2])
    return next((name for name, most in ((FP4, 4), (FP8, 8), (BF16, 16)) if bits <= most), F32)


def _bits(dtype: jnp.dtype) -> int:
    if dtype == jnp.bool_:
        return 8
    return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits


def _matmul(equation: JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


def _convolution(equation: JaxprEqn) -> int:
    """Every output number takes a product for each number of one output channel's kernel, padding included."""
    kernel = equation.invars[1].aval.shape
    out_channels = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // out_channels
