"""The layer loop of the cacheless forward: weights taken apart without a gather, layers recomputed in the backward pass
if so chosen, and what training wants to know of each layer.

Sources of a group are traced one by one; runs of equal layers behind them can share one body (`ForwardOptions.rolled`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import hyper_connections as hc
from dsv41_jax.blocks import Params, Sharing, block, csa2_attention
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram import Engram
from dsv41_jax.forward_options import ForwardOptions
from dsv41_jax.layer_loop import pick
from dsv41_jax.layer_plan import Run, Segment, layer_plan
from dsv41_jax.numerics import Numerics
from dsv41_jax.packed import PackedSamples
from dsv41_jax.router_notes import RouterNotes, TokenFacts


def split_layers(tree: Any, sizes: tuple[int, ...]) -> tuple:
    """A stacked subtree cut into stretches of `sizes` layers. The gradient of a split is one concatenation, whatever
    the number of pieces.
    """
    leaves, structure = jax.tree.flatten(tree)
    parts = [jax.lax.split(leaf, sizes) for leaf in leaves]
    return tuple(jax.tree.unflatten(structure, [p[i] for p in parts]) for i in range(len(sizes)))


def unstack(tree: Any) -> tuple:
    """A stacked subtree as a tuple of subtrees."""
    count = jax.tree.leaves(tree)[0].shape[0]
    return tuple(jax.tree.map(lambda w: w[0], part) for part in split_layers(tree, (1,) * count))


class SampleLoop:
    """Runs segments of the layer plan over whole samples.

    Attributes (filled while running, by layer):
        taps: stream means at the tapped layers. experts: chosen experts int32 [B, T, k].
        router: `RouterNotes` where the facts of the tokens are given.
        index: (sum of the KL, number of queries) of each index source.
        attention_inputs: if the options ask for them.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        options: ForwardOptions,
        params: Params,
        keys: PackedSamples,
        memory: dict[str, Array],
        image_mask: Array | None,
        facts: TokenFacts | None,
    ):
        self.config, self.numerics, self.options = config, numerics, options
        self.keys, self.memory, self.image_mask, self.facts = keys, memory, image_mask, facts
        counts = [run.count for segment in layer_plan(config) for _ in range(segment.repeats) for run in segment.runs]
        sizes = tuple(counts) if options.rolled else (1,) * sum(counts)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.layers = dict(zip(starts, split_layers(params["layers"], sizes), strict=True))
        self.sources = {
            "compressors": {name: unstack(tree) for name, tree in params.get("compressors", {}).items()},
            "indexers": unstack(params["indexers"]) if params.get("indexers") else (),
        }
        self.engram = params.get("engram", {})
        self.taps: dict[int, Array] = {}
        self.experts: dict[int, Array] = {}
        self.router: dict[int, RouterNotes] = {}
        self.index: dict[int, tuple[Array, Array]] = {}
        self.attention_inputs: dict[int, Array] = {}

    def __call__(self, segments: tuple[Segment, ...], x: Array, pre: Array, state: Any, pool: Array | None):
        """As `layer_loop.LayerLoop`."""
        for segment in segments:
            for i in range(segment.repeats):

                def group(carry: tuple, segment=segment, i=i) -> tuple[tuple, dict[int, dict]]:
                    return self._group(segment, i, carry)

                if self.options.remat == "group":
                    group = jax.checkpoint(group, policy=self._policy())
                (x, pre, state, _, pool), notes = group((x, pre, state, None, pool))
                for run in segment.runs:
                    first = segment.first + i * segment.size + run.offset
                    for layer in range(first, first + run.count):
                        self._keep(run, layer, notes[layer])
        return x, pre, state, pool

    def _group(self, segment: Segment, i: int, carry: tuple) -> tuple[tuple, dict[int, dict]]:
        """The layers of a group, and their notes by layer."""
        first = segment.first + i * segment.size
        slots = segment.kv_slot + i * segment.kv_step, segment.index_slot + i * segment.index_step
        notes: dict[int, dict] = {}
        for run in segment.runs:
            carry, more = self._run(run, first + run.offset, slots, carry)
            notes |= more
        return carry, notes

    def _run(self, run: Run, first: int, slots: tuple[int, int], carry: tuple) -> tuple[tuple, dict[int, dict]]:
        """`run.count` equal layers from `first` on."""
        if not self.options.candidates:
            run = dataclasses.replace(run, pool=None)
        if self.options.rolled and run.count > 1:  # Window and Reuse layers: they change the streams only
            rest = carry[2:]

            def body(streams: tuple, weights: Params) -> tuple:
                same = rest
                if self.keys.long:
                    # Every layer gathers the same entries. JAX would gather them once for all, and keep them: many
                    # times the memory of the whole row. Tied to the streams, they are no longer the same.
                    streams, same = jax.lax.optimization_barrier((streams, rest))
                new, note = self._checkpointed(run, first, slots, rolled=True)(weights, (), (*streams, *same))
                return new[:2], note

            streams, stacked = jax.lax.scan(body, carry[:2], self.layers[first])
            notes = {first + j: jax.tree.map(lambda leaf, j=j: leaf[j], stacked) for j in range(run.count)}
            return (*streams, *rest), notes
        notes = {}
        for layer in range(first, first + run.count):
            engram = ()
            if run.engram:
                module = {k: v for k, v in self.engram[f"l{layer}"].items() if k != "embed"}
                engram = (module, self.memory[f"l{layer}"])
            weights = jax.tree.map(lambda w: w[0], self.layers[layer])
            carry, notes[layer] = self._checkpointed(run, layer, slots)(weights, engram, carry)
        return carry, notes

    def _policy(self):
        return jax.checkpoint_policies.save_only_these_names(*self.options.kept_names)

    def _checkpointed(self, run: Run, layer: int, slots: tuple[int, int], rolled: bool = False):
        def step(weights: Params, engram: tuple, carry: tuple) -> tuple:
            return self._layer(run, layer, slots, weights, engram, carry)

        if self.options.remat == "none":
            return step
        # Inside a scan nothing can be merged with the forward pass anyway.
        return jax.checkpoint(step, policy=self._policy(), prevent_cse=not rolled)

    def _keep(self, run: Run, layer: int, note: dict[str, Any]) -> None:
        if run.tapped:
            self.taps[layer] = note["tap"]
        chosen = note["experts"]
        if self.facts is not None:
            self.router[layer], chosen = chosen, chosen.experts
        self.experts[layer] = chosen
        for name, kept in (("index", self.index), ("attn_in", self.attention_inputs)):
            if name in note:
                kept[layer] = note[name]

    def _layer(
        self, run: Run, layer: int, slots: tuple[int, int], weights: Params, engram: tuple, carry: tuple
    ) -> tuple[tuple, dict[str, Any]]:
        """One layer: the carry (streams, mix, state, selection, pool) after it, and notes."""
        x, pre, state, selection, pool = carry
        note: dict[str, Any] = {}
        if engram:
            module = Engram(self.config, self.numerics)
            x = module.apply({"params": engram[0]}, x, engram[1], self.image_mask)
        if run.tapped:
            note["tap"] = hc.stream_mean(x, self.numerics)
        shared = Sharing(selection, pool, self.keys.index_loss if self.options.index_loss != "none" else None)

        def attention(y: Array) -> Array:
            nonlocal state
            if self.options.attention_inputs:
                note["attn_in"] = y
            u, state = csa2_attention(
                self.config,
                self.numerics,
                run,
                self.sources,
                weights["attn"],
                self.keys,
                state,
                shared,
                layer,
                *slots,
                pick,
                y,
            )
            return u

        x, pre, note["experts"] = block(
            self.config, self.numerics, weights, x, pre, attention, self.image_mask, facts=self.facts
        )
        if shared.index_note is not None:
            note["index"] = shared.index_note
        return (x, pre, state, shared.selection, shared.pool), note

    def notes(self) -> dict[str, Any]:
        """What `model.forward` returns beside the hidden state."""

        def stacked(by_layer: dict[int, Any]) -> Any:
            trees = [by_layer[layer] for layer in sorted(by_layer)]
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees) if trees else None

        notes = {"taps": self.taps, "experts": self.experts}
        if self.options.attention_inputs:
            notes["attn_in"] = self.attention_inputs
        if self.options.index_loss != "none":
            notes["index"] = stacked(self.index)
        if self.facts is not None:
            notes["router"] = stacked(self.router)
        return notes
