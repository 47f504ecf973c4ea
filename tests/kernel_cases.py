"""What the tests that compile kernels ahead of time need to know of each case, and how they judge the program."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

_MOVES = ("copy", "copy-start", "transpose", "dynamic-slice", "slice", "pad", "concatenate", "convert", "reshape")
_RESULT = re.compile(rf"= \(?(\w+)\[([\d,]*)\][^ ]* (?:[^=]*?)\b({'|'.join(_MOVES)})\(")
_BITS = {"pred": 8, "bf16": 16}


@dataclass(frozen=True)
class Case:
    """A kernel at released sizes.

    Attributes:
        fn: of the arrays that `specs` describes.
        specs: pytrees of ShapeDtypeStruct.
        forbidden_bytes: a copy of this size or more in the optimised program is a copy of a pool or of weights.
        donate: argument numbers that are updated in place.
        temporary_bytes: of what the kernels hand on; by default less than `forbidden_bytes`.
    """

    name: str
    fn: Callable[..., Any]
    specs: tuple
    forbidden_bytes: int
    donate: tuple[int, ...] = ()
    temporary_bytes: int | None = None


def moved(hlo: str) -> list[tuple[str, int]]:
    """Operation and result bytes of every instruction of an optimised program that only moves data."""
    found = []
    for dtype, shape, operation in _RESULT.findall(hlo):
        bits = _BITS.get(dtype) or int(re.search(r"\d+", dtype).group())
        found.append((operation, math.prod(map(int, filter(None, shape.split(",")))) * bits // 8))
    return found


def check_program(compiled: jax.stages.Compiled, case: Case) -> None:
    """No copy of a pool or of weights: nothing that large is moved, is temporary, or is updated but not in place."""
    memory = compiled.memory_analysis()
    limit = case.temporary_bytes or case.forbidden_bytes
    assert memory.temp_size_in_bytes < limit, f"{memory.temp_size_in_bytes / 2**20:.1f} MiB of temporaries"
    if case.donate:
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes < case.forbidden_bytes
    large = [(operation, size) for operation, size in moved(compiled.as_text()) if size >= case.forbidden_bytes]
    assert not large, large


def spec(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An array's description."""
    return jax.ShapeDtypeStruct(shape, dtype)
