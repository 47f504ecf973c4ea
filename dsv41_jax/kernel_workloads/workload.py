"""One thing to check and to time, and how far two results of it lie apart."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How a result differs from the reference's.

    Attributes:
        error: largest absolute difference of floats. worst: largest difference in units of the tolerance at its place.
        flips: integers (codes, packed words, numbers of entries) that differ. within: whether all that is allowed.
    """

    error: float
    worst: float
    flips: int
    within: bool

    def __str__(self) -> str:
        if not self.error and not self.flips:
            return "equal"
        return f"{self.error:.2g}" + (f", {self.flips} flips" if self.flips else "")


@dataclasses.dataclass(frozen=True)
class Workload:
    """An operation on inputs of certain sizes.

    Attributes:
        name: unique; says what and how large. op: the package of the operation.
        make: random key -> arguments, a pytree of arrays; can be jitted.
        call: (arguments, implementation) -> result; jit it with the implementation static.
        bytes, flops: the least that the operation moves to and from memory, and computes, in a call.
        tolerance: of floats, relative and absolute; (0, 0): they must be equal.
        flips: integers that may differ, where a float32 sum in another order can decide a rounding.
        part: arguments -> those of the first rows, where the reference needs too much memory for all; its result is
            compared with the first rows of each array of the result.
        updates: names of arguments that a call updates in place, and the number of the result that each becomes.
        large: takes gigabytes.
        unit, units: what a call's cost is divided by, and how many of them a call has.
    """

    name: str
    op: str
    make: Callable[[Array], Any]
    call: Callable[[Any, str], Any]
    bytes: int
    flops: int
    tolerance: tuple[float, float] = (0.0, 0.0)
    flips: int = 0
    part: Callable[[Any], Any] | None = None
    updates: dict[str, int] = dataclasses.field(default_factory=dict)
    large: bool = False
    unit: str = "call"
    units: int = 1

    def split(self, arguments: Any) -> tuple[dict[str, Any], Any]:
        """Arguments that a call updates, to be donated, and the others."""
        old = {name: arguments[name] for name in self.updates}
        return old, {name: x for name, x in arguments.items() if name not in old} if old else arguments

    def call_split(self, implementation: str, old: dict[str, Any], rest: Any) -> Any:
        """`call` with what `split` gives."""
        return self.call({**rest, **old} if old else rest, implementation)

    def jitted(self, implementation: str) -> Callable[[Any], Any]:
        """`call`, compiled; what it updates is donated."""
        inner = jax.jit(functools.partial(self.call_split, implementation), donate_argnums=0)
        return lambda arguments: inner(*self.split(arguments))

    def again(self, arguments: Any, result: Any) -> Any:
        """Arguments of the next call."""
        return {**arguments, **{name: result[i] for name, i in self.updates.items()}} if self.updates else arguments

    def compare(self, got: Any, want: Any) -> Comparison:
        """A result against the reference's of the same arguments, or of `part` of them."""
        error, worst, flips = 0.0, 0.0, 0
        for mine, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            mine = mine[: right.shape[0]]
            if mine.shape != right.shape:
                raise ValueError(f"{self.name}: the result is {mine.shape}, the reference's {right.shape}")
            if jnp.issubdtype(right.dtype, jnp.integer):
                flips += int(_unequal(mine, right))
            else:
                far, apart = _apart(mine, right, *self.tolerance)
                error, worst = max(error, float(far)), max(worst, float(apart))
        return Comparison(error, worst, flips, worst <= 1.0 and flips <= self.flips)


@jax.jit
def _unequal(got: Array, want: Array) -> Array:
    return jnp.sum(got != want, dtype=jnp.int32)


@jax.jit
def _apart(got: Array, want: Array, relative: float, absolute: float) -> tuple[Array, Array]:
    """Largest difference, and the largest in units of what is allowed at its place; inf for NaN or one-sided inf."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    difference = jnp.where(got == want, 0.0, jnp.abs(got - want))
    difference = jnp.where(jnp.isfinite(difference), difference, jnp.inf)
    allowed = jnp.maximum(relative * jnp.abs(want) + absolute, 1e-30)
    apart = jnp.where(difference > 0, difference / allowed, 0.0)
    return jnp.max(difference), jnp.max(jnp.where(jnp.isnan(apart), jnp.inf, apart))
