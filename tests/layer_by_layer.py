"""The backbone one layer at a time, for tests that look inside, force recorded inputs, or put in one wrong layer.

`model.extend` is one program. Here every kind of layer is a program (tiny model A has six), with the layer's number and
its sources as arguments; everything a layer does is the package's own code.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax import hyper_connections as hc
from dsv41_jax import model as assembly
from dsv41_jax.blocks import Sharing, block, csa2_attention
from dsv41_jax.cache import CacheArrays, zero_arrays
from dsv41_jax.cached_block import CachedBlock
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram import Engram
from dsv41_jax.generate import Model
from dsv41_jax.kernel_block import key_store
from dsv41_jax.layer_loop import pick
from dsv41_jax.layer_plan import Run, layer_plan
from dsv41_jax.numerics import Numerics

BLOCK, MAX_LEN = 64, 256


@dataclasses.dataclass(frozen=True)
class Layer:
    """A backbone layer: its number, its kind (equal for layers that share a program), and where its sources stand."""

    number: int
    kind: Run
    kv_slot: int
    index_slot: int
    engram: bool
    tapped: bool


@functools.cache
def layers(config: ModelConfig) -> tuple[Layer, ...]:
    found = []
    for segment in layer_plan(config):
        for repeat in range(segment.repeats):
            first = segment.first + repeat * segment.size
            slots = (segment.kv_slot + repeat * segment.kv_step, segment.index_slot + repeat * segment.index_step)
            for run in segment.runs:
                kind = dataclasses.replace(run, engram=False, tapped=False, offset=0, count=1)
                found += [Layer(first + run.offset + i, kind, *slots, run.engram, run.tapped) for i in range(run.count)]
    return tuple(found)


def layer_step(
    params: dict,
    arrays: CacheArrays,
    x: jax.Array,
    pre: jax.Array,
    selection: jax.Array,
    pool: jax.Array,
    start: jax.Array,
    n_valid: jax.Array,
    image_mask: jax.Array,
    number: jax.Array,
    kv_slot: jax.Array,
    index_slot: jax.Array,
    *,
    config: ModelConfig,
    numerics: Numerics,
    kind: Run,
    store: type[CachedBlock] | None,
) -> dict[str, Any]:
    """One layer, Engram apart: what `LayerLoop` does with it, and the values on the way."""
    keys = (store or key_store(numerics))(config, numerics, start, n_valid, x.shape[1], arrays)
    shared = Sharing(selection, pool)
    weights = pick(params["layers"], number, numerics.kernels)
    note: dict[str, Any] = {}

    def attention(y: jax.Array) -> jax.Array:
        note["attn_in"] = y
        note["attn_out"], note["arrays"] = csa2_attention(
            config,
            numerics,
            kind,
            params,
            weights["attn"],
            keys,
            arrays,
            shared,
            number,
            kv_slot,
            index_slot,
            pick,
            y,
        )
        return note["attn_out"]

    x, pre, experts = block(config, numerics, weights, x, pre, attention, image_mask)
    return {**note, "out": x, "pre": pre, "experts": experts, "selection": shared.selection, "pool": shared.pool}


def new_layer_program(config: ModelConfig, numerics: Numerics, kind: Run, store=None) -> Callable:
    """A program traced anew: for a test that has changed the code it runs, and leaves nothing behind."""
    step = functools.partial(layer_step, config=config, numerics=numerics, kind=kind, store=store)
    return jax.jit(step)


layer_program = functools.cache(new_layer_program)


@functools.partial(jax.jit, static_argnames=("config", "numerics"))
def engram_step(table, weights, x, numbers, image_mask, *, config: ModelConfig, numerics: Numerics) -> jax.Array:
    rows = assembly.engram_rows({"engram": {"it": {"embed": table}}}, numerics, {"it": numbers})["it"]
    return Engram(config, numerics).apply({"params": weights}, x, rows, image_mask)


@functools.partial(jax.jit, static_argnames=("config", "numerics"))
def end_step(params, x, pre, *, config: ModelConfig, numerics: Numerics) -> jax.Array:
    return assembly.head(config, numerics, params, hc.collapse(x, pre, numerics))


class LayerByLayer:
    """Runs blocks of one row's tokens through all layers and keeps what they compute.

    Attributes:
        block: tokens of a step.
        values: {name: {layer: array of all tokens so far}}; names are `post_engram`, `tap` and those of `layer_step`.
        arrays: the cache.
    """

    def __init__(self, model: Model, programs: Mapping[int, Callable] | None = None, block: int = BLOCK):
        self.block = block
        self.model, self.config, self.numerics = model, model.config, model._runner.numerics
        self.programs = {
            layer.number: layer_program(self.config, self.numerics, layer.kind) for layer in layers(self.config)
        } | dict(programs or {})
        self.arrays = zero_arrays(self.config, self.numerics, 1, MAX_LEN)
        self.tokens, self.mask = np.zeros(0, np.int32), np.zeros((1, 0), bool)
        self.values: dict[str, dict[int, np.ndarray]] = {}

    def run(
        self, token_ids: np.ndarray, image_mask=None, image_embeds=None, last: int | None = None
    ) -> np.ndarray | None:
        """Run tokens [n] on from what came before, up to layer `last` (all: returns logits float32 [n, V])."""
        n = len(token_ids)
        mask = np.zeros((1, n), bool) if image_mask is None else image_mask
        hasher = self.model._runner.hasher
        seen = len(self.tokens)
        self.tokens = np.concatenate([self.tokens, token_ids])
        self.mask = np.concatenate([self.mask, mask], axis=1)
        rows = hasher(self.tokens[None], self.mask)[0][:, :, seen:]
        logits = []
        for at in range(0, n, self.block):
            part = slice(at, min(at + self.block, n))
            embeds = None if image_embeds is None else image_embeds[:, part]
            logits.append(self._block(seen + at, token_ids[part], rows[:, :, part], mask[:, part], embeds, last))
        return None if last is not None else np.concatenate(logits)

    def _block(self, start: int, token_ids, rows, mask, embeds, last: int | None) -> np.ndarray | None:
        config, numerics, params = self.config, self.numerics, self.model.params
        n, static = len(token_ids), dict(config=config, numerics=numerics)

        def padded(x) -> jax.Array:
            return jnp.asarray(np.pad(np.asarray(x), [(0, 0), (0, self.block - n)] + [(0, 0)] * (np.ndim(x) - 2)))

        image_mask = padded(mask)
        embeds = None if embeds is None else padded(embeds)
        x = assembly.embed(config, numerics, params, padded(token_ids[None]), image_mask, embeds)
        x = jnp.broadcast_to(x[:, :, None], (1, self.block, config.hc_mult, config.hidden_size))
        pre = hc.identity_mix((1, self.block), config.hc_mult)
        selection = jnp.full((1, self.block, config.index_topk), -1, jnp.int32)
        pool = jnp.full((1, self.block, config.candidate_topk_blocks), -1, jnp.int32)
        position, n_valid = jnp.full(1, start, jnp.int32), jnp.full(1, n, jnp.int32)
        for layer in layers(config)[: None if last is None else last + 1]:
            if layer.engram:
                weights = dict(params["engram"][f"l{layer.number}"])
                numbers = rows[config.engram_layer_ids.index(layer.number)]
                x = engram_step(weights.pop("embed"), weights, x, padded(numbers), image_mask, **static)
                self._keep("post_engram", layer.number, x, n)
            if layer.tapped:
                self._keep("tap", layer.number, hc.stream_mean(x, numerics), n)
            result = self.programs[layer.number](
                params,
                self.arrays,
                x,
                pre,
                selection,
                pool,
                position,
                n_valid,
                image_mask,
                layer.number,
                layer.kv_slot,
                layer.index_slot,
            )
            self.arrays = result.pop("arrays")
            x, pre, selection, pool = (result[name] for name in ("out", "pre", "selection", "pool"))
            for name, value in result.items():
                self._keep(name, layer.number, value, n)
        if last is None:
            return np.asarray(end_step(params, x, pre, **static))[0, :n]
        return None

    def _keep(self, name: str, layer: int, value: jax.Array, n: int) -> None:
        before = self.values.setdefault(name, {})
        value = np.asarray(value)[0, :n]
        before[layer] = np.concatenate([before[layer], value]) if layer in before else value
