"""Two training steps of the tiny training model on a mesh, as each process of a run does them."""

from __future__ import annotations

import json

import jax
import numpy as np
from jax.sharding import Mesh

from dsv41_jax import distributed, sharding
from dsv41_jax.checkpoint.names import flatten, nest
from dsv41_jax.training.shards import batch_on_mesh, own_shard
from dsv41_jax.training.state import state_shardings
from tiny_training import tiny_params, tiny_training_config, tiny_windows
from training_run import tiny_trainer

CONFIG = tiny_training_config()
ROWS = 4
# A sign of a tiny number decides an update of AdamW, so the first two moments see it smoothed; Muon needs no help.
windows = tiny_windows(CONFIG, batch=ROWS)


def make_params() -> dict:
    return tiny_params(CONFIG)


def numbers(metrics: dict) -> dict[str, float]:
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


def on_mesh(params: dict, mesh: Mesh) -> dict:
    """Parameters in their shards, experts and tables padded; every process calls it with the whole of them."""
    layout, padded = sharding.layout_of(mesh), {}
    for path, x in flatten(params):
        shape = sharding.padded_shape(path, x.shape, layout, False)
        padded[path] = np.pad(x, [(0, n - m) for n, m in zip(shape, x.shape, strict=True)])
    places = dict(flatten(sharding.shardings(mesh, sharding.param_specs(nest(padded), layout))))
    return nest(
        {path: jax.make_array_from_callback(x.shape, places[path], x.__getitem__) for path, x in padded.items()}
    )


def train(mesh: Mesh, result: str | None) -> None:
    """Train, check that everything stays where the rules put it, and write parameters and metrics to a file."""
    distributed.connect(mesh)
    trainer, spread = tiny_trainer(mesh), on_mesh(make_params(), mesh)
    state = trainer.new_state(spread, 0)
    where = state_shardings(spread, trainer.parts, trainer.optimizer, mesh)
    shard, shards = own_shard(mesh, ROWS)
    own = slice(shard * ROWS // shards, (shard + 1) * ROWS // shards)
    step, metrics = trainer.step(), []
    for i in range(2):
        batch = jax.tree.map(lambda x: x[own], windows(i).arrays())
        state, found = step(state, batch_on_mesh(batch, mesh))
        metrics.append(numbers(found))
    for (path, leaf), place in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(where), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim), path
    table = state.momentum["l0"]
    assert table.addressable_shards[0].data.shape[0] == -(-trainer.table_rows("l0") // mesh.size)
    whole = jax.jit(lambda x: x, out_shardings=sharding.shardings(mesh, jax.sharding.PartitionSpec()))(state.params)
    if result is not None:
        arrays = {".".join(path): np.asarray(leaf) for path, leaf in flatten(whole)}
        np.savez(result, metrics=json.dumps(metrics), **arrays)
