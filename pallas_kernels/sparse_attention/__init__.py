"""CSA2 attention over stored keys: an FP8 window and selected FP4 entries, under one softmax with a sink.

The keys stay packed in memory: what is gathered are words, and values exist on the chip only.
"""

import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from dsv41_jax.numerics import FEW_TOKENS
from pallas_kernels.implementation import KernelError, resolve
from pallas_kernels.sparse_attention import reference
from pallas_kernels.sparse_attention.keys import LANES, Entries, WindowKeys, entry_words, scale_words
from pallas_kernels.sparse_attention.reference import attend_values

__all__ = ["TEMPORARY_BYTES", "Entries", "WindowKeys", "attend", "attend_values", "entry_words", "scale_words"]

TEMPORARY_BYTES = 256 << 20  # of a step, beside its inputs, outputs and the residual streams


def _require(holds: bool, argument: str, given, allowed: str) -> None:
    if not holds:
        raise KernelError(f"sparse_attention: {argument} is {given}; it must be {allowed}")


def _described(x: Array) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _is(x: Array, dtype, *shape: int | None) -> bool:
    """Whether an array has a dtype and a shape (None: any size)."""
    if x.dtype != dtype or x.ndim != len(shape):
        return False
    return all(n is None or n == m for n, m in zip(shape, x.shape, strict=True))


def _check(q: Array, query_position: Array, window: WindowKeys, entries: Entries | None, sink: Array, width: int):
    """KernelError for what no implementation does."""
    _require(q.ndim == 4 and q.dtype == jnp.bfloat16, "q", _described(q), "bfloat16 [B, t, H, d]")
    b, t, heads, dim = q.shape
    _require(dim % quant.BLOCK == 0, "the head dim", dim, f"a multiple of {quant.BLOCK}")
    _require(width >= 1, "width", width, "at least 1")
    named = [("query_position", query_position, jnp.int32, (b, t)), ("sink", sink, jnp.float32, (heads,))]
    _require(window.codes.ndim == 4, "window.codes", _described(window.codes), "uint8 [L, B, R, d]")
    layers, _, rows, _ = window.codes.shape
    named += [
        ("window.codes", window.codes, jnp.uint8, (None, b, None, dim)),
        ("window.scales", window.scales, jnp.uint8, (layers, b, dim // quant.BLOCK, rows)),
        ("window.position", window.position, jnp.int32, (b, rows)),
    ]
    if entries is not None:
        named += [
            ("entries.words", entries.words, jnp.int32, (None, None, LANES)),
            ("entries.row", entries.row, jnp.int32, (b, t, None)),
            ("entries.lane", entries.lane, jnp.int32, entries.row.shape),
        ]
    for argument, array, dtype, shape in named:
        _require(_is(array, dtype, *shape), argument, _described(array), f"{jnp.dtype(dtype).name}{list(shape)}")
    if t > FEW_TOKENS:
        _require(rows >= t, "window rows", rows, f"at least the {t} rows of the queries' own positions")


def attend(
    q: Array,
    query_position: Array,
    window: WindowKeys,
    entries: Entries | None,
    sink: Array,
    *,
    width: int,
    implementation: str = "auto",
    temporary_bytes: int = TEMPORARY_BYTES,
) -> Array:
    """Softmax over window and selected keys together; the sink enters the denominator only.

    Args:
        q: bfloat16 [B, t, H, d].
        query_position: int32 [B, t], absolute.
        window: rows in any order where t <= 8 (a ring). A longer block gives rows in the order of positions, the last
            t of them the queries' own: query i stands at row R - t + i.
        entries: selected entries of each query, or None.
        sink: float32 [H].
        width: a window key is visible where query_position - width < position <= query_position, position >= 0.
        implementation: see `pallas_kernels.implementation`.
        temporary_bytes: budget of temporary arrays; blocks of more than 8 queries are computed in tiles inside it.

    Returns:
        bfloat16 [B, t, H, d]. Logits are scaled by d ** -0.5 in float32; probabilities are rounded to bf16 relative to
        the row maximum, the denominator is not. A query without any key yields exactly 0.

    Raises:
        KernelError: a dtype, shape, head dim or implementation that is not supported.
    """
    chosen = resolve("sparse_attention", implementation)
    _check(q, query_position, window, entries, sink, width)
    arguments = (q, query_position, window, entries, sink)
    options = {"width": width, "temporary_bytes": temporary_bytes}
    if chosen == "reference":
        return reference.attend(*arguments, **options)
    _require(64 <= q.shape[-1] <= 512, "the head dim", q.shape[-1], "from 64 to 512")
    if chosen == "gpu":
        from pallas_kernels.sparse_attention import gpu

        return gpu.attend(*arguments, **options, interpret=False)
    from pallas_kernels.sparse_attention import tpu

    return tpu.attend(*arguments, **options, interpret=chosen == "interpret")
