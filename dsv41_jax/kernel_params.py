"""What kernels ask of a model: sizes of its configuration, and routed experts in the forms of `pallas_kernels.moe`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from dsv41_jax.config import ModelConfig
from pallas_kernels import moe
from pallas_kernels.implementation import KernelError


def check_config(config: ModelConfig, implementation: str) -> None:
    """Refuse a configuration whose sizes the kernels do not take: KernelError naming all of them.

    Every operation checks its own arguments; this says it before anything is loaded.
    """
    gpu = implementation == "gpu"  # its cache writes take powers of two
    head, index, block = config.head_dim, config.index_head_dim, config.candidate_block_size
    rules = (
        ("head_dim", 64 <= head <= 512 and head % 32 == 0, "a multiple of 32 from 64 to 512"),
        ("head_dim", not gpu or head & (head - 1) == 0, "a power of two on a GPU"),
        ("index_head_dim", index in (32, 64, 96, 128), "32, 64, 96 or 128"),
        ("index_head_dim", not gpu or index != 96, "a power of two on a GPU"),
        ("candidate_block_size", not block or 64 % block == 0, "a divisor of 64"),
        ("hc_mult", 2 <= config.hc_mult <= 4, "2, 3 or 4"),
        ("compress_ratios", max(config.compress_ratios) <= 2, "0, 1 and 2"),
    )
    wrong = [f"{name}={getattr(config, name)} (kernels take {allowed})" for name, holds, allowed in rules if not holds]
    if wrong:
        raise KernelError(
            f"implementation={implementation!r} does not take this model: {'; '.join(wrong)}. "
            'Load it with implementation="reference"'
        )


def pack_params(params: dict[str, Any], mesh: Mesh | None = None) -> dict[str, Any]:
    """Put the experts of all layers and draft blocks into kernel forms, in place; other leaves stay as they are.

    FP4 keeps its bytes (scales are padded a little); FP8 gets one scale a row instead of one for 32 weights. One leaf
    exists in both forms at a time.

    Args:
        mesh: every device packs the experts it holds.

    Returns:
        `params`, changed.

    Raises:
        KernelError: FP8 experts whose scales differ too much within a row; names the leaf.
    """

    def visit(path: str, tree: dict[str, Any]) -> None:
        for name in list(tree):
            inner = f"{path}.{name}" if path else name
            if path.endswith(".experts"):
                tree[name] = _packed(inner, tree.pop(name), mesh)
            elif isinstance(tree[name], dict):
                visit(inner, tree[name])

    visit("", params)
    return params


def abstract_packed(params: dict[str, Any]) -> dict[str, Any]:
    """`pack_params` of ShapeDtypeStructs."""

    def visit(path: str, tree: dict[str, Any]) -> dict[str, Any]:
        if path.endswith(".experts"):
            return {name: _abstract_leaf(leaf) for name, leaf in tree.items()}
        return {name: visit(f"{path}.{name}", part) if isinstance(part, dict) else part for name, part in tree.items()}

    return visit("", params)


def _abstract_leaf(leaf: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    return jax.eval_shape(_packing(_one(leaf), None), leaf)[0] if "scale" in leaf else leaf


def _packed(path: str, leaf: dict[str, Array], mesh: Mesh | None) -> dict[str, Array]:
    if "scale" not in leaf:
        return leaf
    packed, exact = _packing(_one(leaf), mesh)(leaf)
    if not bool(exact.all()):
        raise KernelError(
            f"{path}: expert_storage='fp8' is not exact for these weights (the scales of a row differ by too much); "
            "use 'fp4' or 'bf16'"
        )
    return packed


def _one(leaf: dict[str, Array]) -> Callable[[dict[str, Array]], tuple[dict[str, Array], Array]]:
    """What makes the kernel form of one expert, and says whether it is exact."""
    return _pack if leaf["weight"].dtype == jnp.uint8 else moe.as_fp8


def _pack(leaf: dict[str, Array]) -> tuple[dict[str, Array], Array]:
    return moe.pack(leaf), jnp.ones((), bool)


@functools.cache
def _packing(one: Callable, mesh: Mesh | None) -> Callable[[dict[str, Array]], tuple[dict[str, Array], Array]]:
    """leaf [L, E, ..] -> its kernel form, and bool [L, E], whether that is exact; jitted."""
    # An expert at a time: unpacked values take several times the bytes.
    pack = functools.partial(jax.lax.map, functools.partial(jax.lax.map, one))
    if mesh is not None:
        spec = PartitionSpec(None, mesh.axis_names)  # experts are spread over all devices
        pack = jax.shard_map(pack, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(pack)
