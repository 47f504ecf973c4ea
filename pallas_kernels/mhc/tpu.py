"""Hyper-connections for TPUs: the streams are read once and written once for a sublayer's update and the next one's
input and coefficients.

Streams lie [C, n, D] here, so that tokens fill the sublanes (a model that keeps them [n, C, D] need not copy them: XLA
may store them in this order). Rounded values are stored and read back where their bf16 form counts, because a
compiler may drop a narrowing that is widened again.

The projection is exact to float32: streams are bf16 numbers, and a float32 weight is the sum of three, so that one
bf16 product with the parts below each other gives [3 * (2+C)C, tokens]. From there on tokens fill the lanes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.implementation import traced_once

LANES = 128
_TILE = 64  # tokens, at most
_ROWS = 16  # tokens of a loop step: a register of bf16
_UNROLL = 4
_VMEM_BYTES = 48 * 2**20


@traced_once("iterations", "hc_eps", "norm_eps", "interpret")
def connect(
    x: Array,
    update: tuple[Array, Array, Array] | None,
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
    interpret: bool,
) -> tuple[Array, Array, Array, Array, Array]:
    """See `mhc.connect`; x is [n, C, D]."""
    n, c, d = x.shape
    rows = (2 + c) * c
    u, post, comb = (None, None, None) if update is None else update
    zeros = jnp.zeros((n, rows - c), jnp.float32)
    mix = jnp.concatenate([pre, *((zeros,) if update is None else (post, comb.reshape(n, c * c)))], axis=1)
    tile = min(_TILE, -(-n // _ROWS) * _ROWS)
    streams, token = _specs(c, d, tile)
    group = 32 // norm.dtype.itemsize  # layers that share a tile of the stacked norms
    inputs = [_padded(x, tile).swapaxes(0, 1), _padded(mix, tile), fn, norm]
    in_specs = [
        streams,
        token(rows),
        pl.BlockSpec((1, rows, c * d), lambda i, layer, *_: (layer[0], 0, 0)),
        pl.BlockSpec((min(group, norm.shape[0]), d), lambda i, layer, *_: (layer[0] >> group.bit_length() - 1, 0)),
    ]
    outputs, out_specs = (
        [((inputs[0].shape[1], d), jnp.bfloat16), ((inputs[0].shape[1], rows), jnp.float32)],
        [
            token(d),
            token(rows),
        ],
    )
    if update is not None:
        inputs.append(_padded(u, tile))
        in_specs.append(token(d))
        outputs.append((inputs[0].shape, jnp.bfloat16))
        out_specs.append(streams)
    parts_rows = -(-3 * rows // _ROWS) * _ROWS
    y, out, *new = pl.pallas_call(
        functools.partial(_connect_kernel, iterations, hc_eps, norm_eps, group),
        out_shape=[jax.ShapeDtypeStruct(*output) for output in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(inputs[0].shape[1] // tile,),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((c, parts_rows, d), jnp.bfloat16),
                pltpu.VMEM((1, d), jnp.float32),
                pltpu.VMEM((tile, LANES), jnp.float32),
                pltpu.VMEM((LANES, LANES), jnp.float32),
            ],
        ),
        compiler_params=_compiler_params(),
        interpret=interpret,
        name="mhc_connect",
    )(jnp.asarray(layer, jnp.int32).reshape(1), base, scale, *inputs)
    x = x if update is None else new[0].swapaxes(0, 1)[:n]
    out = out[:n]
    return x, y[:n], out[:, :c], out[:, c : 2 * c], out[:, 2 * c :].reshape(n, c, c)


@traced_once("interpret")
def expand(x: Array, u: Array, post: Array, comb: Array, *, interpret: bool) -> Array:
    """See `mhc.expand`; x is [n, C, D]."""
    n, c, d = x.shape
    tile = min(_TILE, -(-n // _ROWS) * _ROWS)
    streams, token = _specs(c, d, tile)
    mix = jnp.concatenate([post, comb.reshape(n, c * c)], axis=1)
    inputs = [_padded(x, tile).swapaxes(0, 1), _padded(mix, tile), _padded(u, tile)]

    def kernel(x, mix, u, new):
        _each_rows(tile, lambda rows: _expand_rows(x, u, new, rows, mix[rows], 0))

    new = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(inputs[0].shape, x.dtype),
        grid=(inputs[0].shape[1] // tile,),
        in_specs=[streams, token(mix.shape[1]), token(d)],
        out_specs=streams,
        compiler_params=_compiler_params(),
        interpret=interpret,
        name="mhc_expand",
    )(*inputs)
    return new.swapaxes(0, 1)[:n]


def _padded(x: Array, tile: int) -> Array:
    return jnp.pad(x, [(0, -x.shape[0] % tile)] + [(0, 0)] * (x.ndim - 1))


def _specs(c: int, d: int, tile: int) -> tuple[pl.BlockSpec, Any]:
    """Blocks of a tile of tokens: the streams [C, n, D], and arrays [n, width]."""
    return (
        pl.BlockSpec((c, tile, d), lambda i, *_: (0, i, 0)),
        lambda width: pl.BlockSpec((tile, width), lambda i, *_: (i, 0)),
    )


def _compiler_params() -> pltpu.CompilerParams:
    # The weights are split in the first step: the steps stay in order on one core.
    return pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_BYTES)


def _each_rows(tile: int, body: Any) -> None:
    def step(i, _):
        body(pl.ds(pl.multiple_of(i * _ROWS, _ROWS), _ROWS))
        return 0

    jax.lax.fori_loop(0, tile // _ROWS, step, 0)


def _each_columns(d: int, body: Any, carry: Any) -> Any:
    """`body(columns, carry)` for slices of d channels: 128 at a time, or all of an odd number."""
    width = _width(d)
    if d == width:
        return body(slice(None), carry)

    def step(i, carry):
        for k in range(_UNROLL):
            carry = body(pl.ds(pl.multiple_of((i * _UNROLL + k) * width, width), width), carry)
        return carry

    carry = jax.lax.fori_loop(0, d // width // _UNROLL, step, carry)
    for i in range(d // width // _UNROLL * _UNROLL, d // width):
        carry = body(slice(i * width, (i + 1) * width), carry)
    return carry


def _width(d: int) -> int:
    return d if d % LANES else LANES


def _spread(mix: Array, first: int, count: int, d: int) -> list[Array]:
    """Columns of mix [tokens, .], each over the lanes that a loop step works on: once, not in every step."""
    return [jnp.broadcast_to(mix[:, i : i + 1], (mix.shape[0], _width(d))) for i in range(first, first + count)]


def _expand_rows(x: Any, u: Any, new: Any, rows: Any, mix: Array, first: int) -> None:
    """Write the streams of some tokens after the update; post and comb are columns of mix from `first` on."""
    c, _, d = x.shape
    post, comb = _spread(mix, first, c, d), _spread(mix, first + c, c * c, d)

    def write(columns, carry):
        added = u[rows, columns].astype(jnp.float32)
        old = [x[j, rows, columns].astype(jnp.float32) for j in range(c)]
        for k in range(c):
            total = post[k] * added
            for j in range(c):
                total = total + comb[j * c + k] * old[j]
            new[k, rows, columns] = total.astype(jnp.bfloat16)
        return carry

    _each_columns(d, write, 0)


def _connect_kernel(iterations, hc_eps, norm_eps, group, layer, base, scale, x, mix, fn, norm, *refs):
    u, refs = (refs[0], refs[1:]) if len(refs) > 6 else (None, refs)
    y, out, *new, parts, weight, squares, turned = refs
    c, tile, d = x.shape
    count = fn.shape[1]

    @pl.when(pl.program_id(0) == 0)
    def _():
        _split(fn, parts)
        number = jax.lax.broadcasted_iota(jnp.int32, norm.shape, 0)
        chosen = jnp.where(number == layer[0] & (group - 1), norm[...].astype(jnp.float32), 0.0)
        weight[...] = jnp.sum(chosen, axis=0, keepdims=True)

    streams = new[0] if new else x

    def read(rows):
        here = mix[rows]
        if new:
            _expand_rows(x, u, streams, rows, here, c)
        pre = _spread(here, 0, c, d)

        def collapse(columns, carry):
            square, read_square = carry
            old = [streams[k, rows, columns].astype(jnp.float32) for k in range(c)]
            square = square + sum(stream * stream for stream in old)
            total = sum(weight * stream for weight, stream in zip(pre, old, strict=True))
            y[rows, columns] = total.astype(jnp.bfloat16)
            total = y[rows, columns].astype(jnp.float32)
            return square, read_square + total * total

        zero = jnp.zeros((_ROWS, _width(d)), jnp.float32)
        square, read_square = _each_columns(d, collapse, (zero, zero))
        squares[rows] = jnp.broadcast_to(jnp.sum(square, axis=1, keepdims=True), (_ROWS, LANES))
        factor = jax.lax.rsqrt(jnp.sum(read_square, axis=1, keepdims=True) / d + jnp.float32(norm_eps))

        width = next((w for w in (512, 256, 128) if d % w == 0), d)
        for i in range(0, d, width):
            columns = slice(i, i + width)
            y[rows, columns] = (y[rows, columns].astype(jnp.float32) * factor * weight[:, columns]).astype(y.dtype)

    _each_rows(tile, read)

    # [3 * (2+C)C, tokens]: products with the three parts of the weights.
    products = sum(
        jax.lax.dot_general(parts[k], streams[k], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        for k in range(c)
    )
    turned[:tile] = squares[...]
    square = turned[...].T[:1, :tile]
    factor = jax.lax.rsqrt(square / (c * d) + jnp.float32(norm_eps))
    mixed = (products[2 * count : 3 * count] + products[count : 2 * count] + products[:count]) * factor
    rows = _coefficients([mixed[i : i + 1] for i in range(count)], base, scale, layer[0], c, iterations, hc_eps)
    for i, row in enumerate(rows):
        turned[i : i + 1, :tile] = row
    out[...] = turned[...].T[:tile, :count]


def _split(fn: Any, parts: Any) -> None:
    """Three bf16 numbers whose sum is a float32 weight: the upper half of its bits, then of the rest's, the rest."""
    c, _, d = parts.shape
    count = fn.shape[1]

    def upper(value):
        bits = jax.lax.bitcast_convert_type(value, jnp.int32)
        return jax.lax.bitcast_convert_type(bits & -65536, jnp.float32)

    for k in range(c):
        rest = fn[0, :, k * d : (k + 1) * d]
        for part in range(3):
            high = upper(rest)
            parts[k, part * count : (part + 1) * count] = high.astype(jnp.bfloat16)
            rest = rest - high
        parts[k, 3 * count :] = jnp.zeros((parts.shape[1] - 3 * count, d), jnp.bfloat16)


def _coefficients(mix, base, scale, layer, c, iterations, hc_eps):
    """pre, post and comb, a list of [1, tokens] in the order of the mix; see `reference.coefficients`."""

    def scaled(i):
        return mix[i] * scale[layer, min(i // c, 2)] + base[layer, i]

    pre = [jax.nn.sigmoid(scaled(i)) + hc_eps for i in range(c)]
    post = [2.0 * jax.nn.sigmoid(scaled(i)) for i in range(c, 2 * c)]
    m = [[scaled((2 + j) * c + k) for k in range(c)] for j in range(c)]
    for j, row in enumerate(m):
        top = functools.reduce(jnp.maximum, row)
        row = [jnp.exp(value - top) for value in row]
        factor = 1.0 / sum(row)
        m[j] = [value * factor + hc_eps for value in row]

    def columns(m):
        factor = [1.0 / (sum(m[j][k] for j in range(c)) + hc_eps) for k in range(c)]
        return [[m[j][k] * factor[k] for k in range(c)] for j in range(c)]

    def normalise(_, m):
        factor = [1.0 / (sum(row) + hc_eps) for row in m]
        return columns([[value * f for value in row] for row, f in zip(m, factor, strict=True)])

    m = jax.lax.fori_loop(0, iterations - 1, normalise, columns(m))
    return [*pre, *post, *(value for row in m for value in row)]
