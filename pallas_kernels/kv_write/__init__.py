"""What the caches keep of a block of tokens: norm, rotation, quantisation, packing, and the write in place.

    main_entries    main KV of a KV source: FP4 codes and E4M3 scales, entries of a page back to back
    index_entries   index keys of a KV source: FP4 codes channel-major in the page's tile, UE8M0 scales
    window_rows     window KV of a layer: FP8 codes and UE8M0 scales in a ring of positions

The formats are those of `dsv41_jax.pages` and `dsv41_jax.rings`, the quantisers those of `dsv41_jax.quant`, and codes
and scales have their bits. For numerics `released` only. The pool or ring should be donated: it is updated in place.
"""

import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from pallas_kernels.implementation import KernelError, resolve
from pallas_kernels.kv_write import reference

LANES = 128


def main_entries(
    raw: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    words: Array,
    slot: Array | int,
    page: Array,
    place: Array,
    keep: Array,
    *,
    page_entries: int,
    page_rows: int,
    eps: float,
    implementation: str = "auto",
) -> tuple[Array, Array]:
    """Norm, rotate, quantise (`q4_main`) and store n consecutive entries of each row in one source's pages.

    Args:
        raw: bf16 [B, n, d], before the norm. norm: [d]. cos, sin: float32 [B, n, rope/2].
        words: the pool, int32 [S, P * page_rows, 128].
        slot: int32 scalar, the source.
        page, place: int32 [B, n], where each entry goes. Places ascend inside a page, and two rows share no page.
        keep: bool [B, n]; the others write nothing (their page and place are not read).
        page_entries, page_rows: entries of a page, and rows of 128 words that it takes.
        eps: of the norm.
        implementation: see `pallas_kernels.implementation`.

    Returns:
        The pool, and the latents bf16 [B, n, d]: normed, not rotated.

    Raises:
        KernelError: an argument that the operation does not take.
    """
    how = resolve("kv_write.main_entries", implementation)
    _check_rows("main_entries", raw, norm, cos, sin, how)
    _check_pool("main_entries", "words", words, jnp.int32, 3)
    _check_places("main_entries", raw, page, place, keep)
    need = -(-page_entries * reference.main_words(raw.shape[-1]) // LANES)
    if page_rows != need:
        raise KernelError(
            f"kv_write.main_entries: page_rows={page_rows}, but {page_entries} entries of {raw.shape[-1]} channels "
            f"take {need} rows of {LANES} words"
        )
    options = {"page_rows": page_rows, "eps": eps}
    arguments = raw, norm, cos, sin, words, slot, page, place, keep
    if how == "reference":
        return reference.main_entries(*arguments, **options)
    if how == "gpu":
        from pallas_kernels.kv_write import gpu

        return gpu.main_entries(*arguments, **options)
    from pallas_kernels.kv_write import tpu

    return tpu.main_entries(*arguments, **options, interpret=how == "interpret")


def index_entries(
    raw: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    codes: Array,
    scales: Array,
    slot: Array | int,
    page: Array,
    place: Array,
    keep: Array,
    *,
    page_entries: int,
    eps: float,
    implementation: str = "auto",
) -> tuple[Array, Array]:
    """Norm, rotate, quantise (`q4_index`) and store n consecutive index keys of each row in one source's pages.

    Args:
        raw: bf16 [B, n, di], before the norm; di at most 128, so that the scales of a key fill one word. norm: [di].
        codes: int32 [S, P, rows, 128], channel-major: word w of all keys of the page, then word w + 1.
        scales: int32 [S, scale rows, 128]: the scale words of a page's keys, then those of the next page.
        Others: as in `main_entries`. A kernel takes page_entries that divide 128.

    Returns:
        codes and scales.

    Raises:
        KernelError: an argument that the operation does not take.
    """
    how = resolve("kv_write.index_entries", implementation)
    _check_rows("index_entries", raw, norm, cos, sin, how)
    _check_pool("index_entries", "codes", codes, jnp.int32, 4)
    _check_pool("index_entries", "scales", scales, jnp.int32, 3)
    _check_places("index_entries", raw, page, place, keep)
    dim = raw.shape[-1]
    if dim > 128 and how != "reference":
        raise KernelError(f"kv_write.index_entries: index dim {dim}; the kernels take up to 128")
    if LANES % page_entries and how != "reference":
        raise KernelError(f"kv_write.index_entries: page_entries={page_entries}; the kernels take divisors of {LANES}")
    need = -(-page_entries * (dim // 8) // LANES)
    if codes.shape[-2] != need:
        raise KernelError(
            f"kv_write.index_entries: codes {codes.shape}, but {page_entries} keys of {dim} channels take {need} rows"
        )
    options = {"page_entries": page_entries, "eps": eps}
    arguments = raw, norm, cos, sin, codes, scales, slot, page, place, keep
    if how == "reference":
        return reference.index_entries(*arguments, **options)
    if how == "gpu":
        from pallas_kernels.kv_write import gpu

        return gpu.index_entries(*arguments, **options)
    from pallas_kernels.kv_write import tpu

    return tpu.index_entries(*arguments, **options, interpret=how == "interpret")


def window_rows(
    raw: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    codes: Array,
    scales: Array,
    layer: Array | int,
    start: Array,
    n_valid: Array,
    *,
    eps: float,
    implementation: str = "auto",
) -> tuple[Array, Array, Array, Array]:
    """Norm, rotate, quantise (`q8`) window rows of a block, and write the last valid ones into the ring of a layer.

    Args:
        raw: bf16 [B, t, d], before the norm. norm: [d]. cos, sin: float32 [B, t, rope/2].
        codes: uint8 [L, B, R, d], E4M3 bits. scales: uint8 [L, B, d/32, R], UE8M0. Position p stands in slot p mod R.
        layer: int32 scalar.
        start, n_valid: int32 [B]; row i belongs to position start + i, and rows from n_valid on write nothing.
        eps: of the norm.
        implementation: see `pallas_kernels.implementation`.

    Returns:
        codes and scales of the ring, and the block's own rows: codes uint8 [B, t, d], scales uint8 [B, d/32, t].

    Raises:
        KernelError: an argument that the operation does not take.
    """
    how = resolve("kv_write.window_rows", implementation)
    _check_rows("window_rows", raw, norm, cos, sin, how)
    _check_pool("window_rows", "codes", codes, jnp.uint8, 4)
    _check_pool("window_rows", "scales", scales, jnp.uint8, 4)
    b, _, d = raw.shape
    layers, _, size, _ = codes.shape
    if codes.shape != (layers, b, size, d) or scales.shape != (layers, b, d // quant.BLOCK, size):
        raise KernelError(
            f"kv_write.window_rows: a ring of codes {codes.shape} and scales {scales.shape} does not keep rows of "
            f"{raw.shape}; it is [L, {b}, R, {d}] and [L, {b}, {d // quant.BLOCK}, R]"
        )
    arguments = raw, norm, cos, sin, codes, scales, layer, start, n_valid
    if how == "reference":
        return reference.window_rows(*arguments, eps=eps)
    if how == "gpu":
        from pallas_kernels.kv_write import gpu

        return gpu.window_rows(*arguments, eps=eps)
    from pallas_kernels.kv_write import tpu

    return tpu.window_rows(*arguments, eps=eps, interpret=how == "interpret")


def _check_rows(op: str, raw: Array, norm: Array, cos: Array, sin: Array, how: str) -> None:
    if raw.ndim != 3 or raw.dtype != jnp.bfloat16:
        raise KernelError(f"kv_write.{op}: raw is {raw.dtype} {raw.shape}, not bfloat16 [B, n, d]")
    b, n, d = raw.shape
    if d % quant.BLOCK or (how != "reference" and d > 512):
        raise KernelError(f"kv_write.{op}: {d} channels; a multiple of {quant.BLOCK} up to 512 is allowed")
    if norm.shape != (d,):
        raise KernelError(f"kv_write.{op}: norm {norm.shape} does not belong to {d} channels")
    if cos.shape != sin.shape or cos.shape[:-1] != (b, n) or not 0 < 2 * cos.shape[-1] <= d:
        raise KernelError(f"kv_write.{op}: cos {cos.shape} and sin {sin.shape} do not rotate rows of {raw.shape}")


def _check_pool(op: str, name: str, pool: Array, dtype: jnp.dtype, ndim: int) -> None:
    if pool.ndim != ndim or pool.dtype != dtype or (dtype == jnp.int32 and pool.shape[-1] != LANES):
        raise KernelError(f"kv_write.{op}: {name} is {pool.dtype} {pool.shape}; see the docstring for its layout")


def _check_places(op: str, raw: Array, page: Array, place: Array, keep: Array) -> None:
    for name, given in (("page", page), ("place", place), ("keep", keep)):
        if given.shape != raw.shape[:2]:
            raise KernelError(f"kv_write.{op}: {name} {given.shape} does not name the entries of {raw.shape[:2]}")
