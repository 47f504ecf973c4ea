"""FLOPs of calls of every kernel: hand counts at small sizes, the workloads' own numbers at released sizes, and no
kernel that is not known.
"""

import ast
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from dsv41_jax.jaxpr_flops import jaxpr_flops, work
from dsv41_jax.kernel_workloads import workloads
from hollow_kernels import hollow_kernels
from kernel_cases import spec
from pallas_kernels import indexer, mhc, moe, quantized_linear, sparse_attention
from pallas_kernels.flops import COUNTS, MEGABLOX, KernelCall, kernel_flops
from pallas_kernels.moe.pack import scale_rows

KERNELS = ("tpu", "gpu")
ROOT = Path(__file__).parent.parent / "pallas_kernels"
INT = jnp.int32


def counted(function, *specs, **options) -> dict[str, float]:
    """FLOPs by precision, without zeros."""
    with hollow_kernels():
        return {name: count for name, count in work(function, *specs, **options).items() if count}


@pytest.mark.parametrize("kernel", KERNELS)
class TestByHand:
    """Sizes that no kernel pads, all different."""

    def test_dense_maps(self, kernel):
        """16 rows of 256 to 384, of the second of 3 layers; and 2 groups of 256 to 2 of 128, whose input stays bf16."""
        leaf = {"weight": spec((3, 384, 256), jnp.float8_e4m3fn), "scale": spec((3, 12, 8), jnp.float8_e8m0fnu)}
        found = counted(lambda x, w: quantized_linear.linear(x, w, 1, implementation=kernel), spec((16, 256)), leaf)
        assert found == {"fp8": 2 * 16 * 384 * 256}
        leaf = {"weight": spec((256, 256), jnp.float8_e4m3fn), "scale": spec((8, 8), jnp.float8_e8m0fnu)}
        grouped = functools.partial(quantized_linear.grouped_linear, groups=2, implementation=kernel)
        assert counted(grouped, spec((16, 512)), leaf) == {"bf16": 2 * 16 * 256 * 256}

    @pytest.mark.parametrize("storage", ["fp4", "fp8", "bf16"])
    def test_experts(self, kernel, storage):
        """5 experts of 128 to 256 and back. Rows are what the caller expects, whatever there is room for."""
        leaves = {"fp4": packed, "fp8": rows_scaled, "bf16": plain}[storage]

        def fn(x, chosen, weights, up, down):
            return moe.experts(x, chosen, weights, up, up, down, 1, limit=7.0, implementation=kernel)

        specs = (spec((512, 128)), spec((512, 2), INT), spec((512, 2), jnp.float32), leaves(256, 128), leaves(128, 256))
        assert counted(fn, *specs, expert_rows=37.5) == {"fp8": 2 * 37.5 * 3 * 128 * 256}
        with pytest.raises(ValueError, match="moe_gate_up: how many rows experts get .* give expert_rows"):
            counted(fn, *specs)

    def test_attention_of_few(self, kernel):
        """2 sequences of 3 queries with 16 heads of 128, 32 rows of the ring, and 256 entries where there are some."""
        window = sparse_attention.WindowKeys(
            spec((5, 2, 32, 128), jnp.uint8), spec((5, 2, 4, 32), jnp.uint8), spec((), INT), spec((2, 32), INT)
        )
        entries = sparse_attention.Entries(
            spec((3, 64, 128), INT), spec((), INT), spec((2, 3, 256), INT), spec((2, 3, 256), INT)
        )
        attend = functools.partial(sparse_attention.attend, width=20, implementation=kernel)
        rest = spec((2, 3, 16, 128)), spec((2, 3), INT)
        sink = spec((16,), jnp.float32)
        assert counted(attend, *rest, window, None, sink) == {"bf16": 4 * 2 * 3 * 16 * 128 * 32}
        assert counted(attend, *rest, window, entries, sink) == {"bf16": 4 * 2 * 3 * 16 * 128 * (32 + 256)}

    def test_attention_of_a_block(self, kernel):
        """64 queries, each with a window of 33, which 48 hold wherever 16 queries of a TPU's step begin."""
        window = sparse_attention.WindowKeys(
            spec((1, 2, 96, 128), jnp.uint8), spec((1, 2, 4, 96), jnp.uint8), 0, spec((2, 96), INT)
        )
        attend = functools.partial(sparse_attention.attend, width=33, implementation=kernel)
        found = counted(attend, spec((2, 64, 16, 128)), spec((2, 64), INT), window, None, spec((16,), jnp.float32))
        assert found == {"bf16": 4 * 2 * 64 * 16 * 128 * {"tpu": 48, "gpu": 33}[kernel]}

    @pytest.mark.parametrize("entries", [64, 128])
    def test_scores(self, kernel, entries):
        """12 queries (16 in a TPU's step) of 2 rows with 8 heads of 64, and a page table of 2048 keys."""
        pages, t = 2048 // entries, {"tpu": 16, "gpu": 12}[kernel]
        keys, table = paged(entries, pages)
        scores = functools.partial(indexer.scores, implementation=kernel)
        rest = spec((2, 12, 8, 64)), spec((2, 12, 8))
        heads_and_channels = 8 * 64 if kernel == "gpu" or entries == 128 else 8 * 128  # 4 rows of words become 8
        found = counted(
            lambda q, w, codes, scales, table, seen: scores(q, w, keys(codes, scales, table), seen),
            *rest,
            *table,
            spec((2, 12), INT),
        )
        assert found == {"fp4": 2 * 2 * t * heads_and_channels * 2048}

    def test_scores_of_pools(self, kernel):
        """3 queries of 2 rows, 64 blocks of 16 keys each."""
        keys, table = paged(128, 16)
        scores = functools.partial(indexer.candidate_scores, block=16, implementation=kernel)
        found = counted(
            lambda q, w, codes, scales, table, pool, seen: scores(q, w, keys(codes, scales, table), pool, seen),
            spec((2, 3, 8, 64)),
            spec((2, 3, 8)),
            *table,
            spec((2, 3, 64), INT),
            spec((2, 3), INT),
        )
        assert found == {"fp4": 2 * 2 * 3 * 8 * 64 * 64 * 16}

    def test_hyper_connections(self, kernel):
        """16 tokens, 3 streams of 128, 15 coefficients; with and without an update, which is elementwise."""
        mix = spec((4, 15, 384), jnp.float32), spec((4, 15), jnp.float32), spec((4, 3), jnp.float32), spec((4, 128))
        update = spec((16, 128)), spec((16, 3), jnp.float32), spec((16, 3, 3), jnp.float32)
        options = {"iterations": 2, "hc_eps": 1e-6, "norm_eps": 1e-6, "implementation": kernel}
        for given in (None, update):
            found = counted(
                lambda x, pre, update, *mix: mhc.connect(x, update, pre, *mix, 1, **options),
                spec((16, 3, 128)),
                spec((16, 3), jnp.float32),
                given,
                *mix,
            )
            assert found == {"f32": 2 * 16 * 15 * 384}
        expand = functools.partial(mhc.expand, implementation=kernel)
        assert counted(expand, spec((16, 3, 128)), *update) == {}

    def test_no_product_of_matrices(self, kernel):
        """Selections and cache writes."""
        scores, seen = spec((2, 1, 4096), jnp.float32), spec((2, 1), INT)
        assert counted(lambda s: indexer.select(s, 64, implementation=kernel), scores) == {}
        blocks = functools.partial(indexer.candidate_blocks, block=8, topk=32, implementation=kernel)
        assert counted(blocks, scores, seen) == {}
        for item in workloads("tiny", ["kv_write"]):
            arguments = jax.eval_shape(item.make, jax.random.key(0))
            assert counted(lambda a, item=item: item.call(a, kernel), arguments) == {}


def packed(rows: int, columns: int) -> dict:
    return {
        "words": spec((2, 5, columns // 8, rows), INT),
        "scales": spec((2, 5, scale_rows(columns), rows), INT),
    }


def rows_scaled(rows: int, columns: int) -> dict:
    return {
        "weight": spec((2, 5, rows, columns), jnp.float8_e4m3fn),
        "scale": spec((2, 5, rows, 1), jnp.float8_e8m0fnu),
    }


def plain(rows: int, columns: int) -> dict:
    return {"weight": spec((2, 5, rows, columns))}


def paged(entries: int, pages: int):
    """How to make keys of 64 channels from arrays of 2 rows of pages, and descriptions of the arrays."""
    codes = spec((1, 2 * pages, entries * 8 // 128, 128), INT)
    scales = spec((1, 2 * pages * entries // 128, 128), INT)

    def keys(codes, scales, table):
        return indexer.PagedKeys(codes, scales, 0, table, entries)

    return keys, (codes, scales, spec((2, pages), INT))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("item", workloads("released"), ids=lambda item: item.name)
def test_released_sizes(item, kernel):
    """The workloads say the least that an operation computes. Queries share window rows: a TPU's 16 meet 143 of them,
    those of a verify block 133, not 128.
    """
    arguments = jax.eval_shape(item.make, jax.random.key(0))
    rows = item.flops / (6 * 5120 * 2304) if item.op == "moe" else None
    found = counted(lambda a: item.call(a, kernel), arguments, expert_rows=rows)
    total = sum(count for name, count in found.items() if name != "one_hot")
    assert item.flops <= total <= item.flops * (1.03 if item.op == "sparse_attention" else 1)


def test_bodies_do_not_matter():
    """A whole kernel is counted as its call without the body; and a scan counts its calls."""
    leaf = {"weight": spec((4, 128, 128), jnp.float8_e4m3fn), "scale": spec((4, 4, 4), jnp.float8_e8m0fnu)}

    def layers(x, leaf):
        def body(x, layer):
            return quantized_linear.linear(x, leaf, layer, implementation="tpu"), None

        return jax.lax.scan(body, x, jnp.arange(4))[0]

    assert work(layers, spec((16, 128)), leaf)["fp8"] == 4 * 2 * 16 * 128 * 128
    assert counted(layers, spec((16, 128)), leaf) == {"fp8": 4 * 2 * 16 * 128 * 128}


def test_an_unknown_kernel_is_an_error_that_names_it():
    def double(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    call = pl.pallas_call(double, out_shape=spec((8, 128), jnp.float32), name="doubling")
    with pytest.raises(ValueError, match="'doubling' is not known: enter it in pallas_kernels/flops.py"):
        jaxpr_flops(jax.make_jaxpr(call)(spec((8, 128), jnp.float32)))
    with pytest.raises(ValueError, match="'other'"):
        kernel_flops(KernelCall("other", (), ()))


def test_every_kernel_is_known():
    """Names as the sources have them after `name=`; nothing else is in the table."""
    names = set()
    for path in ROOT.glob("*/[gt]pu*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "name":
                names |= {part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)}
    assert names == set(COUNTS) - {MEGABLOX}  # JAX's own
