"""Hyper-connections on CUDA GPUs (Triton), in two kernels.

    spread   a tile of tokens and of D: updated streams, what the sublayer reads, and partial sums of the projection
    finish   adds the partial sums in order: the norm, and with it the sublayer's input; coefficients

The projection is exact to float32: streams are bf16 numbers, and a float32 weight is the sum of three.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import gpu_codes
from pallas_kernels.mhc import reference

Update = tuple[Array, Array, Array]

_TOKENS = 16  # of a program: a matmul's least
_WIDTH = 128  # of D
_WARPS, _STAGES = 4, 2


@dataclasses.dataclass(frozen=True)
class _Form:
    """Sizes and constants."""

    n: int
    c: int
    d: int
    iterations: int
    hc_eps: float
    norm_eps: float
    interpret: bool

    @property
    def rows(self) -> int:
        return (2 + self.c) * self.c

    @property
    def padded_rows(self) -> int:
        return max(16, gpu_codes.power_of_two(self.rows))

    @property
    def parts(self) -> int:
        return -(-self.d // _WIDTH)

    def grid(self) -> tuple[int, int]:
        return pl.cdiv(self.n, _TOKENS), self.parts


def connect(
    x: Array,
    update: Update | None,
    pre: Array,
    fn: Array,
    base: Array,
    scale: Array,
    norm: Array,
    layer: Array | int,
    *,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
    interpret: bool = False,
) -> tuple[Array, Array, Array, Array, Array]:
    """See `mhc.connect`; x is [n, C, D]."""
    form = _Form(*x.shape, iterations, hc_eps, norm_eps, interpret)
    n, c, d, rows, parts = form.n, form.c, form.d, form.rows, form.parts
    which = jnp.asarray(layer, jnp.int32).reshape(1)
    params = plt.CompilerParams(num_warps=_WARPS, num_stages=_STAGES)
    f32, bf16 = jnp.float32, jnp.bfloat16
    shapes = [((n, d), bf16), ((rows, parts, n), f32), ((2, parts, n), f32)]
    if update is not None:
        shapes.insert(0, ((n, c, d), bf16))
    *streams, read, mix, squares = pl.pallas_call(
        functools.partial(_spread, form, update is not None),
        grid=form.grid(),
        out_shape=[jax.ShapeDtypeStruct(*shape) for shape in shapes],
        compiler_params=params,
        interpret=interpret,
        name="mhc_spread",
    )(which, x, *(update or ()), pre, fn)
    y, coefficients = pl.pallas_call(
        functools.partial(_finish, form),
        grid=form.grid(),
        out_shape=[jax.ShapeDtypeStruct((n, d), bf16), jax.ShapeDtypeStruct((n, rows), f32)],
        compiler_params=params,
        interpret=interpret,
        name="mhc_finish",
    )(which, read, mix, squares, base, scale, norm)
    pre, post, comb = jnp.split(coefficients, [c, 2 * c], axis=1)
    return streams[0] if streams else x, y, pre, post, comb.reshape(n, c, c)


def expand(x: Array, u: Array, post: Array, comb: Array) -> Array:
    """See `mhc.expand`: elementwise, which XLA makes one kernel."""
    return reference.expand(x, u, post, comb)


def _tile(form: _Form) -> tuple[Array, Array, Array, Array]:
    """Tokens and columns of a program, and which of them exist."""
    token = pl.program_id(0) * _TOKENS + jnp.arange(_TOKENS)
    column = pl.program_id(1) * _WIDTH + jnp.arange(_WIDTH)
    return token, column, token < form.n, column < form.d


def _spread(form: _Form, updated: bool, which, x, *refs):
    u, post, comb = refs[:3] if updated else (None, None, None)
    pre, fn, *out, read, mix, squares = refs[3:] if updated else refs
    token, column, there, real = _tile(form)
    mask = there[:, None] & real[None, :]
    at = token[:, None], column[None, :]

    def of_token(ref, *index) -> Array:
        return plt.load(ref.at[(token, *index)], mask=there, other=0.0)[:, None]

    streams = [plt.load(x.at[at[0], j, at[1]], mask=mask, other=0.0) for j in range(form.c)]
    if updated:
        old, new = [stream.astype(jnp.float32) for stream in streams], plt.load(u.at[at], mask=mask, other=0.0)
        streams = []
        for k in range(form.c):
            total = of_token(post, k) * new.astype(jnp.float32)
            for j in range(form.c):
                total = total + of_token(comb, j, k) * old[j]
            streams.append(total.astype(jnp.bfloat16))
            plt.store(out[0].at[at[0], k, at[1]], streams[k], mask=mask)
    rounded = [gpu_codes.rounded(stream.astype(jnp.float32), form.interpret) for stream in streams]
    collapsed = sum(of_token(pre, k) * rounded[k] for k in range(form.c))
    collapsed = gpu_codes.rounded(collapsed, form.interpret)
    plt.store(read.at[at], collapsed.astype(jnp.bfloat16), mask=mask)

    row = jnp.arange(form.padded_rows)
    real_rows = row < form.rows
    total = jnp.zeros((_TOKENS, form.padded_rows), jnp.float32)
    for k in range(form.c):
        at_fn = (which[0], row[None, :], k * form.d + column[:, None])
        rest = plt.load(fn.at[at_fn], mask=real[:, None] & real_rows[None, :], other=0.0)
        for _ in range(3):
            part = gpu_codes.rounded(rest, form.interpret)
            total += plt.dot(streams[k], part.astype(jnp.bfloat16))
            rest = rest - part
    part = pl.program_id(1)
    plt.store(mix.at[row[None, :], part, token[:, None]], total, mask=there[:, None] & real_rows[None, :])
    squared = sum(jnp.sum(value * value, axis=1) for value in rounded)
    plt.store(squares.at[0, part, token], jnp.sum(collapsed * collapsed, axis=1), mask=there)
    plt.store(squares.at[1, part, token], squared, mask=there)


def _finish(form: _Form, which, read, mix, squares, base, scale, norm, y, coefficients):
    token, column, there, real = _tile(form)
    mask = there[:, None] & real[None, :]
    layer = which[0]
    part = jnp.arange(gpu_codes.power_of_two(form.parts))

    def added(ref, index: int) -> Array:
        inside = (part < form.parts)[:, None] & there[None, :]
        return jnp.sum(plt.load(ref.at[index, part[:, None], token[None, :]], mask=inside, other=0.0), axis=0)

    factor = jax.lax.rsqrt(added(squares, 0) / form.d + form.norm_eps)[:, None]
    collapsed = plt.load(read.at[token[:, None], column[None, :]], mask=mask, other=0.0).astype(jnp.float32)
    weight = plt.load(norm.at[layer, column], mask=real, other=0.0).astype(jnp.float32)[None, :]
    plt.store(y.at[token[:, None], column[None, :]], (collapsed * factor * weight).astype(jnp.bfloat16), mask=mask)

    @pl.when(pl.program_id(1) == 0)
    def _():
        factor = jax.lax.rsqrt(added(squares, 1) / (form.c * form.d) + form.norm_eps)

        def logit(row: int, kind: int) -> Array:
            return added(mix, row) * factor * scale[layer, kind] + base[layer, row]

        def put(row: int, value: Array) -> None:
            plt.store(coefficients.at[token, row], value, mask=there)

        c = form.c
        for k in range(c):
            put(k, _sigmoid(logit(k, 0)) + form.hc_eps)
            put(c + k, 2.0 * _sigmoid(logit(c + k, 1)))
        comb = _sinkhorn(form, [[logit((2 + j) * c + k, 2) for k in range(c)] for j in range(c)])
        for j in range(c):
            for k in range(c):
                put((2 + j) * c + k, comb[j][k])


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _sinkhorn(form: _Form, m: list[list[Array]]) -> list[list[Array]]:
    """`reference.sinkhorn` of m[source][destination], each float32 [tokens]."""
    eps, streams = form.hc_eps, range(form.c)

    def columns(m):
        sums = [sum(m[j][k] for j in streams) + eps for k in streams]
        return [[m[j][k] / sums[k] for k in streams] for j in streams]

    def rows(m):
        sums = [sum(m[j]) + eps for j in streams]
        return [[m[j][k] / sums[j] for k in streams] for j in streams]

    peaks = [functools.reduce(jnp.maximum, row) for row in m]
    m = [[jnp.exp(value - peak) for value in row] for row, peak in zip(m, peaks, strict=True)]
    sums = [sum(row) for row in m]
    m = columns([[value / total + eps for value in row] for row, total in zip(m, sums, strict=True)])
    return jax.lax.fori_loop(0, form.iterations - 1, lambda _, m: columns(rows(m)), m)
