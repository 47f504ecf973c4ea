"""Every kernel at released sizes, compiled for GPUs that are not there: it fits shared memory, registers and tensor
memory (or the compiler would refuse), and no pool or weight is copied around it.

Needs JAX's CUDA plugin: python -m pytest -m slow tests/test_kernel_aot_gpu.py in an environment with "dsv41-jax[cuda]".
"""

import functools
import importlib

import jax
import jax.numpy as jnp
import pytest

from dsv41_jax import aot, kernel_workloads
from kernel_cases import Case, check_program
from pallas_kernels.sparse_attention import gpu as sparse_attention_gpu

pytestmark = pytest.mark.slow

# Bytes; pools, one layer of a ring and weights are larger. Rows of experts are padded to tiles: up to 100 MB of them.
_LARGE, _LARGE_OF_EXPERTS = 64 << 20, 256 << 20
_WORKS = {f"{work.op} {work.name}": work for work in kernel_workloads.workloads("released")}


@pytest.fixture(scope="module", params=aot.GPU_TARGETS)
def target(request):
    try:
        aot.one_gpu(request.param)
    except aot.NoCudaCompiler as error:
        pytest.skip(str(error))
    cached = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot read programs for absent GPUs
    yield request.param
    jax.config.update("jax_enable_compilation_cache", cached)


def size(x) -> int:
    return x.size * x.dtype.itemsize


def forbidden_bytes(work, arguments) -> int:
    """Below the largest argument that is kept packed; above a few times the activations and results."""
    result = jax.eval_shape(lambda a: work.call(a, "reference"), arguments)
    made = [x for i, x in enumerate(jax.tree.leaves(result)) if i not in work.updates.values()]
    activations = [x for x in jax.tree.leaves(arguments) if x.dtype in (jnp.bfloat16, jnp.float32)]
    largest = max(map(size, jax.tree.leaves(arguments)))
    large = _LARGE_OF_EXPERTS if work.op == "moe" else _LARGE
    return max(min(large, largest), 3 * sum(map(size, made + activations)) + (1 << 20))


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
    call = functools.partial(work.call_split, "gpu")
    compiled = aot.compile_for_gpu(target, call, *work.split(arguments), donate=0)
    if not name.startswith("mhc expand"):  # elementwise: left to XLA
        assert "__gpu$xla.gpu.triton" in compiled.as_text()
    donated = (0,) if work.updates else ()
    check_program(compiled, Case(name, work.call, (), forbidden_bytes(work, arguments), donated))
