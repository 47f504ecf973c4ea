"""The layer loop: runs a plan's segments over the residual streams, with `lax.scan` wherever layers repeat."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import hyper_connections as hc
from dsv41_jax.blocks import KeyStore, Params, Sharing, block, csa2_attention
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram import Engram
from dsv41_jax.layer_plan import Run, Segment
from dsv41_jax.numerics import Numerics


def pick(tree: Any, index: Array | int, kernels: bool = False) -> Any:
    """Element `index` of a stacked subtree (leading axis), or of a tuple of subtrees.

    With `kernels`, what a kernel reads stays stacked, and the index goes with it as "layer": a slice given to a kernel
    would be a copy of the weights.
    """
    if isinstance(tree, tuple):
        return tree[index]
    if kernels and isinstance(tree, dict):
        return {name: _with_layer(name, part, index) for name, part in tree.items()}
    if isinstance(index, int):
        return jax.tree.map(lambda w: w[index], tree)
    return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, index, keepdims=False), tree)


def _with_layer(name: str, part: Any, index: Array | int) -> Any:
    if not isinstance(part, dict):
        return pick(part, index)
    if name == "experts":
        return {matrix: {**leaf, "layer": index} for matrix, leaf in part.items()}
    # FP8 matrices, and what hyper-connections read with their coefficients.
    if "scale" in part or name in ("attn_norm", "ffn_norm"):
        return {**part, "layer": index}
    return pick(part, index, kernels=True)


class LayerLoop:
    """Runs segments of the layer plan.

    Attributes:
        rolled: use scans for repeated layers; tests that look inside unroll. Training has its own loop, `sample_loop`.
        taps: stream means at the tapped layers, filled while running, by layer.
        record: per-layer values when `rolled` is off and recording is on: block_out, pre_mix, post_engram, experts,
            selection, pool.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        params: Params,
        keys: KeyStore,
        memory: dict[str, Array],
        image_mask: Array | None,
        rolled: bool = True,
        record: dict[int, dict[str, Array]] | None = None,
    ):
        self.config, self.numerics, self.params, self.keys = config, numerics, params, keys
        self.memory, self.image_mask = memory, image_mask
        self.rolled, self.record = rolled, record
        self.taps: dict[int, Array] = {}

    def __call__(self, segments: tuple[Segment, ...], x: Array, pre: Array, state: Any, pool: Array | None):
        """x [B, t, C, D], pre [B, t, C], key-store state, pool [B, t, P] or None -> the same four after the
        segments.
        """
        carry = (x, pre, state, pool)
        for segment in segments:
            if segment.repeats == 1 or not self.rolled:
                for i in range(segment.repeats):
                    carry = self._group(segment, i, carry)
            else:
                carry, _ = jax.lax.scan(
                    lambda c, i, segment=segment: (self._group(segment, i, c), None), carry, jnp.arange(segment.repeats)
                )
        return carry

    def _group(self, segment: Segment, i: Array | int, carry: tuple) -> tuple:
        x, pre, state, pool = carry
        first = segment.first + i * segment.size
        kv_slot = segment.kv_slot + i * segment.kv_step
        index_slot = segment.index_slot + i * segment.index_step
        shared = Sharing(pool=pool)
        for run in segment.runs:
            if run.count == 1 or not self.rolled:
                for j in range(run.count):
                    layer = first + run.offset + j
                    (x, pre, state), tap = self._layer(run, layer, kv_slot, index_slot, shared, x, pre, state)
                    if run.tapped:
                        self.taps[layer] = tap
                continue

            def body(c, j, run=run):
                return self._layer(run, first + run.offset + j, kv_slot, index_slot, shared, *c)

            (x, pre, state), taps = jax.lax.scan(body, (x, pre, state), jnp.arange(run.count))
            if run.tapped:  # such a group is never repeated, so `first` is a number
                self.taps.update({first + run.offset + j: taps[j] for j in range(run.count)})
        return x, pre, state, shared.pool

    def _layer(self, run: Run, layer, kv_slot, index_slot, shared: Sharing, x: Array, pre: Array, state: Any) -> tuple:
        note: dict[str, Array] = {}
        if run.engram:
            name = f"l{layer}"
            module = Engram(self.config, self.numerics)
            weights = {k: v for k, v in self.params["engram"][name].items() if k != "embed"}
            x = module.apply({"params": weights}, x, self.memory[name], self.image_mask)
            note["post_engram"] = x
        tap = hc.stream_mean(x, self.numerics) if run.tapped else None
        layer_params = pick(self.params["layers"], layer, self.numerics.kernels)
        new_state = state

        def attention(y: Array) -> Array:
            nonlocal new_state
            note["attn_in"] = y
            u, new_state = csa2_attention(
                self.config,
                self.numerics,
                run,
                self.params,
                layer_params["attn"],
                self.keys,
                state,
                shared,
                layer,
                kv_slot,
                index_slot,
                pick,
                y,
            )
            note["attn_out"] = u
            return u

        x, pre, experts = block(self.config, self.numerics, layer_params, x, pre, attention, self.image_mask)
        if self.record is not None and not self.rolled:
            note.update(block_out=x, pre_mix=pre, experts=experts)
            if shared.selection is not None:
                note["selection"] = shared.selection
            if shared.pool is not None:
                note["pool"] = shared.pool
            self.record[layer] = note
        return (x, pre, new_state), tap
