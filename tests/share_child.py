"""One process of a run whose devices sum the parts of an Engram table that its processes own; started by
test_engram_share.py.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as Spec

from dsv41_jax import distributed
from dsv41_jax.engram_share import EngramShare, PartSender, arranged, own_range, summed_rows
from dsv41_jax.engram_tables import HostTable
from dsv41_jax.parallel import AXES, CONTEXT, ROW_AXES, Parallel
from dsv41_jax.sharding import Layout

ROWS, B, T, COLUMNS = 1001, 8, 6, 5


def main(coordinator: str, processes: str, process: str) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x7F, (ROWS, 32), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    scales = rng.integers(120, 130, (ROWS, 1), dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    ids = rng.integers(0, ROWS, (3, B, T, COLUMNS))
    with distributed.initialize(coordinator, int(processes), int(process)) as here:
        first, stop = own_range(ROWS, here.count, here.index)
        share = EngramShare(HostTable(codes[first:stop], scales[first:stop]), first, ROWS)
        mesh = Layout(2, 2, 2).mesh()
        send = PartSender(mesh)
        for split in (False, True):
            parallel = Parallel(2, 2, 2, split_block=split)

            def local(part, parallel=parallel):
                return summed_rows(parallel, part, share.form, jnp.bfloat16)

            spec = Spec(ROW_AXES, CONTEXT) if split else Spec(ROW_AXES)
            step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=Spec(AXES), out_specs=spec, check_vma=False))
            for block in ids:  # the zeros of the other devices are used again
                rows = step(send(arranged(share.rows(block), parallel)))
                wanted = HostTable(codes, scales).rows(block)
                assert rows.shape == wanted.shape
                for shard in rows.addressable_shards:
                    assert np.asarray(shard.data).tobytes() == wanted[shard.index].tobytes()
        share.close()
    print("rows are equal")


if __name__ == "__main__":
    main(*sys.argv[1:4])
