"""Mixture of experts: router, clamped SwiGLU experts, a shared expert. No token is ever dropped.

Rows are grouped by expert into tiles of a fixed height; the number of tiles is large enough for any routing.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from dsv41_jax.linear import kernel_linear, stored_leaf, weight_matrix
from dsv41_jax.numerics import Numerics, einsum_f32, project_rows
from dsv41_jax.tiles import TEMPORARY_BYTES
from pallas_kernels import moe as moe_kernels

_SCORES = {
    "sqrtsoftplus": lambda s: jnp.sqrt(jax.nn.softplus(s)),
    "softmax": lambda s: jax.nn.softmax(s, axis=-1),
    "sigmoid": jax.nn.sigmoid,
}


def route(
    logits: Array, bias: Array, topk: int, scoring: str, normalise: bool, route_scale: float
) -> tuple[Array, Array]:
    """Chosen experts and their weights.

    Args:
        logits: float32 [n, E]. bias: float32 [n, E] or [E]; it takes part in the choice only.

    Returns:
        experts int32 [n, k] in ascending order, weights float32 [n, k].
    """
    scores = _SCORES[scoring](logits)
    _, experts = jax.lax.top_k(jax.lax.stop_gradient(scores + bias), topk)
    experts = jnp.sort(experts, axis=-1)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if normalise and topk > 1:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return experts, weights * route_scale


def _tile_rows(rows: int, experts: int) -> int:
    """Tile height: about the mean load, a power of two of at least 2 (one row would sum in another order)."""
    mean = max(1, rows // experts)
    return min(128, max(2, 1 << (mean - 1).bit_length()))


def group_rows(experts: Array, n_experts: int) -> tuple[Array, Array, int]:
    """Place every (token, slot) in a tile that belongs to its expert.

    Args:
        experts: int32 [n, k].

    Returns:
        position int32 [n, k] in the tiled rows, expert of each tile int32 [tiles], tile height.
    """
    flat = experts.reshape(-1)
    rows = flat.shape[0]
    height = _tile_rows(rows, n_experts)
    tiles = rows // height + min(n_experts, rows)
    numbers = jnp.arange(n_experts)
    before = jnp.sum(flat[:, None] < numbers, axis=0)  # rows of smaller experts
    count = jnp.sum(flat[:, None] == numbers, axis=0)
    last_tile = jnp.sum(jnp.where(numbers[:, None] <= numbers, -(-count // height)[:, None], 0), axis=0)
    first_tile = last_tile - -(-count // height)
    order = jnp.argsort(flat, stable=True)
    rank = jnp.zeros(rows, jnp.int32).at[order].set(jnp.arange(rows), unique_indices=True) - before[flat]
    position = first_tile[flat] * height + rank
    tile_expert = jnp.minimum(jnp.sum(last_tile[None, :] <= jnp.arange(tiles)[:, None], axis=1), n_experts - 1)
    return position.reshape(experts.shape).astype(jnp.int32), tile_expert, height


def swiglu(gate: Array, up: Array, limit: float) -> Array:
    """Clamped SwiGLU of float32 gate and up."""
    if limit > 0:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up


class MoE(nn.Module):
    """Routed experts plus the shared one.

    Parameters: gate.{weight [E, D], bias [E], bias_vl [E]}, experts.{w1, w3 [E, inter, D], w2 [E, D, inter]} (FP4),
    shared_experts.{w1, w2, w3} (FP8).
    """

    n_experts: int
    topk: int
    inter: int
    scoring: str
    normalise: bool
    route_scale: float
    limit: float
    numerics: Numerics

    def setup(self):
        self.gate = Router(self.n_experts)
        self.experts = ExpertWeights(self.n_experts, self.inter)
        self.shared_experts = ExpertWeights(None, self.inter)

    def __call__(self, x: Array, image_mask: Array | None = None) -> tuple[Array, Array]:
        """x [..., D], image_mask bool [...] or None -> y [..., D] and the chosen experts int32 [..., k]."""
        lead, d = x.shape[:-1], x.shape[-1]
        rows = x.reshape(-1, d)
        logits, bias = self.gate(rows, None if image_mask is None else image_mask.reshape(-1))
        experts, weights = route(logits, bias, self.topk, self.scoring, self.normalise, self.route_scale)
        if self.numerics.kernels:
            routed, shared = self._by_kernels(rows, experts, weights)
        else:
            if self.numerics.quantize_activations:
                rows = quant.fake_q8(rows)  # the input of w1 and w3 of every expert
            routed = self._routed(rows, experts, weights)
            shared = self._expert(rows, self.shared_experts(d), None, "fp8")
        total = sum(routed[:, slot].astype(jnp.float32) for slot in range(self.topk))  # ascending expert order
        total = total + shared.astype(jnp.float32)
        return self.numerics.round(total).reshape(*lead, d), experts.reshape(*lead, self.topk)

    def _by_kernels(self, rows: Array, experts: Array, weights: Array) -> tuple[Array, Array]:
        """Routed outputs [n, k, D] and the shared expert's [n, D] of rows [n, D], not quantised yet."""
        leaves, implementation = self.experts(rows.shape[-1]), self.numerics.implementation
        layer = leaves["w1"].get("layer")
        w1, w3, w2 = ({k: v for k, v in leaves[name].items() if k != "layer"} for name in ("w1", "w3", "w2"))
        routed = moe_kernels.experts(
            rows, experts, weights, w1, w3, w2, layer, limit=self.limit, implementation=implementation
        )
        shared = self.shared_experts(rows.shape[-1])
        gate, up = (kernel_linear(rows, shared[name], self.numerics).astype(jnp.float32) for name in ("w1", "w3"))
        return routed, kernel_linear(self.numerics.round(swiglu(gate, up, self.limit)), shared["w2"], self.numerics)

    def _routed(self, rows: Array, experts: Array, weights: Array) -> Array:
        """[n, D] -> [n, k, D]."""
        n, d = rows.shape
        position, tile_expert, height = group_rows(experts, self.n_experts)
        slots = tile_expert.shape[0] * height
        token = jnp.broadcast_to(jnp.arange(n)[:, None], position.shape)
        source = jnp.full(slots, n, jnp.int32).at[position].set(token, mode="drop", unique_indices=True)
        tiled = jnp.concatenate([rows, jnp.zeros((1, d), rows.dtype)])[source].reshape(-1, height, d)
        tiled_weights = jnp.zeros(slots, jnp.float32).at[position].set(weights, mode="drop", unique_indices=True)
        inputs = (tiled, tiled_weights.reshape(-1, height, 1), tile_expert)
        shapes = {"w1": (self.inter, d), "w3": (self.inter, d), "w2": (d, self.inter)}
        leaves = {name: moe_kernels.as_released(leaf, *shapes[name]) for name, leaf in self.experts(d).items()}

        def run(x: Array, weight: Array, expert: Array) -> Array:
            return self._expert(x, leaves, weight, "fp4", expert)

        # Each tile has its own copy of a matrix, widened; a few tiles at a time keep them inside the budget.
        tiles = tile_expert.shape[0]
        together = max(1, TEMPORARY_BYTES // 4 // (2 * 4 * d * self.inter))
        if together >= tiles:
            return run(*inputs).reshape(slots, d)[position]
        steps = -(-tiles // together)
        padded = [jnp.pad(x, [(0, steps * together - tiles)] + [(0, 0)] * (x.ndim - 1)) for x in inputs]
        out = jax.lax.map(lambda parts: run(*parts), [x.reshape(steps, together, *x.shape[1:]) for x in padded])
        return out.reshape(-1, d)[position]

    def _expert(
        self, x: Array, leaves: dict, weight: Array | None, stored_as: str, tile_expert: Array | None = None
    ) -> Array:
        """One expert on rows [n, D], or one expert per tile on [tiles, height, D]."""

        def matmul(x: Array, leaf: dict) -> Array:
            if tile_expert is None:
                return self.numerics.round_f32(project_rows(x, weight_matrix(leaf, self.numerics, stored_as)))
            if "scale" in leaf:  # gather the stored form, then widen
                matrices = weight_matrix({k: v[tile_expert] for k, v in leaf.items()}, self.numerics, stored_as)
            else:
                matrices = weight_matrix(leaf, self.numerics, stored_as)[tile_expert]
            return self.numerics.round_f32(einsum_f32("etk,enk->etn", x, matrices))

        a = swiglu(matmul(x, leaves["w1"]), matmul(x, leaves["w3"]), self.limit)
        if weight is not None:
            a = a * weight
        a = self.numerics.round(a)
        if self.numerics.quantize_activations:
            a = quant.fake_q8(a)
        return self.numerics.round(matmul(a, leaves["w2"]))


class Router(nn.Module):
    """Router logits in float32, and the selection bias of each row: `bias_vl` inside image spans, `bias` elsewhere."""

    n_experts: int

    @nn.compact
    def __call__(self, rows: Array, image_mask: Array | None) -> tuple[Array, Array]:
        weight = self.param("weight", nn.initializers.normal(0.02), (self.n_experts, rows.shape[-1]))
        bias = self.param("bias", nn.initializers.zeros, (self.n_experts,))
        bias_vl = self.param("bias_vl", nn.initializers.zeros, (self.n_experts,))
        logits = project_rows(rows.astype(jnp.float32), weight.astype(jnp.float32))
        if image_mask is not None:
            bias = jnp.where(image_mask[:, None], bias_vl, bias)
        return logits, bias


class ExpertWeights(nn.Module):
    """The three matrices of one expert (`n` None) or of `n` stacked experts, in whatever form they are stored."""

    n: int | None
    inter: int

    @nn.compact
    def __call__(self, hidden: int) -> dict[str, dict[str, Array]]:
        lead = () if self.n is None else (self.n,)
        shapes = {"w1": (self.inter, hidden), "w2": (hidden, self.inter), "w3": (self.inter, hidden)}
        return {name: Stored((*lead, *shape), name=name)() for name, shape in shapes.items()}


class Stored(nn.Module):
    """A weight subtree {"weight"[, "scale"]} as it is stored. Packed FP4 has half the logical columns."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        return stored_leaf(self, self.shape)
