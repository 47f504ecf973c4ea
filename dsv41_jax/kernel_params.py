"""Parameters in the forms that kernels read: routed experts of FP4 in words (`pallas_kernels.moe.pack`)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import moe


def pack_params(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters with the experts of all layers and draft blocks repacked; other leaves are the same arrays.

    The packed leaves have the same bytes. One leaf at a time exists in both forms, if the caller drops the old tree.
    """

    def visit(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return {name: _packed(part) if name == "experts" else visit(part) for name, part in tree.items()}

    return {name: visit(part) for name, part in params.items()}


def _packed(experts: dict[str, dict[str, Array]]) -> dict[str, dict[str, Array]]:
    return {name: _pack_layers(leaf) if leaf["weight"].dtype == jnp.uint8 else leaf for name, leaf in experts.items()}


@jax.jit
def _pack_layers(leaf: dict[str, Array]) -> dict[str, Array]:
    return jax.lax.map(moe.pack, leaf)  # a layer at a time: unpacked codes take twice the bytes
