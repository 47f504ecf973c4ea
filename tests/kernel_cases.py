"""What the tests that compile kernels ahead of time need to know of each case."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A kernel at released sizes.

    Attributes:
        fn: of the arrays that `specs` describes.
        specs: pytrees of ShapeDtypeStruct.
        forbidden_bytes: a copy of this size or more in the optimised program is a copy of a pool or of weights.
        donate: argument numbers that are updated in place.
    """

    name: str
    fn: Callable[..., Any]
    specs: tuple
    forbidden_bytes: int
    donate: tuple[int, ...] = ()
