"""Routed experts: packed FP4, grouping, and the TPU kernels (interpreted) against the reference."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from dsv41_jax import quant
from pallas_kernels import moe
from pallas_kernels.implementation import KernelError
from pallas_kernels.moe import tpu
from pallas_kernels.moe.groups import group_rows
from pallas_kernels.moe.pack import E5M2_UNIT

HIDDEN, INTER, EXPERTS, LAYERS, LIMIT = 160, 96, 8, 2, 7.0

# The kernels add float32 products in another order. A sum next to a tie of bf16 may then round to the other side, its
# Q8 code may flip, by 1/16 of its value, and every output has up to INTER such terms: a few bf16 steps of the largest.
FEW_STEPS = 2.0**-6
SAME = 0.98  # of the outputs have the same bits; in practice all but a handful


def released_leaf(key: jax.Array, rows: int, columns: int) -> dict[str, jax.Array]:
    weight, scale = quant.quantize_weight_fp4(jax.random.normal(key, (LAYERS, EXPERTS, rows, columns)) * 0.1)
    return {"weight": weight, "scale": scale}


@functools.cache
def leaves(storage: str) -> tuple[dict[str, jax.Array], ...]:
    """w1, w3, w2."""
    keys = jax.random.split(jax.random.key(1), 3)
    shapes = (INTER, HIDDEN), (INTER, HIDDEN), (HIDDEN, INTER)
    make = jax.jit(released_leaf, static_argnums=(1, 2))
    released = [make(key, *shape) for key, shape in zip(keys, shapes, strict=True)]
    if storage == "released":
        return tuple(released)
    convert = {"fp4": moe.pack, "bf16": moe.as_bf16, "fp8": lambda leaf: moe.as_fp8(leaf)[0]}[storage]
    return tuple(jax.jit(convert)(leaf) for leaf in released)


@functools.partial(jax.jit, static_argnames="implementation")
def _experts(x, chosen, weights, matrices, layer, implementation):
    return moe.experts(x, chosen, weights, *matrices, layer, limit=LIMIT, implementation=implementation)


def run(x, chosen, weights, layer, storage, implementation):
    return _experts(x, chosen, weights, leaves(storage), layer, implementation)


def tokens(n: int, k: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(rng.normal(size=(n, HIDDEN)) * 2, jnp.bfloat16),
        jnp.asarray(rng.uniform(0.05, 1, (n, k)), jnp.float32),
    )


def assert_close(got: jax.Array, want: jax.Array) -> None:
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= FEW_STEPS * np.abs(want).max()
    assert np.mean(got == want) >= SAME


def compare(chosen: np.ndarray, storage: str = "fp4", seed: int = 0) -> None:
    x, weights = tokens(*chosen.shape, seed)
    chosen = jnp.asarray(np.sort(chosen, -1), jnp.int32)
    want = run(x, chosen, weights, 1, "released", "reference")
    assert_close(run(x, chosen, weights, 1, storage, "interpret"), want)


def test_packed_bytes_are_e5m2() -> None:
    codes = np.arange(128, dtype=np.uint8) % 16
    leaf = {"weight": quant.pack_fp4(jnp.asarray(codes))[None], "scale": jnp.full((1, 4), 127, jnp.uint8)}
    placed = np.ascontiguousarray(moe.pack(leaf)["words"][:, 0]).view(np.uint8)
    low, high = placed & 0x8E, (placed >> 3 & 0x0E) | (placed << 7 & 0x80)
    both = jnp.asarray(np.concatenate([low, high])).view(jnp.float8_e5m2).astype(jnp.float32) * E5M2_UNIT
    want = np.asarray(quant.e2m1_values(jnp.asarray(codes)))
    np.testing.assert_array_equal(np.asarray(both), want)
    np.testing.assert_array_equal(np.signbit(both), np.signbit(want))


@pytest.mark.parametrize("shape", [(96, 160), (128, 1152)])
def test_unpack_inverts_pack(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    n, k = shape
    weight = jnp.asarray(rng.integers(0, 256, (3, n, k // 2)), jnp.uint8)
    scale = jnp.asarray(rng.integers(0, 255, (3, n, k // 32)), jnp.uint8).view(jnp.float8_e8m0fnu)
    packed = moe.pack({"weight": weight, "scale": scale})
    back = moe.unpack(packed)
    np.testing.assert_array_equal(back["weight"][:, :n, : k // 2], weight)
    np.testing.assert_array_equal(back["scale"][:, :n, : k // 32].view(jnp.uint8), scale.view(jnp.uint8))
    assert not back["weight"][:, n:].any() and not back["weight"][:, :, k // 2 :].any()


def test_wider_storages_hold_the_same_values() -> None:
    for released, fp8, bf16 in zip(leaves("released"), leaves("fp8"), leaves("bf16"), strict=True):
        want = quant.dequantize_weight(released)
        np.testing.assert_array_equal(bf16["weight"], want)
        scale = quant.e8m0_to_f32(fp8["scale"])
        np.testing.assert_array_equal(fp8["weight"].astype(jnp.float32) * scale, want.astype(jnp.float32))


def test_fp8_reports_what_it_cannot_hold() -> None:
    weight = jnp.full((1, 32), 0x11, jnp.uint8)  # all 0.5
    near, far = (jnp.asarray([[127, 127 + spread]], jnp.uint8) for spread in (10, 24))
    assert moe.as_fp8({"weight": weight, "scale": near})[1]
    assert not moe.as_fp8({"weight": weight, "scale": far})[1]


@given(st.integers(0, 2**31), st.integers(1, EXPERTS), st.sampled_from([2, 8, 32]))
@settings(max_examples=20, deadline=None)
def test_every_row_has_a_place_in_a_tile_of_its_expert(seed: int, favourites: int, height: int) -> None:
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.integers(0, favourites, (19, 3)), -1)
    groups = jax.jit(group_rows, static_argnums=(1, 2))(jnp.asarray(chosen, jnp.int32), EXPERTS, height)
    position, source, expert = (np.asarray(x) for x in groups[:3])
    assert len(set(position.ravel())) == position.size  # none on top of another
    np.testing.assert_array_equal(expert[position // height], chosen)
    np.testing.assert_array_equal(source[position], np.broadcast_to(np.arange(19)[:, None], chosen.shape))
    used = int(groups.used[0])
    assert used == sum(-(-int(np.sum(chosen == e)) // height) for e in range(EXPERTS))
    assert position.max() < used * height <= len(source)
    assert (expert[used:] == expert[used - 1]).all()


@given(st.integers(0, 2**31), st.integers(3, EXPERTS))
@settings(max_examples=6, deadline=None)
def test_ragged_routing(seed: int, favourites: int) -> None:
    rng = np.random.default_rng(seed)
    compare(np.stack([rng.permutation(favourites)[:3] for _ in range(19)]), seed=seed)


def test_all_tokens_to_the_same_experts() -> None:
    compare(np.broadcast_to(np.asarray([2, 3, 7]), (19, 3)))


@pytest.mark.parametrize("storage", ["fp8", "bf16"])
def test_wider_storages(storage: str) -> None:
    rng = np.random.default_rng(3)
    compare(np.stack([rng.permutation(5)[:3] for _ in range(19)]), storage)


def test_experts_of_other_devices_give_zeros() -> None:
    rng = np.random.default_rng(6)
    chosen = np.stack([rng.permutation(EXPERTS)[:3] for _ in range(19)])
    away = np.sort(np.where(chosen < 3, EXPERTS, chosen), -1)
    compare(away)
    x, weights = tokens(19, 3)
    for implementation in ("reference", "interpret"):
        out = run(x, jnp.asarray(away, jnp.int32), weights, 1, "fp4", implementation)
        np.testing.assert_array_equal(np.any(np.asarray(out, np.float32), axis=-1), away < EXPERTS)
        none = run(x, jnp.full((19, 3), EXPERTS, jnp.int32), weights, 1, "fp4", implementation)
        assert not none.any()


def test_one_token() -> None:
    compare(np.asarray([[5]]))


def test_many_rows() -> None:
    rng = np.random.default_rng(4)
    chosen = np.stack([rng.permutation(EXPERTS)[:4] for _ in range(70)])
    assert tpu.tile_height(chosen.size, EXPERTS) == 64  # weights are widened, not sums scaled
    compare(chosen)


@pytest.mark.parametrize("height", [8, 32])
def test_products_are_exact(height: int) -> None:
    """Every code under very small and very large scales, read out by rows that have a single 1."""
    n, k = 128, 256
    codes = jnp.asarray(np.add.outer(np.arange(n), np.arange(k)) % 16, jnp.uint8)
    scale = np.resize(np.asarray([20, 64, 100, 120, 127, 130, 190, 240], np.uint8), (n, k // 32))
    leaf = {"weight": quant.pack_fp4(codes), "scale": jnp.asarray(scale)}
    want = np.asarray(quant.dequantize_weight(leaf, jnp.float32)).T.reshape(-1, height, n)
    packed = {name: x[None, None] for name, x in moe.pack(leaf).items()}
    x = jnp.eye(k, dtype=jnp.bfloat16).reshape(-1, height, k)
    groups = group_rows(jnp.zeros((k, 1), jnp.int32), 1, height)
    got = tpu._call(
        tpu._down, x, (packed,), None, groups=groups._replace(expert=groups.expert[: k // height]), layer=0,
        tiles=k // height, interpret=True, name="exact",
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)


def test_q8_is_the_quantiser() -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(16, 128)) * np.exp2(rng.integers(-20, 12, (16, 128)))
    x = jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)

    def kernel(x_ref, out_ref):
        out_ref[...] = tpu._q8(x_ref[...])

    got = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), interpret=True)(x)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(quant.fake_q8(x)))


def test_errors_name_the_argument() -> None:
    x, weights = tokens(2, 1)
    chosen = jnp.zeros((2, 1), jnp.int32)
    good = dict(zip(("x", "chosen", "weights", "w1", "w3", "w2"), (x, chosen, weights, *leaves("fp4")), strict=True))
    bad = [
        ("x", x.astype(jnp.float32), "x is float32"),
        ("chosen", chosen.astype(jnp.int16), "chosen.dtype is int16"),
        ("weights", weights[:1], "weights.shape"),
        ("w3", {"weight": jnp.zeros((LAYERS, EXPERTS, INTER, HIDDEN))}, "w3 is {'weight': 'float32'}"),
        ("w2", leaves("bf16")[2], "storage is"),
        ("w1", {name: a[..., :-1] for name, a in leaves("fp4")[0].items()}, "inter is 127"),
        ("w2", {name: a[:1] for name, a in leaves("fp4")[2].items()}, "w2.words.shape"),
    ]
    for name, value, message in bad:
        with pytest.raises(KernelError, match=r"moe\.experts") as raised:
            moe.experts(**{**good, name: value}, layer=0, limit=LIMIT, implementation="reference")
        assert message in str(raised.value)
    with pytest.raises(KernelError, match="fp4_released"):
        moe.experts(x, chosen, weights, *leaves("released"), 0, limit=LIMIT, implementation="interpret")
    with pytest.raises(KernelError, match="implementation='fast'"):
        moe.experts(**good, layer=0, limit=LIMIT, implementation="fast")
    with pytest.raises(KernelError, match=r"moe\.pack: leaf"):
        moe.pack(leaves("bf16")[0])


def test_reference_reads_every_storage_alike() -> None:
    x, weights = tokens(5, 2)
    chosen = jnp.asarray(list(itertools.islice(itertools.combinations(range(EXPERTS), 2), 5)), jnp.int32)
    want = run(x, chosen, weights, 0, "released", "reference")
    for storage in ("fp4", "fp8", "bf16"):
        assert_close(run(x, chosen, weights, 0, storage, "reference"), want)
