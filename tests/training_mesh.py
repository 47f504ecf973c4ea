"""What test_training_mesh.py runs with eight devices: training steps on a mesh against the same on one device."""

from __future__ import annotations

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as Spec

from dsv41_jax import sharding
from dsv41_jax.checkpoint.names import flatten
from dsv41_jax.parallel import AXES, Parallel
from dsv41_jax.training import table_step
from dsv41_jax.training.optimizer_settings import OptimizerSettings
from dsv41_jax.training.shards import batch_on_mesh
from dsv41_jax.training.sinkhorn import update_rows, update_visited_rows
from dsv41_jax.training.table_rounds import fetch_rows, visit_rows
from spread_training import on_mesh
from tiny_training import tiny_params, tiny_training_config, tiny_windows
from training_run import tiny_trainer

CONFIG = tiny_training_config()
ROWS = 8


def trained(mesh, params: dict, batches: list[dict], parts: int, stage: str) -> tuple[dict, list[dict]]:
    """Parameters and metrics after a step on each batch."""
    # Some gradients are zero but for rounding, and AdamW would make whole steps of that without an epsilon.
    trainer = tiny_trainer(mesh, stage=stage, epsilon=1e-6)
    trainer = dataclasses.replace(trainer, losses=dataclasses.replace(trainer.losses, parts=parts))
    state = trainer.new_state(on_mesh(params, mesh) if mesh else jax.tree.map(jnp.asarray, params), 0)
    step, metrics = trainer.step(), []
    for batch in batches:
        state, found = step(state, batch_on_mesh(batch, mesh) if mesh else batch)
        metrics.append({name: float(value) for name, value in found.items()})
    return dict(flatten(jax.device_get(state.params))), metrics


def same_steps(mesh: str, stage: str, rounds: str, parts: str) -> None:
    """All parts of the stage train, tables by gathering or in rounds; every token goes to the same two experts."""
    params = tiny_params(CONFIG)
    params["layers"]["ffn"]["gate"]["bias"][:, :2] += 5.0  # two of four experts get everything
    windows = tiny_windows(CONFIG, batch=ROWS)
    batches = [windows(i).arrays() for i in range(2)]
    want, expected = trained(None, params, batches, 1, stage)
    limit = 0 if rounds == "rounds" else 1 << 40
    with mock.patch.object(table_step, "GATHER_BYTES", limit):
        got, metrics = trained(sharding.Layout.parse(mesh).mesh(), params, batches, int(parts), stage)
    for found, wanted in zip(metrics, expected, strict=True):
        assert found["dropped"] == 0 and found["load_max"] == wanted["load_max"] > 1.9
        for name, value in wanted.items():
            # Row gradients that travel in rounds count apart by device in the norm.
            allowed = 0.2 if name == "grad_norm" and rounds == "rounds" else 1e-4
            np.testing.assert_allclose(found[name], value, rtol=allowed, atol=1e-6, err_msg=name)
    for path, value in want.items():
        cut = got[path][tuple(slice(0, n) for n in value.shape)]
        moved = np.abs(value - np.asarray(dict(flatten(tiny_params(CONFIG)))[path])).max()
        # Of what a step moves: sums in another order, which the sign-like updates of AdamW do not see.
        np.testing.assert_allclose(cut, value, atol=2e-3 * moved + 1e-6, rtol=0, err_msg=".".join(path))


def table_in_rounds() -> None:
    """Rows fetched, and a table updated, as on one device; half of all gradients are for one row."""
    mesh = sharding.Layout.parse("2x2x2").mesh()
    parallel = Parallel(2, 2, 2, False, "all_to_all")
    rows, width, n = 50, 8, 40
    share = -(-rows // 8)
    generator = np.random.default_rng(0)
    table = np.pad(generator.standard_normal((rows, width)).astype(np.float32), [(0, 8 * share - rows), (0, 0)])
    momentum = np.pad(generator.standard_normal((rows, width)).astype(np.float32), [(0, 8 * share - rows), (0, 0)])
    ids = generator.integers(0, rows, (4, n)).astype(np.int32)
    ids[:, ::2] = 3
    gradients = generator.standard_normal((4, n, width)).astype(np.float32)
    settings = OptimizerSettings()

    def local(table, momentum, ids, gradients):
        fetched = fetch_rows(parallel, table, ids)

        def visit(body, x):
            return visit_rows(parallel, share, ids.reshape(-1), gradients.reshape(-1, width), body, x)

        return fetched, *update_visited_rows(table, momentum, visit, 0.1, settings, rows=rows, axes=AXES, tile=3)

    by_rows, split = Spec(("data", "tensor")), Spec(AXES)
    step = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(split, split, by_rows, by_rows),
            out_specs=(by_rows, split, split),
            check_vma=False,
        )
    )
    fetched, got, got_momentum = step(table, momentum, ids, gradients)
    np.testing.assert_array_equal(fetched, table[ids])
    want, want_momentum = update_rows(
        jnp.asarray(table[:rows]),
        jnp.asarray(momentum[:rows]),
        jnp.asarray(ids.reshape(-1)),
        jnp.asarray(gradients.reshape(-1, width)),
        0.1,
        settings,
    )
    np.testing.assert_allclose(got[:rows], want, atol=2e-6)
    np.testing.assert_allclose(got_momentum[:rows], want_momentum, atol=2e-6)
    np.testing.assert_array_equal(got[rows:], 0)
