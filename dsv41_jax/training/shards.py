"""Rows of a batch and the processes that make them."""

import jax
import numpy as np
from jax.sharding import Mesh

from dsv41_jax import sharded_step, sharding


def own_shard(mesh: Mesh | None, rows: int, parts: int = 1) -> tuple[int, int]:
    """(shard, shards): this process makes rows [shard, shard + 1) * rows / shards of every batch, which is worked on in
    so many parts.

    Raises:
        ShardingError: the rows of a part are no multiple of the devices that share rows, or the rows of this process
            are no stretch: the mesh's devices are not in the order of the processes.
    """
    if mesh is None:
        return 0, 1
    layout = sharding.layout_of(mesh)
    devices = layout.data * layout.tensor
    if rows % (devices * parts):
        of_parts = f", times accumulate={parts}," if parts > 1 else ""
        raise sharding.ShardingError(
            f"data.batch={rows}: a multiple of the {devices} devices of mesh {layout} that share rows{of_parts} is "
            "needed"
        )
    indices = sharding.shardings(mesh, sharded_step.ROWS).addressable_devices_indices_map((rows,))
    starts = sorted({index[0].indices(rows)[0] for index in indices.values()})
    step = rows // devices
    if starts != list(range(starts[0], starts[0] + step * len(starts), step)) or starts[0] % (step * len(starts)):
        raise sharding.ShardingError(
            f"mesh {layout}: the rows of process {jax.process_index()} are no stretch of a batch; give the devices in "
            "the order of the processes"
        )
    return starts[0] // (step * len(starts)), devices // len(starts)


def batch_on_mesh(batch: dict, mesh: Mesh) -> dict:
    """A batch on the devices of a mesh, split by rows. Every process gives its own rows."""
    where = sharding.shardings(mesh, sharded_step.ROWS)
    if jax.process_count() == 1:
        return jax.device_put(batch, where)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(where, np.asarray(x)), batch)
