"""Index scores on CUDA GPUs (Triton): keys are unpacked in registers and meet all heads of the queries at once.

A program scores tiles of keys for some queries of a row. Words are stored channel-major, so a tile of keys loads
contiguously, and nibble k of the words is a plane of consecutive channels: 8 matmuls add up the dots of a tile
[keys, heads]. The three roundings to bf16 follow.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import gpu_codes
from pallas_kernels.indexer.reference import LANES, PagedKeys

_PAGES = 8  # of a program: the queries are loaded once for all of them
_QUERIES = 16  # of a program
_KEYS = 128  # of a tile of candidates
_WARPS, _STAGES = 4, 2


@dataclasses.dataclass(frozen=True)
class _Form:
    """Sizes: heads and channels of a plane, as they are and as Triton pads them."""

    heads: int
    dim: int
    entries: int
    interpret: bool

    @property
    def size(self) -> int:
        return self.dim // 8

    @property
    def padded(self) -> int:
        return max(16, gpu_codes.power_of_two(self.size))

    @property
    def padded_heads(self) -> int:
        return max(16, gpu_codes.power_of_two(self.heads))

    def rounded(self, x: Array) -> Array:
        return gpu_codes.rounded(x, self.interpret)


def _load_queries(form: _Form, queries, weights, b: Array, i: Array) -> tuple[list[Array], Array]:
    """Planes bf16 [padded, heads] and weights float32 [heads] of query i of row b."""
    head, channel = jnp.arange(form.padded_heads), jnp.arange(form.padded)
    mask = (channel < form.size)[:, None] & (head < form.heads)[None, :]
    planes = [
        plt.load(queries.at[b, i, head[None, :], (k * form.size + channel)[:, None]], mask=mask, other=0.0)
        for k in range(8)
    ]
    return planes, plt.load(weights.at[b, i, head], mask=head < form.heads, other=0.0).astype(jnp.float32)


def _load_keys(form: _Form, codes, scales, slot: Array, page: Array, place: Array, there: Array) -> list[Array]:
    """8 planes bf16 [keys, padded] of the keys at (page, place) [keys]."""
    word = jnp.arange(form.padded)
    real = (word < form.size)[None, :] & there[:, None]
    at = word[None, :] * form.entries + place[:, None]
    index = (slot, page[:, None], jax.lax.div(at, LANES), jax.lax.rem(at, LANES))
    packed = plt.load(codes.at[index], mask=real, other=0)
    together = LANES // form.entries  # pages whose scales share a row
    lane = jax.lax.rem(page, together) * form.entries + place
    scale = plt.load(scales.at[slot, jax.lax.div(page, together), lane], mask=there, other=0x7F7F7F7F)
    planes = []
    for k in range(8):
        first, last = k * form.size // 32, ((k + 1) * form.size - 1) // 32
        group = first if first == last else jax.lax.div(k * form.size + word, 32)[None, :]
        power = gpu_codes.e8m0(jax.lax.shift_right_logical(scale[:, None], jnp.int32(8) * group) & 0xFF)
        planes.append((gpu_codes.e2m1(packed, k) * (power * gpu_codes.E2M1_UNIT)).astype(jnp.bfloat16))
    return planes


def _tile_scores(form: _Form, queries: list[Array], weights: Array, keys: list[Array]) -> Array:
    """float32 [keys], rounded to bf16."""
    dots = jnp.zeros((keys[0].shape[0], form.padded_heads), jnp.float32)
    for plane, query in zip(keys, queries, strict=True):
        dots += plt.dot(plane, query)
    weighted = form.rounded(jnp.maximum(form.rounded(dots), 0.0) * weights[None, :])
    return form.rounded(jnp.sum(weighted, axis=1))


def _scores_kernel(form: _Form, t: int, pages: int, which, queries, weights, codes, scales, table, visible, out):
    b, place = pl.program_id(1), jnp.arange(form.entries)
    slot, first = which[0], pl.program_id(0) * _PAGES
    begin = pl.program_id(2) * _QUERIES
    end = jnp.minimum(begin + _QUERIES, t)
    single = _load_queries(form, queries, weights, b, begin) if t == 1 else None

    def page_step(number: Array, _) -> None:
        page = plt.load(table.at[b, number])
        entry = number * form.entries + place
        keys = _load_keys(form, codes, scales, slot, jnp.broadcast_to(page, place.shape), place, place >= 0)

        def query_step(i: Array, _) -> None:
            mine = single or _load_queries(form, queries, weights, b, i)
            result = _tile_scores(form, *mine, keys)
            plt.store(out.at[b, i, entry], jnp.where(entry < plt.load(visible.at[b, i]), result, -jnp.inf))

        jax.lax.fori_loop(begin, end, query_step, None)

    def hidden_step(number: Array, _) -> None:
        def query_step(i: Array, _) -> None:
            plt.store(out.at[b, i, number * form.entries + place], jnp.full(place.shape, -jnp.inf))

        jax.lax.fori_loop(begin, end, query_step, None)

    query = begin + jnp.arange(_QUERIES)
    most = jnp.max(plt.load(visible.at[b, query], mask=query < t, other=0))
    last = jnp.minimum(first + _PAGES, pages)
    shown = jnp.clip(jax.lax.div(most + form.entries - 1, form.entries), first, last)
    jax.lax.fori_loop(first, shown, page_step, None)
    jax.lax.fori_loop(shown, last, hidden_step, None)


def _candidates_kernel(form: _Form, block: int, which, queries, weights, codes, scales, table, visible, pool, out):
    b, i = pl.program_id(2), pl.program_id(1)
    place = pl.program_id(0) * _KEYS + jnp.arange(_KEYS)
    inside = place < out.shape[2]
    number = plt.load(pool.at[b, i, jax.lax.div(place, block)], mask=inside, other=-1)
    entry = number * block + jax.lax.rem(place, block)
    there = (number >= 0) & (entry < plt.load(visible.at[b, i])) & (entry < table.shape[1] * form.entries)
    safe = jnp.where(there, entry, 0)
    page = plt.load(table.at[b, jax.lax.div(safe, form.entries)])
    keys = _load_keys(form, codes, scales, which[0], page, jax.lax.rem(safe, form.entries), there)
    result = _tile_scores(form, *_load_queries(form, queries, weights, b, i), keys)
    plt.store(out.at[b, i, place], jnp.where(there, result, -jnp.inf), mask=inside)


def _arguments(queries: Array, weights: Array, keys: PagedKeys, visible: Array) -> list[Array]:
    slot = jnp.asarray(keys.slot, jnp.int32).reshape(1)
    return [slot, queries, weights, keys.codes, keys.scales, keys.page_table, visible.astype(jnp.int32)]


def _params() -> plt.CompilerParams:
    return plt.CompilerParams(num_warps=_WARPS, num_stages=_STAGES)


def scores(queries: Array, weights: Array, keys: PagedKeys, visible: Array, *, interpret: bool = False) -> Array:
    """See `pallas_kernels.indexer.scores`."""
    b, t, heads, dim = queries.shape
    pages = keys.page_table.shape[1]
    form = _Form(heads, dim, keys.entries, interpret)
    return pl.pallas_call(
        functools.partial(_scores_kernel, form, t, pages),
        grid=(pl.cdiv(pages, _PAGES), b, pl.cdiv(t, _QUERIES)),
        out_shape=jax.ShapeDtypeStruct((b, t, pages * keys.entries), jnp.float32),
        compiler_params=_params(),
        interpret=interpret,
        name="index_scores",
    )(*_arguments(queries, weights, keys, visible))


def candidate_scores(
    queries: Array,
    weights: Array,
    keys: PagedKeys,
    pool: Array,
    visible: Array,
    *,
    block: int,
    interpret: bool = False,
) -> Array:
    """See `pallas_kernels.indexer.candidate_scores`."""
    b, t, heads, dim = queries.shape
    form, size = _Form(heads, dim, keys.entries, interpret), pool.shape[2] * block
    return pl.pallas_call(
        functools.partial(_candidates_kernel, form, block),
        grid=(pl.cdiv(size, _KEYS), t, b),
        out_shape=jax.ShapeDtypeStruct((b, t, size), jnp.float32),
        compiler_params=_params(),
        interpret=interpret,
        name="candidate_scores",
    )(*_arguments(queries, weights, keys, visible), pool)
