"""Routed experts at released sizes, for ahead-of-time compilation."""

import jax
import jax.numpy as jnp

from kernel_cases import Case, spec
from pallas_kernels import moe
from pallas_kernels.moe.pack import padded, scale_rows

HIDDEN, INTER, LAYERS, TOPK, LIMIT = 5120, 2304, 2, 6, 7.0


def leaf(storage: str, n_experts: int, rows: int, columns: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Description of a matrix [rows, columns] of every expert and layer in a storage."""
    lead = LAYERS, n_experts
    if storage == "fp4":
        return {
            "words": spec((*lead, padded(columns) // 8, padded(rows)), jnp.int32),
            "scales": spec((*lead, scale_rows(columns), padded(rows)), jnp.int32),
        }
    if storage == "fp8":
        return {
            "weight": spec((*lead, rows, columns), jnp.float8_e4m3fn),
            "scale": spec((*lead, rows, 1), jnp.float8_e8m0fnu),
        }
    return {"weight": spec((*lead, rows, columns))}


def case(storage: str, n_experts: int, tokens: int) -> Case:
    """`moe.experts` for some tokens and experts of one device."""

    def fn(x, chosen, weights, w1, w3, w2, layer):
        return moe.experts(x, chosen, weights, w1, w3, w2, layer, limit=LIMIT, implementation="tpu")

    up, down = leaf(storage, n_experts, INTER, HIDDEN), leaf(storage, n_experts, HIDDEN, INTER)
    specs = (
        spec((tokens, HIDDEN)),
        spec((tokens, TOPK), jnp.int32),
        spec((tokens, TOPK), jnp.float32),
        up,
        up,
        down,
        spec((), jnp.int32),
    )
    # A matrix of all experts of a layer, as it is stored: what picking a layer or an expert outside would copy.
    bits = {"fp4": 4, "fp8": 8, "bf16": 16}[storage]
    return Case(f"moe {storage} E={n_experts} n={tokens}", fn, specs, n_experts * INTER * HIDDEN * bits // 8)


def aot_cases() -> list[Case]:
    """Decode and prefill in FP4, decode in the other storages."""
    return [
        case("fp4", 384, 64),
        case("fp4", 24, 64),
        case("fp4", 24, 1024),
        case("fp8", 24, 64),
        case("bf16", 24, 64),
    ]
