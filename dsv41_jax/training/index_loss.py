"""The indexer's own loss: its scores are to follow the main attention.

KL(p || softmax(index scores)) over the visible entries, p the main attention over them, averaged over heads. Inputs are
detached, so this trains the indexers and the index keys alone, and the language loss trains everything else (the
selection has no gradient).
Source: training spec 3.11, the practice of the family; scored densely.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.blocks import Params, attention_module, compressor_module, indexer_module
from dsv41_jax.config import ModelConfig
from dsv41_jax.indexer import index_scores
from dsv41_jax.layer_loop import pick
from dsv41_jax.layer_map import Mode, layer_map
from dsv41_jax.layer_plan import sources_of_ratio
from dsv41_jax.numerics import Numerics, einsum_f32
from dsv41_jax.packed import PackedSamples

INDEX_KEY_LEAVES = ("wk", "k_norm")  # of a compressor: the part that makes index keys
_MASKED = -1e30


def attention_kl(logits: Array, scores: Array, visible: Array) -> tuple[Array, Array]:
    """Sum of the KL over the queries that see an entry, and how many do.

    Args:
        logits: main attention logits float32 [B, T, H, N], detached here.
        scores: index scores float32 [B, T, N].
        visible: bool [B, T, N].
    """
    main = jax.nn.softmax(jnp.where(visible[:, :, None], logits, _MASKED), axis=-1)
    p = jax.lax.stop_gradient(jnp.mean(main, axis=2))
    q = jax.nn.log_softmax(jnp.where(visible, scores, _MASKED), axis=-1)
    kl = jnp.sum(jnp.where(visible, p * (jnp.log(p + 1e-20) - q), 0.0), axis=-1)
    seen = jnp.any(visible, axis=-1)
    return jnp.sum(kl * seen), jnp.sum(seen)


def index_loss(
    config: ModelConfig,
    numerics: Numerics,
    params: Params,
    attn_in: dict[int, Array],
    segment_ids: Array,
    counted: Array,
    total: Callable[[Array], Array],
) -> Array:
    """Sum over the index sources of the mean `attention_kl` of the rows that count, bool [B].

    `attn_in` {layer: [B, T, D]} is from `model.forward`; `total` adds up what devices with other rows have.
    """
    frozen = jax.lax.stop_gradient({"layers": params["layers"], "compressors": params["compressors"]})
    compressors = {
        name: {**frozen["compressors"][name], **{leaf: source[leaf] for leaf in INDEX_KEY_LEAVES}}
        for name, source in params["compressors"].items()
    }
    keys = PackedSamples(config, numerics, segment_ids, *segment_ids.shape)
    state: dict = {}
    loss = jnp.float32(0)
    for share in layer_map(config)[: config.num_hidden_layers]:
        if share.mode not in (Mode.FULL, Mode.REINDEX):
            continue
        y = jax.lax.stop_gradient(attn_in[share.layer])
        slot = sources_of_ratio(config, share.ratio).index(share.main_kv_from)
        if share.mode is Mode.FULL:
            source = pick(compressors[f"r{share.ratio}"], slot)
            state = keys.add_entries(state, compressor_module(config, numerics, share.ratio), source, y, slot)
        cos, sin = keys.angles(True)
        attention = {"params": pick(frozen["layers"]["attn"], share.layer)}
        qr, q = attention_module(config, numerics).apply(attention, y, cos, sin, method="queries")
        indexer = pick(params["indexers"], config.index_source_layer_ids.index(share.layer))
        queries, weights = indexer_module(config, numerics).apply({"params": indexer}, qr, y, cos, sin)
        main_kv, index_keys = state[share.ratio, slot]
        logits = einsum_f32("bthd,bnd->bthn", q, jax.lax.stop_gradient(main_kv)) * jnp.float32(config.head_dim**-0.5)
        scores = index_scores(queries, weights, index_keys, numerics)
        visible = keys.entries[share.ratio].visible & counted[:, None, None]
        kl, queries_seen = map(total, attention_kl(logits, scores, visible))
        loss = loss + kl / jnp.maximum(queries_seen, 1)
    return loss
