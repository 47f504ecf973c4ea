"""Routed experts: grouped matmuls of weights stored in FP4, FP8 or bf16.

    experts   every chosen expert of every token
    training  the same from float32 matrices, with a gradient: a loop in XLA, or on TPUs JAX's own grouped matmuls
    pack      released FP4 weights in the layout the kernels read; `as_fp8`, `as_bf16`: wider storages

Storages of a matrix stacked over layers, logically [L, E, N, K]:

    fp4    {"words" int32 [L, E, Kp/8, Np], "scales" int32 [L, E, rows, Np]}           see `pack`
           {"weight" uint8 [L, E, N, K/2], "scale" [L, E, N, K/32]}                    as released; reference only
    fp8    {"weight" float8_e4m3fn [L, E, N, K], "scale" float8_e8m0fnu [L, E, N, 1]}
    bf16   {"weight" bfloat16 [L, E, N, K]}
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.implementation import KernelError, resolve
from pallas_kernels.moe import reference
from pallas_kernels.moe.pack import as_bf16, as_fp8, as_released, pack, padded, scale_rows, unpack

__all__ = ["as_bf16", "as_fp8", "as_released", "experts", "pack", "storage", "unpack"]

_TEMPORARY_BYTES = 64 * 2**20  # of matrices that the reference widens at a time


def _require(condition: bool, argument: str, given: object, allowed: str) -> None:
    if not condition:
        raise KernelError(f"moe.experts: {argument} is {given}; allowed: {allowed}")


def storage(leaf: dict[str, Array], name: str = "leaf") -> str:
    """ "fp4" (packed), "fp4_released", "fp8" or "bf16"; KernelError for any other leaf."""
    kinds = {key: str(x.dtype) for key, x in leaf.items()}
    known = {
        ("scales", "words"): {("int32", "int32"): "fp4"},
        ("scale", "weight"): {("float8_e8m0fnu", "uint8"): "fp4_released", ("float8_e8m0fnu", "float8_e4m3fn"): "fp8"},
        ("weight",): {("bfloat16",): "bf16"},
    }
    keys = tuple(sorted(kinds))
    found = known.get(keys, {}).get(tuple(kinds[key] for key in keys))
    _require(
        found is not None,
        name,
        kinds,
        '{"words", "scales" int32}, {"weight" float8_e4m3fn, "scale" float8_e8m0fnu} or {"weight" bfloat16}; '
        '{"weight" uint8, "scale" float8_e8m0fnu} with implementation="reference"',
    )
    return found


def _check_leaf(name: str, leaf: dict[str, Array], kind: str, layers: int, n_experts: int, n: int, k: int) -> None:
    shapes = {
        "fp4": {"words": (padded(k) // 8, padded(n)), "scales": (scale_rows(k), padded(n))},
        "fp4_released": {"weight": (n, k // 2), "scale": (n, k // 32)},
        "fp8": {"weight": (n, k), "scale": (n, 1)},
        "bf16": {"weight": (n, k)},
    }[kind]
    for key, shape in shapes.items():
        wanted = (layers, n_experts, *shape)
        _require(leaf[key].shape == wanted, f"{name}.{key}.shape", leaf[key].shape, f"{wanted}")


def experts(
    x: Array,
    chosen: Array,
    weights: Array,
    w1: dict[str, Array],
    w3: dict[str, Array],
    w2: dict[str, Array],
    layer: Array | int,
    *,
    limit: float,
    share: int = 1,
    implementation: str,
) -> Array:
    """Output of each chosen expert for each token: w2 Q8(bf16(weight * SwiGLU(w1 Q8(x), w3 Q8(x)))).

    No token is dropped however unevenly experts are chosen, and experts without tokens are not read.

    Args:
        x: bf16 [n, D], not quantised.
        chosen: int32 [n, k], 0 <= expert <= E, ascending; E stands for an expert of another device. weights: float32
            [n, k].
        w1, w3: leaves [L, E, inter, D] in one of the storages above. w2: [L, E, D, inter].
        layer: index into L.
        limit: SwiGLU's clamp; 0 for none.
        share: one in so many of the (token, slot) pairs is expected to be for these experts. Tiles are sized by it; any
            number is computed.
        implementation: see `pallas_kernels.implementation`.

    Returns:
        bf16 [n, k, D]; zeros for experts of other devices.

    Raises:
        KernelError: an argument the kernel does not take.
    """
    chosen_by = resolve("moe", implementation)
    _require(x.ndim == 2 and x.dtype == jnp.bfloat16, "x", f"{x.dtype}{list(x.shape)}", "bfloat16 [n, D]")
    n, d = x.shape
    _require(d % 32 == 0, "D", d, "a multiple of 32")
    _require(chosen.ndim == 2 and chosen.shape[0] == n, "chosen.shape", chosen.shape, f"[{n}, k]")
    _require(chosen.dtype == jnp.int32, "chosen.dtype", chosen.dtype, "int32")
    _require(weights.shape == chosen.shape, "weights.shape", weights.shape, f"{chosen.shape}")
    _require(weights.dtype == jnp.float32, "weights.dtype", weights.dtype, "float32")
    _require(limit >= 0, "limit", limit, "0 or more")
    kinds = {name: storage(leaf, name) for name, leaf in (("w1", w1), ("w3", w3), ("w2", w2))}
    kind = kinds["w1"]
    _require(len(set(kinds.values())) == 1, "storage", kinds, "the same for w1, w3 and w2")
    _require(chosen_by == "reference" or kind != "fp4_released", "storage", kind, "pack(leaf), fp8 or bf16 for kernels")
    layers, n_experts = next(iter(w1.values())).shape[:2]
    inter = w1["words"].shape[-1] if kind == "fp4" else w1["weight"].shape[-2]
    _require(inter % 32 == 0, "inter", inter, "a multiple of 32")
    for name, leaf, rows, columns in (("w1", w1, inter, d), ("w3", w3, inter, d), ("w2", w2, d, inter)):
        _check_leaf(name, leaf, kind, layers, n_experts, rows, columns)

    arguments = x, chosen, weights, w1, w3, w2, layer
    if chosen_by == "reference":
        out = reference.experts(*arguments, limit, share, _TEMPORARY_BYTES)
    elif chosen_by == "gpu":
        from pallas_kernels.moe import gpu

        out = gpu.experts(*arguments, limit=limit, share=share, interpret=False)
    else:
        from pallas_kernels.moe import tpu

        out = tpu.experts(*arguments, limit=limit, share=share, interpret=chosen_by == "interpret")
    return jnp.where((chosen < n_experts)[..., None], out, jnp.bfloat16(0))
