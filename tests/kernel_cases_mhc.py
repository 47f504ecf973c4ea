"""Hyper-connections at released sizes, for ahead-of-time compilation."""

import functools

import jax
import jax.numpy as jnp

from kernel_cases import Case
from pallas_kernels import mhc

LAYERS, C, D = 40, 4, 5120
ROWS = (2 + C) * C
FN_BYTES = ROWS * C * D * 4  # of one layer


def _spec(*shape: int, dtype: jnp.dtype = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _connect(x, u, post, comb, *rest):
    update = None if u is None else (u, post, comb)
    return mhc.connect(x, update, *rest, iterations=20, hc_eps=1e-6, norm_eps=1e-20, implementation="tpu")


def aot_cases() -> list[Case]:
    """A decode step of 64 sequences and a prefill block of 512 tokens; the first connection; the last update.

    Streams of one call alone are copied to and from the order that the kernel reads; where few tokens are smaller than
    a layer's weights, no copy may be as large as those.
    """
    stacked = (
        _spec(LAYERS, ROWS, C * D),
        _spec(LAYERS, ROWS),
        _spec(LAYERS, 3),
        _spec(LAYERS, D, dtype=jnp.bfloat16),
        _spec(dtype=jnp.int32),
    )

    def tokens(n: int) -> tuple:
        """x, u, post, comb."""
        return _spec(n, C, D, dtype=jnp.bfloat16), _spec(n, D, dtype=jnp.bfloat16), _spec(n, C), _spec(n, C, C)

    def first(x, *rest):
        return _connect(x, None, None, None, *rest)

    expand = functools.partial(mhc.expand, implementation="tpu")
    stack_bytes = LAYERS * FN_BYTES
    return [
        Case("mhc connect decode", _connect, (*tokens(64), _spec(64, C), *stacked), stack_bytes),
        Case("mhc connect prefill", _connect, (*tokens(512), _spec(512, C), *stacked), stack_bytes),
        Case("mhc connect verify", _connect, (*tokens(16), _spec(16, C), *stacked), FN_BYTES),
        Case("mhc connect first", first, (tokens(16)[0], _spec(16, C), *stacked), FN_BYTES),
        Case("mhc expand", expand, tokens(64), stack_bytes),
    ]
