"""Every kernel as a program of its own, shared by all layers that use it with the same shapes.

Interpreted kernels are large programs: one for a whole model compiles for many minutes.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels import indexer, kv_write, mhc, moe, quantized_linear, sparse_attention

OPERATIONS: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (indexer, ("scores", "select", "candidate_blocks", "candidate_scores", "select_candidates")),
    (kv_write, ("main_entries", "index_entries", "window_rows")),
    (mhc, ("connect", "expand")),
    (moe, ("experts",)),
    (quantized_linear, ("linear", "grouped_linear")),
    (sparse_attention, ("attend",)),
)


@functools.cache
def _program(operation: Callable, structure: Any, fixed: tuple) -> Callable:
    def run(arrays: list) -> Any:
        leaves, given = [], iter(arrays)
        for value in fixed:
            leaves.append(next(given) if value is _ARRAY else value)
        args, options = jax.tree.unflatten(structure, leaves)
        return operation(*args, **options)

    return jax.jit(run)


_ARRAY = object()


def apart(operation: Callable) -> Callable:
    """The operation as a jitted function: arrays are its inputs, Python numbers and names are fixed."""

    @functools.wraps(operation)
    def call(*args, **options):
        leaves, structure = jax.tree.flatten((args, options))
        arrays = [x for x in leaves if isinstance(x, (jax.Array, np.ndarray))]
        fixed = tuple(_ARRAY if isinstance(x, (jax.Array, np.ndarray)) else x for x in leaves)
        return _program(operation, structure, fixed)(arrays)

    return call


@pytest.fixture(scope="module")
def operations_apart():
    """For the tests of a module, the model's kernels are programs of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for module, names in OPERATIONS:
            for name in names:
                patch.setattr(module, name, apart(getattr(module, name)))
        yield
