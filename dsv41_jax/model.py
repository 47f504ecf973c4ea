"""The model: embed -> encoder -> hand-over -> decoder -> head.

Two forwards share every mechanism. `extend` runs a block of tokens against a cache (prefill and decode); `forward` runs
whole samples without one (training, evaluation).
"""

import jax.numpy as jnp
from jax import Array

from dsv41_jax import dspark
from dsv41_jax import hyper_connections as hc
from dsv41_jax.blocks import Params, compressor_module
from dsv41_jax.cache import CacheArrays
from dsv41_jax.cached_block import CachedBlock
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram import gather_rows
from dsv41_jax.forward_options import DEFAULT_OPTIONS, ForwardOptions
from dsv41_jax.kernel_block import key_store
from dsv41_jax.layer_loop import LayerLoop, pick
from dsv41_jax.layer_plan import layer_plan, sources_of_ratio
from dsv41_jax.norms import RMSNorm
from dsv41_jax.numerics import Numerics
from dsv41_jax.packed import PackedSamples
from dsv41_jax.router_notes import TokenFacts
from dsv41_jax.sample_loop import SampleLoop
from dsv41_jax.tiles import TEMPORARY_BYTES
from dsv41_jax.vocabulary import embed_ids, logits_of

Loop = LayerLoop | SampleLoop


def embed(
    config: ModelConfig,
    numerics: Numerics,
    params: Params,
    token_ids: Array,
    image_mask: Array | None,
    image_embeds: Array | None,
) -> Array:
    """Token embeddings [B, t, D], image spans replaced by their embeddings [B, t, D]."""
    x = embed_ids(config, numerics, params, token_ids)
    if image_embeds is None:
        return x
    return jnp.where(image_mask[..., None], image_embeds.astype(numerics.dtype), x)


def engram_rows(params: Params, numerics: Numerics, memory: dict[str, Array]) -> dict[str, Array]:
    """Rows of each Engram layer: looked up on the device where `memory` holds row numbers, as given where it holds
    rows."""

    def rows(name: str, value: Array) -> Array:
        if jnp.issubdtype(value.dtype, jnp.integer):
            return gather_rows(params["engram"][name]["embed"], value, numerics)
        return value.astype(numerics.dtype)

    return {name: rows(name, value) for name, value in memory.items()}


def encode(config: ModelConfig, loop: Loop, embedded: Array, state, pool: Array | None):
    """Encoder layers: embedded [B, t, D] -> streams [B, t, C, D], collapse weights, key store state and pool."""
    streams = (*embedded.shape[:2], config.hc_mult, config.hidden_size)
    x = jnp.broadcast_to(embedded[:, :, None], streams)
    pre = hc.identity_mix(embedded.shape[:2], config.hc_mult)
    encoder = tuple(s for s in layer_plan(config) if s.first < config.decoder_start)
    return loop(encoder, x, pre, state, pool)


def backbone(config: ModelConfig, numerics: Numerics, loop: Loop, embedded: Array, state, pool: Array | None):
    """All layers: embedded [B, t, D] -> last hidden state [B, t, D] (not normed) and the key store's state."""
    decoder = tuple(s for s in layer_plan(config) if s.first >= config.decoder_start)
    x, pre, state, pool = loop(decoder, *encode(config, loop, embedded, state, pool))
    return hc.collapse(x, pre, numerics), state


def hand_over(config: ModelConfig, numerics: Numerics, params: Params, keys: CachedBlock, x: Array, pre: Array, state):
    """What the decoder will read of tokens it does not run on: the last source's main KV and index keys, made from the
    encoder's streams x [B, t, C, D] and the mix of its last FFN. Returns the key store's state.
    """
    layer = config.decoder_start
    ratio = config.compress_ratios[layer]
    slot = sources_of_ratio(config, ratio).index(layer)
    norm = RMSNorm(config.rms_norm_eps, numerics)
    y = norm.apply({"params": pick(params["layers"], layer)["attn_norm"]}, hc.collapse(x, pre, numerics))
    source = pick(params["compressors"][f"r{ratio}"], slot)
    return keys.add_entries(state, compressor_module(config, numerics, ratio), source, y, slot)


def head(config: ModelConfig, numerics: Numerics, params: Params, hidden: Array) -> Array:
    """hidden [..., D] -> logits float32 [..., V]."""
    return logits_of(config, numerics, params, hidden, params["norm"])


def initial_pool(config: ModelConfig, batch: int, t: int, keys: CachedBlock) -> Array | None:
    """An empty candidate pool of the shape its builder returns; None without a candidate source."""
    source = config.candidate_source_layer_id
    if source is None:
        return None
    blocks = -(-keys.entries[config.compress_ratios[source]] // config.candidate_block_size)
    return jnp.full((batch, t, min(config.candidate_topk_blocks, blocks)), -1, jnp.int32)


def extend(
    config: ModelConfig,
    numerics: Numerics,
    params: Params,
    arrays: CacheArrays,
    token_ids: Array,
    start: Array,
    n_valid: Array,
    memory: dict[str, Array],
    image_mask: Array | None = None,
    image_embeds: Array | None = None,
    write_floor: Array | None = None,
    layers: str = "all",
    all_logits: bool = False,
    temporary_bytes: int = TEMPORARY_BYTES,
    record: dict | None = None,
) -> tuple[Array | None, CacheArrays]:
    """Run a block of tokens of each row against the cache, and add them to it.

    Args:
        token_ids: int32 [B, t]; row b's tokens stand at positions start[b] .. start[b] + n_valid[b] - 1, the rest is
            padding and writes nothing. Where devices split the tokens of a block: this device's part of them.
        start, n_valid: int32 [B].
        memory: Engram input by layer name, [B, t, columns] row numbers or [B, t, columns, width] rows.
        image_mask: bool [B, t], image positions, with image_embeds [B, t, D]; None for text.
        write_floor: int32 [B]; global entries wholly before it are read and never written (default: 0). The floors of
            the windows are part of the cache.
        layers: "all", or "encoder": the encoder and the hand-over to the decoder, without logits.
        all_logits: logits of every token instead of each row's last valid one.
        temporary_bytes: see `CachedBlock`.
        record: a dict that receives per-layer values; the layer loop is unrolled then.

    Returns:
        logits float32 [B, V] or [B, t, V] (None for the encoder), and the cache.
    """
    b, t = token_ids.shape
    keys = key_store(numerics)(config, numerics, start, n_valid, t, arrays, write_floor, temporary_bytes)
    rows = engram_rows(params, numerics, memory)
    loop = LayerLoop(config, numerics, params, keys, rows, image_mask, rolled=record is None, record=record)
    embedded = embed(config, numerics, params, token_ids, image_mask, image_embeds)
    pool = initial_pool(config, b, t, keys)
    if layers == "encoder":
        x, pre, arrays, _ = encode(config, loop, embedded, arrays, pool)
        return None, hand_over(config, numerics, params, keys, x, pre, arrays)
    hidden, arrays = backbone(config, numerics, loop, embedded, arrays, pool)
    if config.n_draft:
        arrays = dspark.seed_windows(config, numerics, params, arrays, loop.taps, start, n_valid)
    if not all_logits:
        hidden = numerics.parallel.pick_token(hidden, jnp.maximum(n_valid - 1, 0), t)
    return head(config, numerics, params, hidden), arrays


def forward(
    config: ModelConfig,
    numerics: Numerics,
    params: Params,
    token_ids: Array,
    memory: dict[str, Array],
    segment_ids: Array | None = None,
    *,
    image_mask: Array | None = None,
    image_embeds: Array | None = None,
    replay: Array | None = None,
    facts: TokenFacts | None = None,
    options: ForwardOptions = DEFAULT_OPTIONS,
) -> tuple[Array, dict]:
    """Whole samples without a cache. Positions, windows, groups of tokens and selection restart at every sample.

    Args:
        token_ids: int32 [B, T]. memory: see `extend`.
        segment_ids: int32 [B, T]; each stretch of equal ids is a sample of its own. None: every row is one sample.
        image_mask: bool [B, T], image positions, with image_embeds [B, T, D]; None for text.
        replay: int32 [B, T], floors of the decoder's windows as places in the row: keys before it do not exist for
            that token, as after a prefill that ran the decoder on the prompt's last tokens only (`ced`).
        facts: of the tokens, for the balance of experts; the index loss leaves out tokens of weight 0.

    Returns:
        last hidden state [B, T, D] (apply `head`), and a dict with
            taps {layer: [B, T, D]}, experts {layer: int32 [B, T, k]};
            index, if the options name an index loss: sum of the KL and number of queries, float32 [index sources] each;
            router, with facts: `RouterNotes`, a leading axis of layers on every array;
            attn_in {layer: [B, T, D]}, the normed input of the attention, if the options ask for it.
    """
    numerics = numerics.computed_by("reference")  # kernels read caches, and none has a gradient
    counted = None if facts is None else facts.weights
    keys = PackedSamples(config, numerics, options, segment_ids, token_ids.shape, replay, counted)
    rows = engram_rows(params, numerics, memory)
    loop = SampleLoop(config, numerics, options, params, keys, rows, image_mask, facts)
    embedded = embed(config, numerics, params, token_ids, image_mask, image_embeds)
    hidden, _ = backbone(config, numerics, loop, embedded, {}, None)
    return hidden, loop.notes()
