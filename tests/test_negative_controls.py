"""One component is wrong at a time, and a golden comparison must notice.

Every comparison here is one that the right code passes in `test_model_float32`, on the same recording.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv41_jax as ds
import layer_by_layer
from dsv41_jax import blocks, dspark, moe
from dsv41_jax import hyper_connections as hc
from dsv41_jax.cache import zero_arrays
from dsv41_jax.cached_block import CachedBlock
from dsv41_jax.csa2 import Attention
from dsv41_jax.norms import RMSNorm, rms_scale
from dsv41_jax.runner import Runner
from dsv41_jax.vision import merge_images
from layer_by_layer import LayerByLayer, layers, new_layer_program
from tiny_golden import (
    check_block_output,
    check_first_draft,
    check_selection,
    image_inputs,
    prompt,
    recording,
)

NOTICED = "Not equal to tolerance|rows differ"


@pytest.fixture(scope="module")
def model(tiny) -> ds.Model:
    return tiny("float32")


def values_with(model: ds.Model, case: str, wrong: int, **change) -> dict[str, dict[int, np.ndarray]]:
    """Values of the layers up to `wrong`, which runs code or a config as they are now, traced anew."""
    settings = dict(config=model.config, numerics=model._runner.numerics, kind=layers(model.config)[wrong].kind)
    program = new_layer_program(**{**settings, **change})
    run = LayerByLayer(model, {wrong: program})
    run.run(prompt(case)[0], last=wrong)
    return run.values


def with_params(model: ds.Model, **attention_or_gate: jax.Array) -> ds.Model:
    """The model with some leaves of every layer's `attn` or `ffn.gate` replaced."""
    params = jax.tree.map(lambda leaf: leaf, model.params)
    for name, value in attention_or_gate.items():
        holder = params["layers"]["attn"] if name in params["layers"]["attn"] else params["layers"]["ffn"]["gate"]
        assert holder[name].shape == value.shape
        holder[name] = value
    runner = model._runner
    return ds.Model(Runner(runner.config, runner.numerics, params, runner.hasher, runner.tables), None)


def image_values(model: ds.Model) -> dict[str, dict[int, np.ndarray]]:
    """Values of the image prompt up to the second KV source: four layers with experts come before it."""
    ids, image = prompt("image"), recording("image")["token_types"][None] >= 0
    embedded = model.params["embed"]["weight"][ids]
    merged = merge_images(model.params, embedded, [image_inputs()], model.config, model._runner.numerics)
    run = LayerByLayer(model)
    run.run(ids[0], image, np.asarray(merged), last=4)
    return run.values


def first_draft(model: ds.Model, case: str) -> tuple:
    """A draft round after a prompt, from the recorded taps; traced anew."""
    config, numerics, g = model.config, model._runner.numerics, recording(case)
    taps = np.split(g["fp32.prefill_main_hidden"][None], len(config.taps), axis=-1)
    length = jnp.full(1, taps[0].shape[1], jnp.int32)
    arrays = zero_arrays(config, numerics, 1, 64)

    def draft(params, taps, anchor):
        tapped = dict(zip(config.taps, taps, strict=True))
        seeded = dspark.seed_windows(config, numerics, params, arrays, tapped, jnp.zeros(1, jnp.int32), length)
        return dspark.draft(config, numerics, params, seeded, anchor, length, jnp.float32(0), jax.random.key(0))

    draft = jax.jit(draft)
    return draft(model.params, taps, jnp.asarray(g["fp32.decode_tokens"][:1]))


def block_with_own_mix(config, numerics, params, x, pre, attention, image_mask, draft=False, facts=None):
    """`blocks.block`, but each sublayer reads what its own `pre` mixes instead of the one before it."""
    connect = hc.HyperConnection(config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)
    norm = RMSNorm(config.rms_norm_eps, numerics)
    own, post, comb = connect.apply({"params": params["hc_attn"]}, x)
    y = norm.apply({"params": params["attn_norm"]}, hc.collapse(x, own, numerics))
    x = hc.expand(attention(y), x, post, comb, numerics)
    own, post, comb = connect.apply({"params": params["hc_ffn"]}, x)
    y = norm.apply({"params": params["ffn_norm"]}, hc.collapse(x, own, numerics))
    u, experts = blocks.moe_module(config, numerics, draft).apply({"params": params["ffn"]}, y, image_mask)
    return hc.expand(u, x, post, comb, numerics), own, experts


class QueryNorm(Attention):
    """Queries normed per head, as in the model before this one."""

    def queries(self, y, cos, sin):
        qr, q = super().queries(y, cos, sin)
        return qr, q * rms_scale(q, self.eps)


class InclusiveBound(CachedBlock):
    """An entry is visible one group too early."""

    def visible(self, ratio, positions):
        return jnp.arange(self.entries[ratio]) <= ((positions + 1) // ratio)[..., None]


class OtherSourcesKeys(CachedBlock):
    """Index keys of the other source of the same ratio."""

    def index_keys(self, state, ratio, slot, pages):
        return super().index_keys(state, ratio, 1 - slot, pages)


def test_nothing_wrong(model):
    """The comparisons below pass when nothing is changed."""
    run = LayerByLayer(model)
    run.run(prompt("short")[0], last=0)
    check_block_output(run.values, 0)
    run = LayerByLayer(model)
    run.run(prompt("mid")[0], last=4)
    check_selection(run.values, "mid", 2)
    check_selection(run.values, "mid", 4)
    check_selection(image_values(model), "image", 4)
    check_first_draft(first_draft(model, "short"), "short")


def test_query_norm_added(model, monkeypatch):
    right = blocks.attention_module

    def wrong(config, numerics):
        module = right(config, numerics)
        names = [f.name for f in dataclasses.fields(module) if f.name not in ("parent", "name")]
        return QueryNorm(**{name: getattr(module, name) for name in names})

    monkeypatch.setattr(blocks, "attention_module", wrong)
    with pytest.raises(AssertionError, match=NOTICED):
        check_block_output(values_with(model, "short", 0), 0)


def test_own_mix_in_the_backbone(model, monkeypatch):
    monkeypatch.setattr(layer_by_layer, "block", block_with_own_mix)
    with pytest.raises(AssertionError, match=NOTICED):
        check_block_output(values_with(model, "short", 0), 0)


def test_own_mix_in_the_drafts(model, monkeypatch):
    monkeypatch.setattr(dspark, "block", block_with_own_mix)
    with pytest.raises(AssertionError, match=NOTICED):
        check_first_draft(first_draft(model, "short"), "short")


def test_rope_bases_swapped(model):
    config = model.config
    swapped = dict(rope_theta=config.compress_rope_theta, compress_rope_theta=config.rope_theta)
    with pytest.raises(AssertionError, match=NOTICED):
        check_block_output(values_with(model, "short", 0, config=dataclasses.replace(config, **swapped)), 0)


def test_index_bound_off_by_one(model):
    with pytest.raises(AssertionError, match=NOTICED):
        check_selection(values_with(model, "mid", 2, store=InclusiveBound), "mid", 2)


def test_router_bias_used_as_weight(model, monkeypatch):
    def route(logits, bias, topk, scoring, normalise, route_scale):
        weights, experts = jax.lax.top_k(moe._SCORES[scoring](logits) + bias, topk)
        order = jnp.argsort(experts, axis=-1)
        weights = jnp.take_along_axis(weights, order, axis=-1)
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return jnp.take_along_axis(experts, order, axis=-1), weights * route_scale

    monkeypatch.setattr(moe, "route", route)
    with pytest.raises(AssertionError, match=NOTICED):
        check_block_output(values_with(model, "short", 0), 0)


def test_sink_dropped(model):
    sink = model.params["layers"]["attn"]["attn_sink"]
    run = LayerByLayer(with_params(model, attn_sink=jnp.full_like(sink, -jnp.inf)))
    run.run(prompt("short")[0], last=0)
    with pytest.raises(AssertionError, match=NOTICED):
        check_block_output(run.values, 0)


def test_comb_transposed(model, monkeypatch):
    right = hc.expand
    monkeypatch.setattr(hc, "expand", lambda u, x, post, comb, n: right(u, x, post, jnp.swapaxes(comb, -1, -2), n))
    with pytest.raises(AssertionError, match=NOTICED):
        check_block_output(values_with(model, "short", 0), 0)


def test_image_bias_ignored(model):
    gate = model.params["layers"]["ffn"]["gate"]
    with pytest.raises(AssertionError, match=NOTICED):
        check_selection(image_values(with_params(model, bias_vl=gate["bias"])), "image", 4)


def test_index_keys_of_another_source(model):
    with pytest.raises(AssertionError, match=NOTICED):
        check_selection(values_with(model, "mid", 4, store=OtherSourcesKeys), "mid", 4)
