"""Mixture of experts: router, clamped SwiGLU experts, a shared expert. No token is ever dropped.

Rows are grouped by expert into tiles of a fixed height; the number of tiles is large enough for any routing. Experts
of other devices: `expert_parallel`.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from dsv41_jax.expert_parallel import expert_share, routed_sum, trained_sum
from dsv41_jax.linear import kernel_linear, stored_leaf, weight_matrix
from dsv41_jax.numerics import Numerics, einsum_f32, project_rows
from dsv41_jax.parallel import SINGLE, Parallel
from dsv41_jax.router_notes import RouterNotes, TokenFacts, modality_loads, sequence_balance
from dsv41_jax.tiles import TEMPORARY_BYTES
from pallas_kernels import moe as moe_kernels
from pallas_kernels.moe import training

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
        experts: int32 [n, k]; `n_experts` stands for one of another device.

    Returns:
        position int32 [n, k] in the tiled rows (past them for other devices'), expert of each tile int32 [tiles], tile
        height.
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
    elsewhere = tiles * height + jnp.arange(rows)  # all different, as the scatters are told
    position = jnp.where(flat < n_experts, first_tile[flat] * height + rank, elsewhere)
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
        parallel = self.numerics.parallel
        self.experts = ExpertWeights(expert_share(self.n_experts, parallel.devices), self.inter)
        self.shared_inter = parallel.padded(self.inter, self.numerics.kernels)
        self.shared_experts = ExpertWeights(None, self.shared_inter, parallel)

    def __call__(
        self, x: Array, image_mask: Array | None = None, facts: TokenFacts | None = None
    ) -> tuple[Array, Array | RouterNotes]:
        """x [..., D], image_mask bool [...] or None -> y [..., D] and the chosen experts int32 [..., k].

        With the facts of tokens x [B, T, D]: `RouterNotes` in place of the experts, and float32 master weights are
        used in their training form, whose gradient works across devices whatever the dispatch and the load.
        """
        lead, d = x.shape[:-1], x.shape[-1]
        rows = x.reshape(-1, d)
        logits, bias = self.gate(rows, None if image_mask is None else image_mask.reshape(-1))
        experts, weights = route(logits, bias, self.topk, self.scoring, self.normalise, self.route_scale)
        kernels = self.numerics.kernels
        if self.numerics.quantizes("linear_inputs") and not kernels:
            rows = quant.fake_q8(rows)  # the input of w1 and w3 of every expert; kernels do it themselves
        if facts is not None and _is_master(leaves := self.experts(d)):
            total, computed = self._trained(rows, experts, weights, leaves)
            dropped = experts.size - jnp.sum(computed)
        else:
            dropped = None
            compute = self._by_kernels if kernels else self._by_reference
            total = routed_sum(self.numerics.parallel, self.n_experts, rows, experts, weights, compute)
        total = total + self._shared(rows).astype(jnp.float32)
        y, experts = self.numerics.round(total).reshape(*lead, d), experts.reshape(*lead, self.topk)
        if facts is None:
            return y, experts
        return y, self._notes(logits, experts, image_mask, facts, dropped)

    def _notes(
        self, logits: Array, experts: Array, image_mask: Array | None, facts: TokenFacts, dropped: Array | None
    ) -> RouterNotes:
        """logits float32 [B * T, E], experts int32 [B, T, k]."""
        scores = _SCORES[self.scoring](logits).reshape(*experts.shape[:-1], self.n_experts)
        return RouterNotes(
            experts=experts,
            loads=modality_loads(experts, image_mask, facts.weights, self.n_experts),
            balance=sequence_balance(scores, experts, facts.samples, facts.weights),
            dropped=dropped,
        )

    def _trained(self, rows: Array, experts: Array, weights: Array, leaves: dict) -> tuple[Array, Array]:
        """By float32 master weights: routed sum [n, D] of quantised rows, pairs computed [n]."""
        matrices = training.Matrices(*(self._quantised(leaves[name]["weight"]) for name in ("w1", "w3", "w2")))
        compute = _TrainedExperts(self.limit, self.numerics)
        return trained_sum(self.numerics.parallel, self.n_experts, rows, experts, weights, matrices, compute)

    def _quantised(self, weight: Array) -> Array:
        """Once for all tokens of a step."""
        return quant.fake_quantize_weight("fp4", weight) if self.numerics.quantizes("expert_weights") else weight

    def _shared(self, rows: Array) -> Array:
        """The shared expert: rows [n, D] -> [n, D]."""
        d, parallel = rows.shape[-1], self.numerics.parallel
        leaves = self.shared_experts(d)

        def matmul(name: str, x: Array) -> Array:
            if self.numerics.kernels:
                return kernel_linear(x, leaves[name], self.numerics).astype(jnp.float32)
            return self.numerics.round_f32(project_rows(x, weight_matrix(leaves[name], self.numerics, "fp8")))

        split = parallel.splits(self.shared_inter)
        x = parallel.gather_rows(rows) if split else rows
        a = self.numerics.round(swiglu(matmul("w1", x), matmul("w3", x), self.limit))
        if self.numerics.quantizes("linear_inputs") and not self.numerics.kernels:
            a = quant.fake_q8(a)
        project = parallel.from_columns if split else parallel.by_columns
        return self.numerics.round(project(functools.partial(matmul, "w2"), a, d))

    def _by_kernels(self, rows: Array, experts: Array, weights: Array, share: int) -> Array:
        """Routed outputs [n, k, D] of rows [n, D], not quantised yet; see `expert_parallel.Compute`."""
        leaves = self.experts(rows.shape[-1])
        layer = leaves["w1"].get("layer")
        w1, w3, w2 = ({k: v for k, v in leaves[name].items() if k != "layer"} for name in ("w1", "w3", "w2"))
        options = {"limit": self.limit, "share": share, "implementation": self.numerics.implementation}
        return moe_kernels.experts(rows, experts, weights, w1, w3, w2, layer, **options)

    def _by_reference(self, rows: Array, experts: Array, weights: Array, share: int) -> Array:
        """Routed outputs [n, k, D] of quantised rows [n, D]."""
        n, d = rows.shape
        held = expert_share(self.n_experts, self.numerics.parallel.devices)
        position, tile_expert, height = group_rows(experts, held)
        slots = tile_expert.shape[0] * height
        token = jnp.broadcast_to(jnp.arange(n)[:, None], position.shape)
        source = jnp.full(slots, n, jnp.int32).at[position].set(token, mode="drop", unique_indices=True)
        tiled = jnp.concatenate([rows, jnp.zeros((1, d), rows.dtype)])[source].reshape(-1, height, d)
        tiled_weights = jnp.zeros(slots, jnp.float32).at[position].set(weights, mode="drop", unique_indices=True)
        inputs = (tiled, tiled_weights.reshape(-1, height, 1), tile_expert)
        shapes = {"w1": (self.inter, d), "w3": (self.inter, d), "w2": (d, self.inter)}
        leaves = {name: moe_kernels.as_released(leaf, *shapes[name]) for name, leaf in self.experts(d).items()}

        def run(x: Array, weight: Array, expert: Array) -> Array:
            return self._expert_tiles(x, leaves, weight, expert)

        def taken(out: Array) -> Array:
            out = out.reshape(-1, d)
            if held == self.n_experts:
                return out[position]
            return out.at[position].get(mode="fill", fill_value=0)

        # Each tile has its own copy of a matrix, widened; a few tiles at a time keep them inside the budget.
        tiles = tile_expert.shape[0]
        together = max(1, TEMPORARY_BYTES // 4 // (2 * 4 * d * self.inter))
        if together >= tiles:
            return taken(run(*inputs))
        steps = -(-tiles // together)
        padded = [jnp.pad(x, [(0, steps * together - tiles)] + [(0, 0)] * (x.ndim - 1)) for x in inputs]
        out = jax.lax.map(lambda parts: run(*parts), [x.reshape(steps, together, *x.shape[1:]) for x in padded])
        return taken(out)

    def _expert_tiles(self, x: Array, leaves: dict, weight: Array, tile_expert: Array) -> Array:
        """One expert per tile on [tiles, height, D]."""

        def matmul(x: Array, leaf: dict) -> Array:
            if "scale" in leaf:  # gather the stored form, then widen
                matrices = weight_matrix({k: v[tile_expert] for k, v in leaf.items()}, self.numerics, "fp4")
            else:
                matrices = weight_matrix(leaf, self.numerics, "fp4")[tile_expert]
            return self.numerics.round_f32(einsum_f32("etk,enk->etn", x, matrices))

        a = self.numerics.round(swiglu(matmul(x, leaves["w1"]), matmul(x, leaves["w3"]), self.limit) * weight)
        if self.numerics.quantizes("linear_inputs"):
            a = quant.fake_q8(a)
        return self.numerics.round(matmul(a, leaves["w2"]))


def _is_master(leaves: dict[str, dict[str, Array]]) -> bool:
    """Whether experts are float32 master weights: what training trains."""
    return all(set(leaf) == {"weight"} and leaf["weight"].dtype == jnp.float32 for leaf in leaves.values())


@dataclasses.dataclass(frozen=True)
class _TrainedExperts:
    """`expert_rounds.TrainedCompute` by `pallas_kernels.moe.training`."""

    limit: float
    numerics: Numerics

    def __call__(
        self, rows: Array, experts: Array, weights: Array, matrices: training.Matrices, share: int
    ) -> tuple[Array, Array]:
        options = training.Options(self.limit, self.numerics, share)
        return training.experts(options, rows, experts, weights, matrices)


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
    """The three matrices of one expert (`n` None) or of `n` stacked experts, in whatever form they are stored; a
    device's columns of them where they are split.
    """

    n: int | None
    inter: int
    parallel: Parallel = SINGLE

    @nn.compact
    def __call__(self, hidden: int) -> dict[str, dict[str, Array]]:
        lead = () if self.n is None else (self.n,)
        gate_up, down = (self.parallel.share(self.inter), hidden), (self.parallel.share(hidden), self.inter)
        shapes = {"w1": gate_up, "w2": down, "w3": gate_up}
        return {name: Stored((*lead, *shape), name=name)() for name, shape in shapes.items()}


class Stored(nn.Module):
    """A weight subtree {"weight"[, "scale"]} as it is stored. Packed FP4 has half the logical columns."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        return stored_leaf(self, self.shape)
