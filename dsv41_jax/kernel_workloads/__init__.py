"""What the kernels are checked and timed on: random inputs of every operation at given sizes, their bytes and FLOPs.

    for work in workloads("released", ["moe"]):
        arguments = work.make(jax.random.key(0))
        out = jax.jit(work.call, static_argnums=1)(arguments, "auto")

Inputs are made on the default device, packed as the caches and checkpoints keep them. `jax.eval_shape(work.make, key)`
describes them without making any.
"""

from collections.abc import Iterable

from dsv41_jax.kernel_workloads import attention, cache_writes, index, matmuls, streams
from dsv41_jax.kernel_workloads.sizes import RELEASED, TINY, Sizes
from dsv41_jax.kernel_workloads.workload import Comparison, Workload

__all__ = ["OPERATIONS", "SCALES", "Comparison", "Sizes", "Workload", "workloads"]

_BUILDERS = {
    "sparse_attention": attention.workloads,
    "indexer": index.workloads,
    "kv_write": cache_writes.workloads,
    "moe": matmuls.expert_workloads,
    "quantized_linear": matmuls.linear_workloads,
    "mhc": streams.workloads,
}
OPERATIONS = tuple(_BUILDERS)
SCALES = {"tiny": TINY, "released": RELEASED}


def workloads(scale: str = "released", operations: Iterable[str] = OPERATIONS) -> list[Workload]:
    """The workloads of operations at a scale, in the order of OPERATIONS.

    Args:
        scale: "released" (a device's worth of pools and weights) or "tiny" (for interpreted kernels).

    Raises:
        ValueError: an unknown scale or operation.
    """
    operations = list(operations)
    if scale not in SCALES:
        raise ValueError(f"scale={scale!r} is unknown; choose one of {', '.join(SCALES)}")
    if unknown := [name for name in operations if name not in _BUILDERS]:
        raise ValueError(f"operations {unknown} are unknown; choose from {', '.join(OPERATIONS)}")
    return [work for name, build in _BUILDERS.items() if name in operations for work in build(SCALES[scale])]
