"""Where arrays live on a mesh: the rules table, what it refuses, and the document that shows it."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import dsv41_jax as ds
from dsv41_jax import placement_table, sharding
from dsv41_jax.checkpoint.names import flatten
from dsv41_jax.config import load_config
from dsv41_jax.expert_parallel import check_dispatch
from dsv41_jax.numerics import RELEASED
from dsv41_jax.parallel import AXES
from dsv41_jax.sharding import Layout, ShardingError

ROOT = Path(__file__).parent.parent
FLASH = load_config(ROOT / "configs/flash.py")


def abstract_mesh(layout: Layout) -> AbstractMesh:
    return AbstractMesh(layout.sizes, AXES)


def nbytes_of_a_device(tree) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_the_document_shows_the_table():
    shown = (ROOT / "docs/pods.md").read_text()
    assert placement_table.table(FLASH, Layout(16, 1, 4), 64, 131072) in shown


def test_every_rule_is_used_and_leads_to_the_mesh():
    names = [".".join(path) for path, _ in flatten(sharding.abstract(FLASH, RELEASED, abstract_mesh(Layout(4, 1, 4))))]
    for pattern, axes in sharding.PARAMETERS:
        assert any(sharding.fnmatch.fnmatchcase(name, pattern) for name in names), pattern
        assert {axis for axis in axes if axis} <= sharding.RULES.keys()
    assert {axis for axes in sharding.CACHE.values() for axis in axes if axis} <= sharding.RULES.keys()


@pytest.mark.parametrize("layout", [Layout(16, 1, 4), Layout(2, 2, 4), Layout(32, 1, 8), Layout(1, 1, 1)], ids=str)
def test_the_released_model_spreads(layout):
    """Experts, tables and pages fall with the devices, dense matrices with `tensor`."""
    params = sharding.abstract(FLASH, RELEASED, abstract_mesh(layout))
    leaf = dict(flatten(params))
    experts = leaf["layers", "ffn", "experts", "w1", "weight"]
    held = -(-384 // layout.devices)
    assert experts.shape[1] == held * layout.devices
    assert experts.sharding.shard_shape(experts.shape)[1] == held
    head = leaf["layers", "attn", "wq_b", "weight"]
    assert head.sharding.shard_shape(head.shape) == (40, 32768 // layout.tensor, 1280)
    cache = sharding.abstract_cache(FLASH, RELEASED, abstract_mesh(layout), 64, 131072)
    shards = layout.data * layout.tensor
    rows = -(-64 // shards)
    assert cache.window["codes"].sharding.shard_shape(cache.window["codes"].shape)[1] == rows
    words = cache.main_kv["r1"]["words"]
    assert words.sharding.shard_shape(words.shape)[1] == rows * 1024 * 72


def test_kernel_forms_have_the_same_shards():
    mesh = abstract_mesh(Layout(4, 1, 4))
    plain = sharding.abstract(FLASH, RELEASED, mesh)
    packed = sharding.abstract(FLASH, RELEASED.computed_by("tpu"), mesh)
    leaf = packed["layers"]["ffn"]["experts"]["w2"]
    assert set(leaf) == {"words", "scales"} and leaf["words"].sharding.spec == P(None, AXES)
    assert nbytes_of_a_device(packed) == pytest.approx(nbytes_of_a_device(plain), rel=0.02)


def test_experts_that_do_not_divide_are_padded():
    params = sharding.abstract(FLASH, RELEASED, abstract_mesh(Layout(64, 1, 4)))
    assert params["layers"]["ffn"]["experts"]["w1"]["weight"].shape[1] == 512
    assert params["layers"]["ffn"]["gate"]["weight"].shape[1] == 384  # nobody can choose the padding


def test_optimizer_state_lies_with_its_parameters():
    params = {"embed": {"weight": jnp.zeros((512, 128))}, "norm": {"weight": jnp.zeros(128)}}
    specs = sharding.optimizer_specs(optax.adam(1e-3), params, Layout(2, 1, 2))
    adam = specs[0]
    assert adam.mu["embed"]["weight"] == adam.nu["embed"]["weight"] == P(None, "tensor")
    assert adam.mu["norm"]["weight"] == adam.count == P()


# Refusals


def test_an_axis_is_used_once():
    with pytest.raises(ShardingError, match="x: two dimensions .* mesh axis .*tensor"):
        sharding.spec_of("x", ("row", "column"), (8, 8), Layout(2, 1, 2))


def test_a_dimension_must_divide():
    with pytest.raises(
        ShardingError, match=r"x: dimension 1 \(expert, 6\) is not a multiple of the 4 devices of mesh 2x1x2"
    ):
        sharding.spec_of("x", (None, "expert"), (1, 6), Layout(2, 1, 2))


@pytest.mark.parametrize("tensor", [3, 16])
def test_heads_split_in_groups(tensor):
    with pytest.raises(ShardingError, match=f"tensor={tensor} does not divide the model's 8 groups"):
        sharding.check_layout(FLASH, Layout(1, 1, tensor))


@pytest.mark.parametrize("text", ["", "4x4", "4x1x4x1", "axbxc", "4x-1x4", "0x1x1", "2x1x²"])
def test_bad_layouts(text):
    with pytest.raises(ShardingError, match="mesh"):
        Layout.parse(text)


def test_layouts_and_devices():
    assert Layout.parse("4x1x2") == Layout(4, 1, 2) and str(Layout(4, 1, 2)) == "4x1x2"
    with pytest.raises(ShardingError, match="mesh 4x1x2 has 8 places, but there are 1 devices"):
        Layout(4, 1, 2).mesh(jax.devices()[:1])
    foreign = Mesh(jax.devices()[:1], ("x",))
    with pytest.raises(
        ShardingError, match=r"mesh: Mesh with axes \('x',\); needed are \('data', 'context', 'tensor'\)"
    ):
        sharding.layout_of(foreign)
    explicit = jax.make_mesh((1, 1, 1), AXES, axis_types=(jax.sharding.AxisType.Explicit,) * 3)
    with pytest.raises(ShardingError, match="needed are Auto ones"):
        sharding.layout_of(explicit)
    with pytest.raises(ValueError, match="AbstractMesh has no devices"):
        ds.load("demo", mesh=abstract_mesh(Layout(1, 1, 1)))


@pytest.mark.parametrize(
    ("dispatch", "platform", "kind", "message"),
    [
        ("fast", "tpu", "TPU v5", "'fast' is unknown; choose one of gather, all_to_all, ragged"),
        ("ragged", "cpu", "cpu", "cpu has no ragged all-to-all"),
        ("ragged", "tpu", "TPU v5 lite", "TPU v5 lite has no ragged all-to-all"),
    ],
)
def test_exchanges_that_devices_do_not_have(dispatch, platform, kind, message):
    check_dispatch("ragged", "tpu", "TPU v6 lite")
    with pytest.raises(ValueError, match=message):
        check_dispatch(dispatch, platform, kind)
    with pytest.raises(ValueError, match="on a mesh only"):
        ds.load("demo", dispatch="gather")
