"""The cache writes at released sizes, for ahead-of-time compilation."""

import functools

import jax
import jax.numpy as jnp

from kernel_cases import Case
from pallas_kernels import kv_write

D, INDEX_DIM, ROPE, WINDOW_RING = 512, 128, 64, 144
PAGES = 64 * 32
# A decode step of 64 sequences, a verify block of 16, a prefill block of one.
BLOCKS = {"decode": (64, 1), "verify": (16, 6), "prefill": (1, 512)}


def _spec(*shape: int, dtype: jnp.dtype = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _rows(b: int, n: int, d: int) -> tuple:
    angle = _spec(b, n, ROPE // 2, dtype=jnp.float32)
    return _spec(b, n, d, dtype=jnp.bfloat16), _spec(d, dtype=jnp.bfloat16), angle, angle


def aot_cases() -> list[Case]:
    """Each write for each kind of block; entries of ratio 2 (64 to a page) for verify, else of ratio 1."""
    cases = []
    for name, (b, n) in BLOCKS.items():
        entries = 64 if name == "verify" else 128
        place = _spec(), _spec(b, n), _spec(b, n), _spec(b, n, dtype=jnp.bool_)
        rows = entries * 72 // 128
        main = functools.partial(
            kv_write.main_entries, page_entries=entries, page_rows=rows, eps=1e-20, implementation="tpu"
        )
        words = _spec(3, PAGES * rows, 128)
        cases.append(Case(f"kv_write main {name}", main, (*_rows(b, n, D), words, *place), 2**22, (4,)))
        index = functools.partial(kv_write.index_entries, page_entries=entries, eps=1e-20, implementation="tpu")
        pools = _spec(3, PAGES, entries * 16 // 128, 128), _spec(3, PAGES * entries // 128, 128)
        cases.append(Case(f"kv_write index {name}", index, (*_rows(b, n, INDEX_DIM), *pools, *place), 2**20, (4, 5)))
        window = functools.partial(kv_write.window_rows, eps=1e-20, implementation="tpu")
        codes = _spec(40, b, WINDOW_RING, D, dtype=jnp.uint8)
        ring = codes, _spec(40, b, D // 32, WINDOW_RING, dtype=jnp.uint8)
        row = _spec(b)
        arguments = *_rows(b, n, D), *ring, _spec(), row, row
        layer_bytes = codes.size // codes.shape[0]
        cases.append(Case(f"kv_write window {name}", window, arguments, max(layer_bytes, 2**20), (4, 5)))
    return cases
