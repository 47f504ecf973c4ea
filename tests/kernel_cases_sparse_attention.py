"""Sparse attention at released sizes, for ahead-of-time compilation."""

import jax
import jax.numpy as jnp
from jax import Array

from kernel_cases import Case
from pallas_kernels.sparse_attention import Entries, WindowKeys, attend

HEADS, DIM, TOPK, WIDTH, RING = 64, 512, 512, 128, 144
LAYERS = 40 + 3  # with the draft blocks
SOURCES, ROWS = 3, 72 * 4096  # 453 MB of entries
# A decode step of 64 sequences, a verify block of 16, a prefill block of one: sequences, queries, layers, window rows.
BLOCKS = {"decode": (64, 1, LAYERS, RING), "verify": (16, 6, LAYERS, RING), "prefill": (1, 512, 1, WIDTH - 1 + 512)}


def _attention(padded: bool):
    def attention(
        q: Array, at: Array, window: WindowKeys, words: Array, slot: Array, row: Array, lane: Array, sink: Array
    ) -> Array:
        entries = Entries(words, slot, row, lane, padded)
        return attend(q, at, window, entries, sink, width=WIDTH, implementation="tpu")

    return attention


def aot_cases() -> list[Case]:
    """Each kind of block, with entries one after the other and with entries in rows of their own."""

    def spec(*shape: int, dtype: jnp.dtype = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    cases = []
    for name, (b, t, layers, rows) in BLOCKS.items():
        ring = spec(layers, b, rows, DIM, dtype=jnp.uint8), spec(layers, b, DIM // 32, rows, dtype=jnp.uint8)
        place = spec(b, t, TOPK)
        specs = (
            spec(b, t, HEADS, DIM, dtype=jnp.bfloat16),
            spec(b, t),
            WindowKeys(*ring, spec(), spec(b, rows)),
            *(spec(SOURCES, ROWS, 128), spec(), place, place),
            spec(HEADS, dtype=jnp.float32),
        )
        # The ring, where it is one, or one source of the pool: whatever is gathered for the queries is smaller.
        forbidden = min(ROWS * 512, ring[0].size) if layers > 1 else ROWS * 512
        for padded in (False, True):
            kind = "padded " if padded else ""
            handed = 160 << 20  # gathered words
            cases.append(
                Case(f"sparse_attention {kind}{name}", _attention(padded), specs, forbidden, temporary_bytes=handed)
            )
    return cases
