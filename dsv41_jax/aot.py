"""Ahead-of-time compilation for devices that are not there: TPUs through `libtpu`, CUDA GPUs through XLA.

`libtpu` compiles on any Linux machine. One device of a kind for now.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Without them libtpu looks for a TPU host and complains.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

TPU_TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}


@functools.cache
def one_chip(generation: str) -> NamedSharding:
    """Everything on one device of a TPU generation (a key of TPU_TOPOLOGIES)."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TPU_TOPOLOGIES[generation]).devices
    return NamedSharding(Mesh(np.array(devices[:1]), ("chip",)), PartitionSpec())


def compile_for(
    generation: str, function: Callable, *specs: Any, donate: int | Sequence[int] = ()
) -> jax.stages.Compiled:
    """`function` compiled for one device of a TPU generation from pytrees of `ShapeDtypeStruct`."""
    sharding = one_chip(generation)
    specs = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), specs)
    return jax.jit(function, donate_argnums=donate).lower(*specs).compile()
