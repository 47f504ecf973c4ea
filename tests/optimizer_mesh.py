"""What test_training_optimizer.py runs with eight devices: updates on a mesh against the same on one device."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from dsv41_jax import sharding
from dsv41_jax.checkpoint.names import flatten, nest
from dsv41_jax.checkpoint.released import abstract_params
from dsv41_jax.config import load_config
from dsv41_jax.mesh_layout import Layout
from dsv41_jax.numerics import FLOAT32
from dsv41_jax.parallel import AXES
from dsv41_jax.training.optimizer import make_optimizer
from dsv41_jax.training.optimizer_settings import OptimizerSettings
from dsv41_jax.training.schedule import Schedule
from dsv41_jax.training.sinkhorn import update_rows

SETTINGS = OptimizerSettings(peak_rate=0.02, warmup_steps=0, schedule_unit="steps", decay_start=9, decay_end=9)
# A leaf of each rule and of each way to be split.
LEAVES = r"^(embed|head|norm)\.weight|^layers\.(attn\.(wq_b|wo_b|attn_sink)|ffn\.(gate|experts\.w2))|l1\.wkv"


def same_updates(mesh_name: str) -> None:
    """Two steps of the dense optimizer, its state where the parameters are, and of a table split over all devices."""
    layout = Layout.parse(mesh_name)
    mesh = layout.mesh(jax.devices()[: layout.devices])
    _dense(mesh, layout)
    _table(mesh)


def _dense(mesh: jax.sharding.Mesh, layout: Layout) -> None:
    config = load_config(Path(__file__).parents[1] / "configs/tiny.py")
    optimizer = make_optimizer(SETTINGS, config, Schedule.of(SETTINGS, 1))
    random = np.random.default_rng(0)
    shapes = {p: x.shape for p, x in flatten(abstract_params(config, FLOAT32)) if re.search(LEAVES, ".".join(p))}
    params, *gradients = (nest({p: random.standard_normal(s, np.float32) for p, s in shapes.items()}) for _ in range(3))

    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params, step=0)
        return jax.tree.map(jnp.add, params, updates), state

    places = sharding.shardings(mesh, sharding.param_specs(params, layout))
    kept = sharding.shardings(mesh, sharding.optimizer_specs(optimizer, params, layout))
    split = [leaf for leaf in jax.tree.leaves(kept) if any(leaf.spec)]
    assert len(split) >= 6, kept  # the momentum of every leaf that is split
    once = jax.jit(step)
    spread = jax.jit(step, in_shardings=(places, kept, places), out_shardings=(places, kept))
    one, many = (params, optimizer.init(params)), (params, optimizer.init(params))
    many = jax.device_put(many, (places, kept))
    for gradient in gradients:
        one, many = once(*one, gradient), spread(*many, jax.device_put(gradient, places))
    for (path, wanted), (_, got) in zip(flatten(one[0]), flatten(many[0]), strict=True):
        # Sums in another order: 1e-4 of an update of 0.02 * 0.18 * 10, as Newton-Schulz enlarges it.
        np.testing.assert_allclose(got, wanted, atol=5e-5, err_msg=".".join(path))


def _table(mesh: jax.sharding.Mesh) -> None:
    """61 rows on eight devices: 8 each, 3 of padding."""
    random = np.random.default_rng(1)
    table = np.zeros((64, 8), np.float32)
    table[:61] = random.standard_normal((61, 8))
    share = len(table) // mesh.size

    def local(table, momentum, ids, gradients):
        first = jax.lax.axis_index(AXES) * share
        return update_rows(table, momentum, ids, gradients, 0.01, SETTINGS, rows=61, first_row=first, axes=AXES, tile=3)

    by_rows = P(AXES)
    specs = (by_rows, by_rows, P(), P())
    spread = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(by_rows, by_rows), check_vma=False))
    once = jax.jit(functools.partial(update_rows, rate=0.01, settings=SETTINGS))
    one, many = (table[:61], jnp.zeros((61, 8))), (table, jnp.zeros((64, 8)))
    for _ in range(2):
        ids = random.integers(0, 61, 30).astype(np.int32)
        gradients = random.standard_normal((30, 8), np.float32)
        one, many = once(*one, ids, gradients), spread(*many, ids, gradients)
    np.testing.assert_allclose(many[0][:61], one[0], atol=1e-6)  # steps of 0.0255; float32 sums in another order
    np.testing.assert_allclose(many[1][:61], one[1], atol=1e-7)
    np.testing.assert_array_equal(many[0][61:], 0)
    assert not np.array_equal(one[0], table[:61])
