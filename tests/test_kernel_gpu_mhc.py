"""Hyper-connections: the Triton kernels, interpreted, against the reference."""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels.mhc import gpu
from test_kernel_mhc import HC_EPS, ITERATIONS, NORM_EPS, assert_close, connect, inputs

kernel = jax.jit(
    functools.partial(gpu.connect, iterations=ITERATIONS, hc_eps=HC_EPS, norm_eps=NORM_EPS, interpret=True)
)


@pytest.mark.parametrize(
    ("n", "c", "d", "seeds"),
    [
        (5, 4, 384, 3),  # rows that fill no tile
        (17, 3, 96, 2),  # two tiles, channels that fill no tile
        (1, 2, 32, 1),
    ],
)
def test_connect(n, c, d, seeds):
    for seed in range(seeds):
        arguments = (*inputs(seed, (n,), c, d), seed)
        got = kernel(*arguments)
        assert_close(got, connect("reference")(*arguments))
        np.testing.assert_allclose(np.asarray(got[-1]).sum(axis=1), 1.0, atol=1e-5)


def test_without_an_update():
    x, _, *rest = inputs(7, (5,), 4, 384)
    got = kernel(x, None, *rest, 2)
    assert_close(got, connect("reference")(x, None, *rest, 2))
    np.testing.assert_array_equal(np.asarray(got[0], np.float32), np.asarray(x, np.float32))
