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
    """A decode step of 64 sequences and a prefill block of 512 tokens; the first connection; the last update."""
    bf16 = jnp.bfloat16
    stacked = _spec(LAYERS, ROWS, C * D), _spec(LAYERS, ROWS), _spec(LAYERS, 3), _spec(LAYERS, D, dtype=bf16)
    cases = []
    for name, n in (("decode", 64), ("prefill", 512)):
        x, update = _spec(n, C, D, dtype=bf16), (_spec(n, D, dtype=bf16), _spec(n, C), _spec(n, C, C))
        rest = _spec(n, C), *stacked, _spec(dtype=jnp.int32)
        cases.append(Case(f"mhc connect {name}", _connect, (x, *update, *rest), LAYERS * FN_BYTES // 2))
    cases.append(
        Case(
            "mhc connect first",
            lambda x, *rest: _connect(x, None, None, None, *rest),
            (x, *rest),
            LAYERS * FN_BYTES // 2,
        )
    )
    expand = functools.partial(mhc.expand, implementation="tpu")
    cases.append(Case("mhc expand", expand, (x, *update), LAYERS * FN_BYTES // 2))
    return cases
