"""Engram tables in a step: their gradients come as rows, and go to the devices that hold those rows.

On a mesh either every device gets all of them and keeps its own, where they are few, or they travel in rounds.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from dsv41_jax import sharded_step, sharding
from dsv41_jax.parallel import AXES
from dsv41_jax.training.sinkhorn import sum_duplicates, update_rows, update_visited_rows
from dsv41_jax.training.table_rounds import visit_rows

if TYPE_CHECKING:
    from dsv41_jax.training.step import Trainer


GATHER_BYTES = 64 << 20  # of the gradients of all devices together; more travel in rounds


def gathers(ids: int, width: int) -> bool:
    """Whether every device is given all row gradients of a step, `ids` of them on all devices together."""
    return 4 * ids * width <= GATHER_BYTES


def table_spec(mesh: Mesh, table: Array) -> Spec:
    """Where a table (padded) lies on a mesh, its momentum likewise."""
    return sharding.spec_of("table", ("memory",), table.shape, sharding.layout_of(mesh))


def table_gradients(memory: dict[str, Array], by_row: dict[str, Array], parts: int) -> dict[str, tuple[Array, Array]]:
    """Row numbers int32 [n] and gradients float32 [n, width] of each table.

    Args:
        memory: row numbers [B, T, columns]. by_row: [B, T, columns, width], or [parts, B / parts, T, columns, width] of
            a batch that was worked on in parts.
    """
    found = {}
    for name, gradients in by_row.items():
        if parts > 1:
            gradients = jnp.moveaxis(gradients, 0, 1).reshape(*memory[name].shape, -1)
        found[name] = memory[name], gradients
    return found


def _flat(ids: Array, gradients: Array) -> tuple[Array, Array]:
    return ids.reshape(-1), gradients.reshape(-1, gradients.shape[-1])


def _of_all(trainer: "Trainer", ids: Array, gradients: Array) -> tuple[Array, Array]:
    """Those of all devices, inside `shard_map`."""
    axes = trainer.parallel.token_axes
    return tuple(jax.lax.all_gather(x, axes, axis=0, tiled=True) for x in _flat(ids, gradients))


def sparse_norm(trainer: "Trainer", name: str, ids: Array, gradients: Array) -> Array:
    """Square of the norm of a table's gradient; gradients of the same row are summed first, those that travel in rounds
    by device only.
    """
    rows = trainer.table_rows(name)
    if trainer.mesh is None:
        return jnp.sum(jnp.square(sum_duplicates(*_flat(ids, gradients), rows)[1]))
    share = -(-rows // trainer.mesh.size)
    together = gathers(ids.size, gradients.shape[-1])

    def local(ids: Array, gradients: Array) -> Array:
        if not together:
            own = sum_duplicates(*_flat(ids, gradients), rows)[1]
            return jax.lax.psum(jnp.sum(jnp.square(own)), trainer.parallel.token_axes)
        ids, gradients = _of_all(trainer, ids, gradients)
        own = sum_duplicates(ids - jax.lax.axis_index(AXES) * share, gradients, share)[1]
        return jax.lax.psum(jnp.sum(jnp.square(own)), AXES)

    by_rows = (sharded_step.ROWS,) * 2
    return jax.shard_map(local, mesh=trainer.mesh, in_specs=by_rows, out_specs=Spec(), check_vma=False)(ids, gradients)


def update_table(
    trainer: "Trainer",
    name: str,
    table: Array,
    momentum: Array,
    ids: Array,
    gradients: Array,
    rate: Array,
    taken: Array,
) -> tuple[Array, Array]:
    """Table and momentum after a step, see `sinkhorn.update_rows`; unchanged where `taken` is false."""
    rows, settings = trainer.table_rows(name), trainer.settings
    if trainer.mesh is None:
        return update_rows(table, momentum, *_flat(ids, gradients), rate, settings, apply=taken)

    together = gathers(ids.size, gradients.shape[-1])

    def local(table: Array, momentum: Array, ids: Array, gradients: Array, rate: Array, taken: Array):
        if not together:
            share, flat = len(table), _flat(ids, gradients)

            def visit(body: Callable[[Array, Array, Array], Array], x: Array) -> Array:
                return visit_rows(trainer.parallel, share, *flat, body, x)

            return update_visited_rows(table, momentum, visit, rate, settings, rows=rows, axes=AXES, apply=taken)
        return update_rows(
            table,
            momentum,
            *_of_all(trainer, ids, gradients),
            rate,
            settings,
            rows=rows,
            first_row=jax.lax.axis_index(AXES) * len(table),
            axes=AXES,
            apply=taken,
        )

    where = table_spec(trainer.mesh, table)
    by_rows = sharded_step.ROWS
    step = jax.shard_map(
        local,
        mesh=trainer.mesh,
        in_specs=(where, where, by_rows, by_rows, Spec(), Spec()),
        out_specs=(where, where),
        check_vma=False,
    )
    return step(table, momentum, ids, gradients, rate, taken)
