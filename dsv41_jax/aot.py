"""Ahead-of-time compilation for devices that are not there: TPUs through `libtpu`, CUDA GPUs through XLA.

`libtpu` compiles on any Linux machine, and so does XLA with JAX's CUDA plugin, down to the machine code of a kernel:
shared memory and registers are checked against the named GPU. XLA normally times candidates on the device; without
one it must not, so programs for GPUs are compiled with the option xla_gpu_autotune_level=0 (nothing to set outside).
One device of a kind for now.
"""

import dataclasses
import functools
import os
import warnings
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
# Several processes may compile at a time: no device is taken.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")

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
    with jax.set_mesh(sharding.mesh):  # kernels ask which generation they are for
        lowered = jax.jit(function, donate_argnums=donate).lower(*specs)
    with warnings.catch_warnings():
        # The persistent cache keeps programs that only their device could load again.
        warnings.filterwarnings("ignore", message="Error reading persistent compilation cache entry")
        return lowered.compile()


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """What XLA wants to know of a GPU.

    Attributes:
        device: its name. capability: CUDA compute capability. cores: streaming multiprocessors.
        shared_memory: bytes that one block can use. memory, cache: bytes of HBM and L2. bandwidth: HBM bytes a second.
        clock: GHz.
    """

    device: str
    capability: tuple[int, int]
    cores: int
    shared_memory: int
    memory: int
    bandwidth: int
    cache: int
    clock: float

    def description(self) -> str:
        """XLA's text form (`GpuTargetConfigProto`)."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
                threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
                shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.shared_memory}
                shared_memory_per_core: {self.shared_memory + 1024}
                registers_per_core_limit: 65536 registers_per_block_limit: 65536
                core_count: {self.cores} fpus_per_core: 128 clock_rate_ghz: {self.clock}
                block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
                memory_bandwidth: {self.bandwidth} l2_cache_size: {self.cache} device_memory_size: {self.memory}
                cuda_compute_capability {{ major: {major} minor: {minor} }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 8 }}
            runtime_version {{ major: 12 minor: 9 patch: 0 }}
            device_description_str: "{self.device}"
        """


GPU_TARGETS = {
    "a100": GpuTarget("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 84929347584, 2039 * 10**9, 40 << 20, 1.41),
    "h100": GpuTarget("NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, 84929347584, 3352 * 10**9, 50 << 20, 1.98),
    "h200": GpuTarget("NVIDIA H200", (9, 0), 132, 232448, 150 * 10**9, 4800 * 10**9, 50 << 20, 1.98),
    "b200": GpuTarget("NVIDIA B200", (10, 0), 148, 232448, 190 * 10**9, 8000 * 10**9, 126 << 20, 1.965),
}


class NoCudaCompiler(RuntimeError):
    """JAX's CUDA plugin is not installed."""


@functools.cache
def one_gpu(name: str) -> NamedSharding:
    """Everything on one GPU of a kind (a key of GPU_TARGETS).

    Raises:
        ValueError: an unknown name. NoCudaCompiler: no CUDA plugin; says what to install.
    """
    if name not in GPU_TARGETS:
        raise ValueError(f"GPU {name!r} is unknown; choose one of {', '.join(GPU_TARGETS)}")
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name=name, target_config=GPU_TARGETS[name].description(), topology="1x1x1"
        )
    except NotImplementedError as error:
        raise NoCudaCompiler(
            "compiling for a CUDA GPU needs JAX's CUDA plugin, also on a machine without a GPU: "
            f'pip install "jax[cuda12]=={jax.__version__}" (or "dsv41-jax[cuda]")'
        ) from error
    return NamedSharding(Mesh(np.array(topology.devices[:1]), ("gpu",)), PartitionSpec())


def compile_for_gpu(
    name: str, function: Callable, *specs: Any, donate: int | Sequence[int] = ()
) -> jax.stages.Compiled:
    """`function` compiled for one GPU of a kind from pytrees of `ShapeDtypeStruct`; errors as in `one_gpu`."""
    sharding = one_gpu(name)
    specs = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), specs)
    lowered = jax.jit(function, donate_argnums=donate).lower(*specs)
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
