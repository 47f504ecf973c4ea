"""Floating-point operations of a kernel's call, read from the shapes of its arrays.

What counts is the operation, not how a kernel does it: a float32 product made of three bf16 ones counts once, and
unpacking, sums over heads, quantising and the counting of a selection do not count. Rows, keys and heads count as the
arrays have them, with what pads them to tiles, because that is multiplied too. Keys that a query does not see count.

A new kernel is entered in `COUNTS` under the name that its `pl.pallas_call` gets.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dsv41_jax.numerics import FEW_TOKENS

# Precisions of a multiplication as the release has it: that of its wider operand. FP4 weights meet FP8 rows.
FP4, FP8, BF16, F32 = PRECISIONS = ("fp4", "fp8", "bf16", "f32")
# `jax.named_scope` around products with zeros and ones that only move values: a gather that the matrix unit does.
ONE_HOT_SCOPE = "one_hot"

MEGABLOX = "megablox"  # JAX's grouped matmuls of training, which give their calls no name

Counts = dict[str, float]


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A call of a kernel.

    Attributes:
        name: given to `pl.pallas_call`. inputs, outputs: shapes and dtypes, scalars that are prefetched included.
        expert_rows: (token, slot) rows that one call of an expert kernel has, or None if nobody said.
    """

    name: str
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    expert_rows: float | None = None


def kernel_flops(call: KernelCall) -> Counts:
    """FLOPs of a call by precision.

    Raises:
        ValueError: a kernel that is not in `COUNTS`, or an expert kernel without `expert_rows`.
    """
    if call.name not in COUNTS:
        raise ValueError(
            f"the arithmetic of the kernel {call.name!r} is not known: enter it in pallas_kernels/flops.py, which "
            f"knows {', '.join(sorted(COUNTS))}"
        )
    return COUNTS[call.name](call)


def _nothing(call: KernelCall) -> Counts:
    """Selecting, writing caches, spreading and adding: no product of matrices."""
    return {}


def _megablox(call: KernelCall) -> Counts:
    """Grouped matmuls of training: rows [m, K] by each group's matrix -> [m, N], or the gradient of the matrices [E, K,
    N] from [m, K] and [m, N].
    """
    left, right, out = call.inputs[-2].shape, call.inputs[-1].shape, call.outputs[0].shape
    rows = left[0] if call.expert_rows is None else call.expert_rows
    columns = out[1] if len(out) == 2 else right[1]
    return {BF16: 2 * rows * left[1] * columns}


def _sparse_attention(call: KernelCall) -> Counts:
    """Logits and sums of values: bf16 queries and probabilities meet dequantised keys."""
    q = call.inputs[1].shape
    if len(q) == 4:  # TPU: q [B, t, H, d], seen [B, t, 1, n]; with entries also words [B, t, rows, K, 128]
        queries, keys = q[0] * q[1], call.inputs[5].shape[-1]
        if len(call.inputs) > 7:
            keys += call.inputs[7].shape[3]
    else:  # GPU: q [B * t, H, d], position [B, n]; with entries also their places [B * t, K]
        queries, (batch, rows) = q[0], call.inputs[4].shape
        t = queries // batch
        keys = rows if t <= FEW_TOKENS else rows - t + 1  # the last t rows of a longer block are the queries' own
        if len(call.inputs) > 8:
            keys += call.inputs[9].shape[1]
    return {BF16: 4 * queries * math.prod(q[-2:]) * keys}


def _index_scores(call: KernelCall) -> Counts:
    """FP4 queries times FP4 keys, for every head. The heads' weighted sum is no product of matrices."""
    scores = call.outputs[0].shape
    if call.name.startswith("indexer_"):
        # TPU: queries [B, t * heads, channels], scores [B, t, rows, 128]; of pools [B * t, heads, channels] and
        # [B * t, rows, 128].
        queries = next(x for x in call.inputs if x.dtype == jnp.bfloat16).shape
        keys = math.prod(scores[-2:])
    else:  # GPU: [B, t, heads, channels], [B, t, keys]
        queries, keys = call.inputs[1].shape, scores[-1]
    return {FP4: 2 * math.prod(queries) * keys}


def _experts(matrices: int) -> Callable[[KernelCall], Counts]:
    """Rows x [.., K] of several matrices of their expert, whose result is [.., N]. Rows are what routing gives: arrays
    have room for any.
    """

    def count(call: KernelCall) -> Counts:
        if call.expert_rows is None:
            raise ValueError(
                f"{call.name}: how many rows experts get is not in the program; give expert_rows, the (token, slot) "
                "pairs that one call computes (tokens * experts per token, divided by the devices that share them)"
            )
        return {FP8: 2 * matrices * call.expert_rows * call.inputs[3].shape[-1] * call.outputs[0].shape[-1]}

    return count


def _linear(precision: str) -> Callable[[KernelCall], Counts]:
    """Rows x [n, groups * K] times weight [L, N, K], on a GPU as pairs [L, N, K / 2]."""

    def count(call: KernelCall) -> Counts:
        _, x, weight, *_ = call.inputs
        width = weight.shape[2] * weight.dtype.itemsize
        return {precision: 2 * x.shape[0] * weight.shape[1] * width}

    return count


def _mix(call: KernelCall) -> Counts:
    """The streams [.., C * D] of n tokens times fn [L, (2 + C) C, C * D], exact to float32."""
    tpu = call.name == "mhc_connect"
    tokens = call.inputs[3].shape[1] if tpu else call.inputs[1].shape[0]  # [C, n, D] or [n, C, D]
    fn = call.inputs[5 if tpu else -1].shape
    return {F32: 2 * tokens * fn[1] * fn[2]}


COUNTS: dict[str, Callable[[KernelCall], Counts]] = {
    MEGABLOX: _megablox,
    "sparse_attention": _sparse_attention,
    "indexer_scores": _index_scores,
    "index_scores": _index_scores,
    "indexer_candidate_scores": _index_scores,
    "candidate_scores": _index_scores,
    "indexer_select": _nothing,
    "select_count": _nothing,
    "select_tally": _nothing,
    "select_keep": _nothing,
    "window_rows": _nothing,
    "main_entries": _nothing,
    "index_entries": _nothing,
    "moe_gate_up": _experts(2),
    "moe_down": _experts(1),
    "quantized_linear": _linear(FP8),
    "grouped_linear": _linear(BF16),
    "mhc_connect": _mix,
    "mhc_spread": _mix,
    "mhc_finish": _nothing,
    "mhc_expand": _nothing,
}
