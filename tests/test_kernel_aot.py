"""Every kernel compiles at released sizes for TPUs that are not here, within their memories, and copies no pool and no
weights.
"""

import jax
import jax.numpy as jnp
import pytest

import kernel_cases_indexer
import kernel_cases_kv_write
import kernel_cases_mhc
import kernel_cases_moe
import kernel_cases_quantized_linear
import kernel_cases_sparse_attention
from dsv41_jax.aot import TPU_TOPOLOGIES, compile_for
from kernel_cases import Case, check_program, moved

MODULES = (
    kernel_cases_indexer,
    kernel_cases_kv_write,
    kernel_cases_mhc,
    kernel_cases_moe,
    kernel_cases_quantized_linear,
    kernel_cases_sparse_attention,
)
CASES = [case for module in MODULES for case in module.aot_cases()]
PLAIN = "v5p"  # the generation of the plain test run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "generation", [g if g == PLAIN else pytest.param(g, marks=pytest.mark.slow) for g in TPU_TOPOLOGIES]
)
def test_compiles_without_copies(generation: str, case: Case):
    compiled = compile_for(generation, case.fn, *case.specs, donate=case.donate)
    check_program(compiled, case.forbidden_bytes)


def test_a_copy_of_the_pool_would_be_seen():
    """Negative controls: a slice of stacked weights, an update that is not in place."""
    pool = jax.ShapeDtypeStruct((4, 1 << 16, 128), jnp.int32)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    size = 4 * 128 << 16

    def rolled(pool, index):
        return jnp.roll(pool[index], 1, axis=0).sum(axis=1), pool.at[index, 0].set(1)

    compiled = compile_for(PLAIN, rolled, pool, index)
    with pytest.raises(AssertionError):
        check_program(compiled, size)
    assert any(bytes_ > 0 for _, bytes_ in moved(compiled.as_text()))
