"""What is run with eight devices by test_mesh_parts.py: the exchanges, each against the same thing on one device."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

from dsv41_jax import sharding
from dsv41_jax.checkpoint.names import flatten, nest
from dsv41_jax.config import load_config
from dsv41_jax.engram import distant_rows
from dsv41_jax.expert_rounds import round_capacity
from dsv41_jax.moe import MoE
from dsv41_jax.numerics import FLOAT32, RELEASED, Numerics
from dsv41_jax.parallel import AXES, CONTEXT, ROW_AXES, Parallel
from dsv41_jax.training.init import init_params
from pallas_kernels import moe as moe_kernels

HIDDEN, INTER, EXPERTS, TOPK = 64, 64, 8, 2
ROWS, TOKENS = 8, 16
LAYOUTS = [sharding.Layout(2, 1, 1), sharding.Layout(1, 2, 2), sharding.Layout(2, 2, 2), sharding.Layout(8, 1, 1)]


def mesh_of(layout: sharding.Layout) -> jax.sharding.Mesh:
    return layout.mesh(jax.devices()[: layout.devices])


def module(numerics: Numerics, experts: int = EXPERTS) -> MoE:
    return MoE(experts, TOPK, INTER, "sqrtsoftplus", True, 1.5, 10.0, numerics)


def spread_moe(params: dict, x: jax.Array, numerics: Numerics, parallel: Parallel, experts: int = EXPERTS):
    """The module on a mesh; experts that do not divide are padded."""
    layout = sharding.Layout(parallel.data, parallel.context, parallel.tensor)
    stacked = {("layers", "ffn", *path): leaf[None] for path, leaf in flatten(params)}
    for path, leaf in stacked.items():
        shape = sharding.padded_shape(path, leaf.shape, layout, False)
        stacked[path] = jnp.pad(leaf, [(0, n - m) for n, m in zip(shape, leaf.shape, strict=True)])
    specs = sharding.param_specs(nest(stacked), layout)["layers"]["ffn"]
    padded = jax.tree.map(lambda leaf: leaf[0], nest(stacked)["layers"]["ffn"])
    specs = jax.tree.map(lambda spec: P(*spec[1:]), specs, is_leaf=lambda spec: isinstance(spec, P))
    tokens = P(ROW_AXES, CONTEXT) if parallel.split_block else P(ROW_AXES)
    local = lambda params, x: module(numerics.spread(parallel), experts).apply({"params": params}, x)[0]  # noqa: E731
    step = jax.shard_map(local, mesh=mesh_of(layout), in_specs=(specs, tokens), out_specs=tokens, check_vma=False)
    return np.asarray(jax.jit(step)(padded, x))


def parallels(layout: sharding.Layout, dispatches: tuple[str, ...]):
    for dispatch, split in itertools.product(dispatches, (False, True)[: layout.context]):
        yield Parallel(*layout.sizes, split, dispatch)


@functools.cache
def float_params(experts: int = EXPERTS) -> dict:
    x = jnp.zeros((1, 2, HIDDEN))
    return jax.jit(module(FLOAT32, experts).init)(jax.random.key(0), x)["params"]


def biased(params: dict, bias: np.ndarray) -> dict:
    return {**params, "gate": {**params["gate"], "bias": jnp.asarray(bias, jnp.float32)}}


def imbalance() -> None:
    """Whatever the load, `all_to_all` and `gather` differ from one device by the order of a float32 sum: tiles have
    other heights, for which some CPUs multiply in another order.
    """
    x = jax.random.normal(jax.random.key(1), (ROWS, TOKENS, HIDDEN))
    loads = {
        "as it comes": np.zeros(EXPERTS),
        "all tokens to two experts of one device": np.where(np.arange(EXPERTS) < 2, 100.0, 0.0),
        "all tokens to the last expert and another": np.where(np.arange(EXPERTS) == EXPERTS - 1, 100.0, 0.0),
    }
    # All pairs of a device for one other device take several rounds.
    assert round_capacity(TOKENS * TOPK, 8) < TOKENS * TOPK
    for name, bias in loads.items():
        params = biased(float_params(), bias)
        wanted, chosen = jax.jit(module(FLOAT32).apply)({"params": params}, x)
        if "two" in name:
            assert set(np.unique(chosen)) == {0, 1}
        for layout in LAYOUTS:
            for parallel in parallels(layout, ("gather", "all_to_all")):
                got = spread_moe(params, x, FLOAT32, parallel)
                allowed = 1e-6 * np.abs(wanted).max()
                np.testing.assert_allclose(got, wanted, atol=allowed, rtol=0, err_msg=f"{name}, {parallel}")


def padding() -> None:
    """Six experts on eight or four devices."""
    x = jax.random.normal(jax.random.key(2), (ROWS, TOKENS, HIDDEN))
    wanted, _ = jax.jit(module(FLOAT32, 6).apply)({"params": float_params(6)}, x)
    for layout in LAYOUTS[1:]:
        for parallel in parallels(layout, ("gather", "all_to_all")):
            got = spread_moe(float_params(6), x, FLOAT32, parallel, 6)
            np.testing.assert_allclose(got, wanted, atol=1e-6, rtol=0, err_msg=str(parallel))


def random_stored(random: np.random.Generator) -> dict:
    """Parameters in stored forms: packed FP4 experts stacked over one layer, FP8 matrices of the shared one."""

    def scales(*shape: int) -> jax.Array:
        return jnp.asarray(random.integers(120, 124, shape).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu))

    def fp4(n: int, k: int) -> dict:
        codes = jnp.asarray(random.integers(0, 256, (1, EXPERTS, n, k // 2)).astype(np.uint8))
        pack = jax.vmap(jax.vmap(moe_kernels.pack))
        return pack({"weight": codes, "scale": scales(1, EXPERTS, n, k // 32)})

    def fp8(n: int, k: int) -> dict:
        weight = jnp.asarray(random.normal(size=(1, n, k)).astype(ml_dtypes.float8_e4m3fn))
        return {"weight": weight, "scale": scales(1, n // 32, k // 32)}

    shapes = {"w1": (INTER, HIDDEN), "w3": (INTER, HIDDEN), "w2": (HIDDEN, INTER)}
    return {
        "gate": float_params()["gate"],
        "experts": {name: fp4(*shape) for name, shape in shapes.items()},
        "shared_experts": {name: fp8(*shape) for name, shape in shapes.items()},
    }


def kernels() -> None:
    """FP4 experts and FP8 matrices by (interpreted) kernels: `all_to_all` has the bits of one device."""
    params = random_stored(np.random.default_rng(3))
    x = jax.random.normal(jax.random.key(4), (8, 4, HIDDEN), jnp.bfloat16)
    numerics = RELEASED.computed_by("interpret")

    def layer(numerics: Numerics, params: dict, x: jax.Array) -> jax.Array:
        read = {name: {m: {**leaf, "layer": 0} for m, leaf in params[name].items()} for name in params if "exp" in name}
        return module(numerics).apply({"params": {**params, **read}}, x)[0].astype(jnp.float32)

    wanted = np.asarray(jax.jit(functools.partial(layer, numerics))(params, x))
    layout = sharding.Layout(2, 1, 2)
    for name, matrix in params["shared_experts"].items():
        for kind, leaf in matrix.items():  # 64 hidden columns become 2 x 128
            shape = sharding.padded_shape(("shared_experts", name, kind), leaf.shape, layout, True)
            words = [(0, n - m) for n, m in zip(shape, leaf.shape, strict=True)]
            bits = jnp.pad(jax.lax.bitcast_convert_type(leaf, jnp.uint8), words)
            matrix[kind] = jax.lax.bitcast_convert_type(bits, leaf.dtype)
    specs = {
        "gate": jax.tree.map(lambda _: P(), params["gate"]),
        "experts": jax.tree.map(lambda _: P(None, AXES), params["experts"]),
        "shared_experts": jax.tree.map(lambda _: P(), params["shared_experts"]),
    }
    for name in ("w1", "w3", "w2"):
        specs["shared_experts"][name] = {"weight": P(None, "tensor"), "scale": P(None, "tensor")}
    for dispatch, allowed in (("all_to_all", 0.0), ("gather", 2.0**-7)):  # a bf16 rounding
        local = functools.partial(layer, numerics.spread(Parallel(*layout.sizes, False, dispatch)))
        rows = P(ROW_AXES)
        step = jax.shard_map(local, mesh=mesh_of(layout), in_specs=(specs, rows), out_specs=rows, check_vma=False)
        got = np.asarray(jax.jit(step)(params, x))
        np.testing.assert_allclose(got, wanted, atol=allowed * np.abs(wanted).max(), rtol=0, err_msg=dispatch)


def engram_rows() -> None:
    """Rows of a table that is split over all devices, in stored types: every bit."""
    random = np.random.default_rng(5)
    ids = random.integers(0, 64, (ROWS, TOKENS, 3)).astype(np.int32)
    for dtype, width in ((np.float32, 32), (ml_dtypes.float8_e4m3fn, 32), (ml_dtypes.float8_e8m0fnu, 1)):
        table = random.integers(1, 100, (64, width)).astype(np.float32).astype(dtype)
        for layout in LAYOUTS:
            for parallel in parallels(layout, ("gather",)):
                tokens = P(ROW_AXES, CONTEXT) if parallel.split_block else P(ROW_AXES)
                local = functools.partial(distant_rows, parallel)
                mesh, specs = mesh_of(layout), (P(AXES), tokens)
                step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)
                got = np.asarray(jax.jit(step)(table, ids))
                np.testing.assert_array_equal(got.view(np.uint8), table[ids].view(np.uint8), err_msg=str(parallel))


def made_in_shards() -> None:
    """Caches and parameters are made where they live, and are what one device makes."""
    config = load_config(Path(__file__).parent.parent / "configs/tiny.py")
    layout = sharding.Layout(2, 2, 2)
    mesh = mesh_of(layout)
    cache = sharding.zero_cache(config, RELEASED, mesh, 6, 256)
    abstract = sharding.abstract_cache(config, RELEASED, mesh, 6, 256)
    for leaf, wanted in zip(jax.tree.leaves(cache), jax.tree.leaves(abstract), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (wanted.shape, wanted.dtype, wanted.sharding)
    # Six rows on four devices: two each, the last two rows empty; page ids begin anew on every device.
    assert np.asarray(cache.page_table).tolist() == 4 * [[0, 1], [2, 3]]
    make = functools.partial(init_params, config)
    params, whole = sharding.init(make, jax.random.key(0), mesh), dict(flatten(jax.jit(make)(jax.random.key(0))))
    specs = dict(flatten(sharding.param_specs(params, layout)))
    for path, leaf in flatten(params):
        assert leaf.sharding.is_equivalent_to(sharding.shardings(mesh, specs[path]), leaf.ndim), path
        unpadded = tuple(map(slice, whole[path].shape))  # of 664 Engram rows 660, of 8 draft experts 4
        np.testing.assert_array_equal(np.asarray(leaf)[unpadded], whole[path], err_msg=str(path))
        assert np.count_nonzero(leaf) == np.count_nonzero(whole[path]), path
