"""FLOPs from jaxprs: single operations by hand, every kind of nesting, and XLA's count of an unrolled program. Kernels
are in `test_kernel_flops`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from dsv41_jax.accounting import flops, jaxpr_flops, jaxpr_work, work
from pallas_kernels.flops import ONE_HOT_SCOPE

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)
ONE = 2 * 4**3  # X @ X


@jax.custom_jvp
def with_jvp(x):
    return x @ x


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0] @ primals[0]))


@jax.custom_vjp
def with_vjp(x):
    return x @ x


with_vjp.defvjp(lambda x: (with_vjp(x), x), lambda x, g: (g @ x.T,))


def repeat(x, times):
    return lax.scan(lambda c, _: (c @ c, None), x, None, length=times)[0]


@pytest.mark.parametrize(
    ("function", "products"),
    [
        (lambda x: jnp.sin(x) + 1, 0),
        (lambda x: x @ x, 1),
        (jax.jit(lambda x: x @ x + x @ x.T), 2),
        (jax.checkpoint(lambda x: x @ x), 1),
        (with_jvp, 1),
        (with_vjp, 1),
        (jax.grad(lambda x: with_vjp(x).sum()), 2),
        (lambda x: repeat(x, 5), 5),
        (lambda x: lax.scan(lambda c, _: (repeat(c, 3) @ c, None), x, None, length=7)[0], 7 * 4),
        (lambda x: lax.map(lambda row: x @ row, x), 1),
        (lambda x: lax.fori_loop(0, 6, lambda _, c: c @ c, x), 6),
        (lambda x: lax.cond(x[0, 0] > 0, lambda c: repeat(c, 3), lambda c: c @ c, x), 3),
        (lambda x: lax.switch(x[0, 0].astype(int), [lambda c: c, lambda c: c @ c, lambda c: c], x), 1),
        (lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x @ x), 1),
        (lambda x: jnp.sort(x @ x), 1),
    ],
)
def test_nesting(function, products):
    assert flops(function, X) == {"matmul": products * ONE, "convolution": 0}


@pytest.mark.parametrize(
    ("spec", "left", "right", "expected"),
    [
        ("ij,jk->ik", (3, 5), (5, 7), 2 * 3 * 5 * 7),
        ("bij,bkj->bik", (2, 3, 5), (2, 7, 5), 2 * 2 * 3 * 5 * 7),
        ("bthd,bnd->bthn", (2, 3, 4, 5), (2, 7, 5), 2 * 2 * 3 * 4 * 5 * 7),
        ("ij,ij->", (3, 5), (3, 5), 2 * 15),
        ("i,j->ij", (3,), (5,), 2 * 15),
        ("ij,jk->ik", (0, 5), (5, 7), 0),
    ],
)
def test_products(spec, left, right, expected):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (left, right)]
    assert flops(lambda a, b: jnp.einsum(spec, a, b), *shapes)["matmul"] == expected


def test_convolutions():
    """Two groups of 3 channels, a kernel of 5 x 2, a result of [2, 8, 4, 9]."""
    x, kernel = jax.ShapeDtypeStruct((2, 6, 8, 10), jnp.float32), jax.ShapeDtypeStruct((8, 3, 5, 2), jnp.float32)
    found = flops(lambda a, k: lax.conv_general_dilated(a, k, (1, 1), "VALID", feature_group_count=2), x, kernel)
    assert found == {"matmul": 0, "convolution": 2 * (2 * 8 * 4 * 9) * 3 * 5 * 2}


def test_a_jaxpr_and_large_abstract_arguments():
    """The head of the released model on a million tokens: nothing is allocated, nothing overflows."""
    x, w = jax.ShapeDtypeStruct((1 << 20, 5120), jnp.bfloat16), jax.ShapeDtypeStruct((129280, 5120), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda a, b: a @ b.T)(x, w)
    assert jaxpr_flops(jaxpr)["matmul"] == jaxpr_flops(jaxpr.jaxpr)["matmul"] == 2 * (1 << 20) * 5120 * 129280


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ c, x), "while does arithmetic"),
        (lambda x: lax.while_loop(lambda c: (c @ c).sum() < 9, lambda c: c + 1, x), "while does arithmetic"),
        (lambda x: lax.ragged_dot(x, jnp.ones((2, 4, 4)), jnp.array([1, 3])), "ragged_dot_general"),
        (lambda x: repeat(jax.pure_callback(np.sin, X, x), 2), "pure_callback"),
    ],
)
def test_what_cannot_be_counted_is_refused(function, name):
    with pytest.raises(ValueError, match=name):
        flops(function, X)


@pytest.mark.parametrize("trips", [0, 1, 2.5])
def test_while_loops_run_as_often_as_said(trips):
    """The body as often, the condition once more; a scan inside multiplies."""

    def loop(x):
        return lax.while_loop(lambda c: (c @ c).sum() < 9, lambda c: repeat(c, 3), x @ x)

    assert work(loop, X, while_trips=trips)["f32"] == (1 + (trips + 1) + 3 * trips) * ONE
    with pytest.raises(ValueError, match="say so with while_trips"):
        work(loop, X)


def test_a_device_of_a_mesh():
    """A shard_map counts as one device's part of it; exchanges cost nothing."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    spec = PartitionSpec("x")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def program(x):
        whole = lax.all_gather(x, "x", axis=0, tiled=True)
        part = lax.psum_scatter(repeat(whole, 2) @ whole, "x", scatter_dimension=0, tiled=True)
        return lax.all_to_all(lax.psum(part, "x"), "x", 0, 0, tiled=True)

    assert flops(jax.jit(program), X) == {"matmul": 3 * ONE, "convolution": 0}

    abstract = jax.sharding.AbstractMesh((4,), ("x",))
    share = jax.shard_map(lambda x: x @ x.T, mesh=abstract, in_specs=spec, out_specs=spec, check_vma=False)
    rows = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    assert flops(share, rows)["matmul"] == 2 * 2 * 4 * 2  # [2, 4] on each of 4
    # What is outside has the shapes of all devices together, and can be left out.
    both = jax.make_jaxpr(lambda x: (share(x), jax.jit(lambda x: x @ x.T)(x)))(rows)
    assert jaxpr_work(both)["f32"] == 2 * 2 * 4 * 2 + 2 * 8 * 4 * 8
    assert jaxpr_work(both, spread_only=True)["f32"] == 2 * 2 * 4 * 2


@pytest.mark.parametrize(
    ("left", "right", "precision"),
    [
        (jnp.float32, jnp.float32, "f32"),
        (jnp.bfloat16, jnp.float32, "f32"),
        (jnp.bfloat16, jnp.bfloat16, "bf16"),
        (jnp.bfloat16, jnp.float8_e4m3fn, "bf16"),
        (jnp.float8_e4m3fn, jnp.float8_e5m2, "fp8"),
        (jnp.int8, jnp.int8, "fp8"),
        (jnp.float4_e2m1fn, jnp.float8_e4m3fn, "fp8"),
        (jnp.float4_e2m1fn, jnp.float4_e2m1fn, "fp4"),
    ],
)
def test_the_wider_operand_is_the_precision(left, right, precision):
    a, b = jax.ShapeDtypeStruct((4, 4), left), jax.ShapeDtypeStruct((4, 4), right)
    product = functools.partial(lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
    found = work(functools.partial(product, preferred_element_type=jnp.float32), a, b)
    assert found == {"fp4": 0, "fp8": 0, "bf16": 0, "f32": 0, "one_hot": 0} | {precision: ONE}


def test_products_that_only_move_values_are_apart():
    """Those of a named scope, also inside a function that is jitted on its own; scopes of other names count."""

    def gather(x):
        with jax.named_scope(ONE_HOT_SCOPE):
            rows = jnp.einsum("sn,nd->sd", jnp.eye(4), x)
        with jax.named_scope("one_hot_like"):
            return rows @ x

    found = work(lambda x: lax.scan(lambda c, _: (gather(c), None), x, None, length=3)[0], X)
    assert found["one_hot"] == found["f32"] == 3 * ONE
    assert flops(gather, X)["matmul"] == ONE


def test_xla_counts_the_same_when_unrolled():
    """Attention and a gated MLP, six layers. XLA also counts what is not a product: less than 2% here."""
    b, t, d, h, f, layers = 2, 64, 128, 4, 512, 6
    leaves = {"qkv": (3 * d, d), "out": (d, d), "gate": (f, d), "up": (f, d), "down": (d, f)}
    stacked = {name: jax.ShapeDtypeStruct((layers, *shape), jnp.float32) for name, shape in leaves.items()}
    x = jax.ShapeDtypeStruct((b, t, d), jnp.float32)

    def layer(x, w):
        q, k, v = jnp.split((x @ w["qkv"].T).reshape(b, t, 3 * h, d // h), 3, axis=2)
        p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        x = x + jnp.einsum("bhts,bshd->bthd", p, v).reshape(b, t, d) @ w["out"].T
        return x + (jax.nn.silu(x @ w["gate"].T) * (x @ w["up"].T)) @ w["down"].T

    def rolled(x, ws):
        return lax.scan(lambda c, w: (layer(c, w), None), x, ws)[0]

    def unrolled(x, ws):
        for i in range(layers):
            x = layer(x, {name: w[i] for name, w in ws.items()})
        return x

    by_hand = layers * (2 * b * t * d * (4 * d + 3 * f) + 2 * 2 * b * t * t * d)
    assert flops(rolled, x, stacked)["matmul"] == flops(unrolled, x, stacked)["matmul"] == by_hand
    counted = jax.jit(unrolled).lower(x, stacked).compile().cost_analysis()["flops"]
    assert by_hand <= counted <= 1.02 * by_hand
    assert jax.jit(rolled).lower(x, stacked).compile().cost_analysis()["flops"] < by_hand / 3  # why this exists
