"""Parameters in the forms that kernels read: routed experts in the storages of `pallas_kernels.moe`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import moe
from pallas_kernels.implementation import KernelError


def pack_params(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters with the experts of all layers and draft blocks in kernel forms; other leaves are the same arrays.

    FP4 keeps its bytes; FP8 gets one scale a row instead of one for 32 weights. A leaf at a time exists in both forms,
    if the caller drops the old tree.

    Raises:
        KernelError: FP8 experts whose scales differ too much within a row; names the leaf.
    """

    def visit(path: str, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        inner = {name: f"{path}.{name}" for name in tree}
        if path.endswith(".experts"):
            return {name: _packed(inner[name], leaf) for name, leaf in tree.items()}
        return {name: visit(inner[name], part) for name, part in tree.items()}

    return {name: visit(name, part) for name, part in params.items()}


def _packed(path: str, leaf: dict[str, Array]) -> dict[str, Array]:
    if leaf["weight"].dtype == jnp.uint8:
        return _pack_layers(leaf)
    if "scale" not in leaf:
        return leaf
    packed, exact = _rescale_layers(leaf)
    if not bool(exact.all()):
        raise KernelError(
            f"{path}: expert_storage='fp8' is not exact for these weights (the scales of a row differ by too much); "
            "use 'fp4' or 'bf16'"
        )
    return packed


# A layer at a time: unpacked values take several times the bytes.


@jax.jit
def _pack_layers(leaf: dict[str, Array]) -> dict[str, Array]:
    return jax.lax.map(moe.pack, leaf)


@jax.jit
def _rescale_layers(leaf: dict[str, Array]) -> tuple[dict[str, Array], Array]:
    return jax.lax.map(moe.as_fp8, leaf)
