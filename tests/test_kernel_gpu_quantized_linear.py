"""Dense FP8 maps: the Triton kernel, interpreted, against the reference."""

import jax.numpy as jnp
import pytest

from pallas_kernels.quantized_linear import gpu, reference
from test_kernel_quantized_linear import close, leaf, rows


@pytest.mark.parametrize(
    ("n", "out", "k"),
    [
        (5, 96, 640),  # K split into parts, columns that fill no tile
        (20, 64, 224),  # a last loop step without its blocks
        (64, 64, 64),
        (70, 32, 64),  # tiles of many rows
        (1, 32, 32),
    ],
)
def test_linear(n, out, k):
    weights, x = leaf(n, 2, out, k), rows(n, n, k)
    arguments = (x, weights["weight"], weights["scale"], jnp.int32(1))
    close(gpu.project(*arguments, groups=1, quantize=True, interpret=True), reference.linear(*arguments))


def test_grouped():
    weights, x = leaf(1, 2, 3 * 96, 64), rows(2, 4, 3 * 64)
    arguments = (x, weights["weight"], weights["scale"], jnp.int32(1))
    got = gpu.project(*arguments, groups=3, quantize=False, interpret=True)
    close(got, reference.grouped_linear(*arguments, 3))


def test_parts_divide_the_loop():
    assert gpu._parts(160, 4, 8) == 10
    assert gpu._parts(40, 4, 1000) == 1
    assert gpu._parts(7, 4, 1) == 1
