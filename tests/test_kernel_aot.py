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
# Its cases: every kernel, experts in FP4 and in wider weights; decoding, verify blocks and prefill among them.
PLAIN_CASES = {
    "indexer_decode_ratio2",
    "indexer_pool_decode",
    "indexer_verify",
    "indexer_prefill",
    "indexer_candidate_blocks_262144",
    "kv_write main decode",
    "kv_write index verify",
    "kv_write window prefill",
    "mhc connect decode",
    "mhc connect first",
    "mhc expand",
    "moe fp4 E=24 n=64",
    "moe fp8 E=24 n=64",
    "quantized_linear wq_b 64",
    "quantized_linear wo_a 64",
    "quantized_linear wkv 512",
    "sparse_attention decode",
    "sparse_attention padded verify",
    "sparse_attention prefill",
}
assert PLAIN_CASES < {case.name for case in CASES}


def in_plain_run(generation: str, case: Case) -> bool:
    return generation == PLAIN and case.name in PLAIN_CASES


@pytest.mark.parametrize(
    ("generation", "case"),
    [
        pytest.param(g, c, id=f"{g}-{c.name}", marks=() if in_plain_run(g, c) else pytest.mark.slow)
        for g in TPU_TOPOLOGIES
        for c in CASES
    ],
)
def test_compiles_without_copies(generation: str, case: Case):
    compiled = compile_for(generation, case.fn, *case.specs, donate=case.donate)
    check_program(compiled, case)


def test_a_copy_of_the_pool_would_be_seen():
    """Negative controls: a slice of stacked weights, an update that is not in place."""
    pool = jax.ShapeDtypeStruct((4, 1 << 16, 128), jnp.int32)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    size = 4 * 128 << 16  # of one layer

    def sliced(pool, index):
        return jax.lax.sort(pool[index], dimension=0)[0]

    def updated(pool, index):
        return pool.at[index, 0].set(1)

    for fn, donate in ((sliced, ()), (updated, ())):
        compiled = compile_for(PLAIN, fn, pool, index)
        with pytest.raises(AssertionError):
            check_program(compiled, Case("", fn, (pool, index), size, donate or (0,)))


def test_moves_are_read_from_the_program():
    assert moved("  %c.1 = bf16[64,128]{1,0:T(8,128)(2,1)} copy(%p)\n  %f = f32[2]{0} fusion(%c.1)") == [
        ("copy", 16384)
    ]
    assert moved("  %s = u8[3,5]{1,0} dynamic-slice(%p, %i), dynamic_slice_sizes={3,5}") == [("dynamic-slice", 15)]
