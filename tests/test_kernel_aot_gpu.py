"""Every kernel at released sizes, compiled for GPUs that are not there: it fits shared memory, registers and tensor
memory (or the compiler would refuse), and no pool or weight is copied around it.

Needs JAX's CUDA plugin: python -m pytest -m slow tests/test_kernel_aot_gpu.py in an environment with "dsv41-jax[cuda]".
"""

import importlib

import jax
import pytest

from dsv41_jax import aot, kernel_workloads
from kernel_cases import check_program
from pallas_kernels.sparse_attention import gpu as sparse_attention_gpu

pytestmark = pytest.mark.slow

_LARGE = 64 << 20  # bytes; what the workloads' results and temporary arrays stay below, and their pools do not
_WORKS = {f"{work.op} {work.name}": work for work in kernel_workloads.workloads("released")}


@pytest.fixture(scope="module", params=aot.GPU_TARGETS)
def target(request):
    try:
        aot.one_gpu(request.param)
    except aot.NoCudaCompiler as error:
        pytest.skip(str(error))
    return request.param


def forbidden_bytes(work, arguments) -> int:
    """Below the largest argument that is kept packed, above results and what XLA fuses around the kernel."""
    result = jax.eval_shape(lambda a: work.call(a, "reference"), arguments)
    leaves = [x for name, x in enumerate(jax.tree.leaves(result)) if name not in work.updates.values()]
    largest = max(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments))
    return max(min(_LARGE, largest), 2 * sum(x.size * x.dtype.itemsize for x in leaves) + (1 << 20))


@pytest.mark.parametrize("name", _WORKS)
def test_compiles_without_copies(target, name, monkeypatch):
    work = _WORKS[name]
    try:
        importlib.import_module(f"pallas_kernels.{work.op}.gpu")
    except ModuleNotFoundError:
        pytest.skip(f"{work.op} has no GPU kernel")
    major = aot.GPU_TARGETS[target].capability[0]
    monkeypatch.setattr(sparse_attention_gpu, "default_blocks", lambda: sparse_attention_gpu.BLOCKS[major])
    arguments = jax.eval_shape(work.make, jax.random.key(0))
    updated = {name: arguments[name] for name in work.updates}
    rest = {name: x for name, x in arguments.items() if name not in updated} if updated else arguments
    compiled = aot.compile_for_gpu(
        target, lambda old, rest: work.call({**rest, **old} if old else rest, "gpu"), updated, rest, donate=0
    )
    assert "__gpu$xla.gpu.triton" in compiled.as_text()
    check_program(compiled, forbidden_bytes(work, arguments))
