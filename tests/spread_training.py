"""Two training steps of the tiny training model on a mesh, as each process of a run does them."""

from __future__ import annotations

import json

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from dsv41_jax import distributed, sharding
from dsv41_jax.checkpoint.names import flatten
from dsv41_jax.numerics import FLOAT32
from dsv41_jax.training.step import backbone_step, new_state, spread_batch, state_shardings
from tiny_training import tiny_params, tiny_training_config, tiny_windows

CONFIG, NUMERICS = tiny_training_config(), FLOAT32
# Steps in proportion to gradients: where one is nearly zero Adam would make a full step of its noise.
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
windows = tiny_windows(CONFIG, batch=4)


def make_params() -> dict:
    return {name: leaf for name, leaf in tiny_params(CONFIG).items() if name != "mtp"}


def numbers(metrics: dict) -> dict[str, float]:
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


def train(mesh: Mesh, result: str | None) -> None:
    """Train, check that everything stays where the rules put it, and write parameters and metrics to a file."""
    distributed.connect(mesh)
    params = make_params()
    where = state_shardings(params, OPTIMIZER, mesh)
    put = jax.tree.map(
        lambda x, place: jax.make_array_from_callback(x.shape, place, x.__getitem__), params, where.params
    )
    state = new_state(put, OPTIMIZER, 0, mesh)
    step, metrics = backbone_step(CONFIG, NUMERICS, OPTIMIZER, mesh=mesh), []
    for i in range(2):
        state, own = step(state, spread_batch(windows(i).arrays(), mesh))
        metrics.append(numbers(own))
    for (path, leaf), place in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(where), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim), path
    momentum = state.opt_state[0].trace["layers"]["ffn"]["experts"]["w1"]["weight"]
    assert momentum.addressable_shards[0].data.shape[1] == CONFIG.n_routed_experts // mesh.size
    whole = jax.jit(lambda x: x, out_shardings=sharding.shardings(mesh, jax.sharding.PartitionSpec()))(state.params)
    if result is not None:
        arrays = {".".join(path): np.asarray(leaf) for path, leaf in flatten(whole)}
        np.savez(result, metrics=json.dumps(metrics), **arrays)
