"""The training form of sparse attention against the plain one, which has masks over all keys, and its gradient."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.numerics import FLOAT32, QUANTIZED_TRAINING_BF16, Numerics
from pallas_kernels.sparse_attention import attend_values, training

B, T, HEADS, DIM, ENTRIES, CHOSEN, WIDTH = 2, 37, 3, 16, 19, 5, 6


def inputs() -> tuple:
    rng = np.random.default_rng(0)
    q, window, entries, cotangent = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((B, T, HEADS, DIM), (B, T, DIM), (B, ENTRIES, DIM), (B, T, HEADS, DIM))
    )
    first = np.maximum(np.arange(T) - WIDTH + 1, 0) + rng.integers(0, 2, (B, T))
    first = np.minimum(first, np.arange(T)).astype(np.int32)
    first[1, 20:] = np.maximum(first[1, 20:], 20)  # a border
    selection = np.stack([[np.sort(rng.permutation(ENTRIES)[:CHOSEN]) for _ in range(T)] for _ in range(B)])
    selection[:, :3, 2:] = -1
    selection[0, 0] = -1  # nothing but its own key
    return q, window, first, entries, selection.astype(np.int32), jnp.asarray([0.3, -1.0, 2.0]), cotangent


def masks(first: np.ndarray, selection: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    places = np.arange(T)
    near = (places >= first[..., None]) & (places <= places[:, None])
    return near, (selection[..., None] == np.arange(ENTRIES)).any(axis=2)


@functools.cache
def results(numerics: Numerics, form: str):
    """Output and gradients of q, window, entries, sink."""
    q, window, first, entries, selection, sink, cotangent = inputs()
    near, far = masks(first, selection)
    floats = [x.astype(numerics.dtype) for x in (q, window, entries)] + [sink]

    def run(q, window, entries, sink):
        if form == "plain":
            return attend_values(q, window, near, entries, far, sink, numerics)
        chosen = jnp.asarray(selection) if form == "gathered" else jnp.asarray(far)
        return training.attend(q, window, jnp.asarray(first), entries, chosen, sink, WIDTH, numerics, 1)

    @jax.jit
    def both(*floats):
        out, pull = jax.vjp(run, *floats)
        return (out, *pull(cotangent.astype(out.dtype)))

    return [np.asarray(x, np.float32) for x in both(*floats)]


@pytest.mark.parametrize("form", ["gathered", "masked"])
def test_float32(form):
    """Tiles of 8 of 37 queries. Sums in another order, of at most 37 terms of size 1."""
    for actual, expected in zip(results(FLOAT32, form), results(FLOAT32, "plain"), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("form", ["gathered", "masked"])
def test_bf16(form):
    """The output has the same roundings. Gradients round at other places: they are held against those of float32, of
    which plain bf16 is as far.
    """
    exact, plain = results(FLOAT32, "plain"), results(QUANTIZED_TRAINING_BF16, "plain")
    actual = results(QUANTIZED_TRAINING_BF16, form)
    np.testing.assert_allclose(actual[0], plain[0], rtol=2.0**-7, atol=1e-3)
    for a, p, e in zip(actual, plain, exact, strict=True):
        assert np.linalg.norm(a - e) <= 2 * np.linalg.norm(p - e) + 1e-3 * np.linalg.norm(e)


def test_a_window_alone():
    q, window, first, _, selection, sink, _ = inputs()
    near, _ = masks(first, selection)
    actual = jax.jit(lambda *x: training.attend(*x, None, None, sink, WIDTH, FLOAT32, 1))(q, window, first)
    expected = attend_values(q, window, near, None, None, sink, FLOAT32)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_nothing_of_a_row_s_size_is_made_for_every_query():
    """The largest array inside, for a row of 4,096 tokens: linear in the row, not in its square."""
    t, d, k = 4096, 32, 16
    q, kv, entries = jnp.zeros((1, t, 4, d)), jnp.zeros((1, t, d)), jnp.zeros((1, t, d))
    first, chosen = jnp.zeros((1, t), jnp.int32), jnp.zeros((1, t, k), jnp.int32)

    def loss(q, kv, entries, sink):
        return jnp.sum(training.attend(q, kv, first, entries, chosen, sink, 128, FLOAT32, 2**20))

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3)))(q, kv, entries, jnp.zeros(4)))
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", text)]
    assert q.size <= max(sizes) <= 1.01 * q.size  # filled up to whole tiles
