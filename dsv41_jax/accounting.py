"""What a program costs, counted from its jaxpr: the arithmetic of matrix products and convolutions.

XLA's own cost analysis counts the body of a loop once, whatever its length; here a scan counts as often as it runs.
Nothing is compiled and no array is made, so full-size steps can be counted from abstract arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

KINDS = ("matmul", "convolution")

# Their body runs once, as part of the program around it.
_CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat2": "jaxpr"}
_CALLS |= {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
# Arithmetic that the jaxpr does not show, or that is not counted here.
_OPAQUE = {"ffi_call", "pallas_call", "ragged_dot_general", "pure_callback", "io_callback"}


def flops(function: Callable, *args: Any, **kwargs: Any) -> dict[str, int]:
    """Floating-point operations of `function(*args, **kwargs)`; a multiplication and an addition are two.

    Args:
        function: anything `jax.make_jaxpr` traces; bind static arguments with functools.partial.
        args, kwargs: arrays or jax.ShapeDtypeStruct.

    Returns:
        {"matmul": .., "convolution": ..}. Everything else (sums, exponentials, sorting) is not counted.

    Raises:
        ValueError: see `jaxpr_flops`.
    """
    return jaxpr_flops(jax.make_jaxpr(function)(*args, **kwargs))


def jaxpr_flops(jaxpr: ClosedJaxpr | Jaxpr) -> dict[str, int]:
    """As `flops`, of a jaxpr. A scan counts as often as it runs, a conditional as its dearest branch.

    Raises:
        ValueError: arithmetic whose amount the jaxpr does not tell: in a while loop, a kernel or a foreign call.
    """
    total = dict.fromkeys(KINDS, 0)
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for kind, count in _equation(equation).items():
            total[kind] += count
    return total


def _equation(equation: JaxprEqn) -> dict[str, int]:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return {"matmul": _matmul(equation)}
    if name == "conv_general_dilated":
        return {"convolution": _convolution(equation)}
    if name in _CALLS:
        return jaxpr_flops(params[_CALLS[name]])
    if name == "scan":
        return {kind: params["length"] * count for kind, count in jaxpr_flops(params["jaxpr"]).items()}
    if name == "cond":
        return max(map(jaxpr_flops, params["branches"]), key=lambda counts: sum(counts.values()))
    if name in _OPAQUE:
        raise ValueError(f"the arithmetic of {name} cannot be counted from the jaxpr")
    for body in _bodies(params):
        if any(jaxpr_flops(body).values()):
            raise ValueError(f"{name} does arithmetic, and the jaxpr does not tell how often: use a scan")
    return {}


def _bodies(params: dict[str, Any]) -> list[ClosedJaxpr | Jaxpr]:
    values = [item for value in params.values() for item in (value if isinstance(value, (tuple, list)) else [value])]
    return [value for value in values if isinstance(value, (ClosedJaxpr, Jaxpr))]


def _matmul(equation: JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


def _convolution(equation: JaxprEqn) -> int:
    """Every output number takes a product for each number of one output channel's kernel, padding included."""
    kernel = equation.invars[1].aval.shape
    out_channels = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // out_channels
