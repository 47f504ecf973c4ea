"""Hyper-connections between two sublayers."""

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.kernel_workloads.sizes import Sizes
from dsv41_jax.kernel_workloads.workload import Workload
from pallas_kernels import mhc

# Float32 sums of the coefficients in another order; streams and the normed input are rounded to 8 bits after that.
_CONNECT = (2.0**-7, 2.0**-12)


def workloads(sizes: Sizes) -> list[Workload]:
    """See `kernel_workloads.workloads`."""
    return [_connect(sizes, n) for n in (sizes.batch, sizes.many)] + [_expand(sizes, sizes.many)]


def _update(sizes: Sizes, key: Array, n: int) -> tuple[Array, Array, Array]:
    c = sizes.streams
    keys = jax.random.split(key, 3)
    u = jax.random.normal(keys[0], (n, sizes.hidden), jnp.bfloat16)
    comb = jax.nn.softmax(jax.random.normal(keys[2], (n, c, c)), axis=-1)
    return u, jax.random.uniform(keys[1], (n, c), maxval=2.0), comb


def _connect(sizes: Sizes, n: int) -> Workload:
    c, d = sizes.streams, sizes.hidden
    rows, layers = (2 + c) * c, min(sizes.layers, 4)

    def make(key: Array):
        keys = jax.random.split(key, 7)
        return (
            jax.random.normal(keys[0], (n, c, d), jnp.bfloat16),
            _update(sizes, keys[1], n),
            jax.random.uniform(keys[2], (n, c)),
            jax.random.normal(keys[3], (layers, rows, c * d)) * (c * d) ** -0.5,
            jax.random.normal(keys[4], (layers, rows)),
            jax.random.uniform(keys[5], (layers, 3)),
            (1 + 0.1 * jax.random.normal(keys[6], (layers, d))).astype(jnp.bfloat16),
        )

    def call(a, implementation: str):
        layer = jnp.int32(layers - 1)
        options = {"iterations": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}
        return mhc.connect(*a, layer, **options, implementation=implementation)

    return Workload(
        f"connect n={n}",
        "mhc",
        make,
        call,
        bytes=n * d * 2 * (2 * c + 2) + 4 * rows * c * d,
        flops=2 * n * rows * c * d,
        tolerance=_CONNECT,
        unit="token",
        units=n,
    )


def _expand(sizes: Sizes, n: int) -> Workload:
    c, d = sizes.streams, sizes.hidden

    def make(key: Array):
        keys = jax.random.split(key)
        return (jax.random.normal(keys[0], (n, c, d), jnp.bfloat16), *_update(sizes, keys[1], n))

    def call(a, implementation: str) -> Array:
        return mhc.expand(*a, implementation=implementation)

    size = n * d * 2 * (2 * c + 1)
    return Workload(f"expand n={n}", "mhc", make, call, size, 0, tolerance=(2.0**-7, 2.0**-12), unit="token", units=n)
