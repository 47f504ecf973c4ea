"""One layer of the model: two mHC sublayers, CSA2 attention and MoE, over whatever keeps the keys (a `KeyStore`)."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax import Array

from dsv41_jax import hyper_connections as hc
from dsv41_jax import indexer as index
from dsv41_jax.compressor import Compressor
from dsv41_jax.config import ModelConfig
from dsv41_jax.csa2 import Attention
from dsv41_jax.indexer import Indexer
from dsv41_jax.layer_map import Mode
from dsv41_jax.layer_plan import Run
from dsv41_jax.moe import MoE
from dsv41_jax.norms import RMSNorm
from dsv41_jax.numerics import Numerics
from dsv41_jax.router_notes import RouterNotes, TokenFacts

Params = dict[str, Any]


class KeyStore(Protocol):
    """Where a block of tokens finds keys: caches (`cached_block.CachedBlock`) or the block itself
    (`packed.PackedSamples`).

    `state` is a pytree that the layer loop carries; `slot` counts the KV sources of one ratio. What is stored is
    quantised here, in numerics that quantise.
    """

    def angles(self, compressed: bool) -> tuple[Array, Array]:
        """cos and sin [B, t, rope/2] of the tokens, for a layer with (or without) a compressed stream."""

    def window(self, state: Any, run: Run, layer: Array | int, attention: Attention, y: Array) -> tuple[Any, Any]:
        """Make and keep the window rows of the tokens y [B, t, D] of a layer, whose projections `attention` is bound
        to; return state and the keys for `attend`.
        """

    def add_entries(self, state: Any, compressor: Compressor, params: Params, y: Array, slot: Array | int) -> Any:
        """Compress the tokens y [B, t, D] of a KV source and append the entries."""

    def select(
        self, state: Any, run: Run, slot: Array | int, queries: Array, weights: Array, pool: Array | None
    ) -> tuple[Array, Array | None]:
        """Selection int32 [B, t, index_topk] by index queries [B, t, heads, di] and head weights [B, t, heads], and
        the candidate pool after it.
        """

    def attend(
        self,
        state: Any,
        run: Run,
        slot: Array | int,
        attention: Attention,
        q: Array,
        window: Any,
        selection: Array | None,
    ) -> Array:
        """Attention output [B, t, H, d] of queries q over window keys and selected entries."""


def attention_module(config: ModelConfig, numerics: Numerics) -> Attention:
    """The attention projections of any layer."""
    return Attention(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
        q_lora=config.q_lora_rank,
        o_lora=config.o_lora_rank,
        o_groups=config.o_groups,
        eps=config.rms_norm_eps,
        numerics=numerics,
    )


def moe_module(config: ModelConfig, numerics: Numerics, draft: bool = False) -> MoE:
    """The experts of a backbone layer or of a draft block."""
    return MoE(
        n_experts=config.dspark_n_routed_experts if draft else config.n_routed_experts,
        topk=config.dspark_num_experts_per_tok if draft else config.num_experts_per_tok,
        inter=config.moe_intermediate_size,
        scoring=config.scoring_func,
        normalise=config.norm_topk_prob,
        route_scale=config.routed_scaling_factor,
        limit=config.swiglu_limit,
        numerics=numerics,
    )


def compressor_module(config: ModelConfig, numerics: Numerics, ratio: int) -> Compressor:
    """The compressor of a KV source."""
    return Compressor(ratio, config.head_dim, config.index_head_dim, config.rms_norm_eps, numerics)


def indexer_module(config: ModelConfig, numerics: Numerics) -> Indexer:
    """The indexer of an index source."""
    return Indexer(config.index_n_heads, config.index_head_dim, numerics)


def block(
    config: ModelConfig,
    numerics: Numerics,
    params: Params,
    x: Array,
    pre: Array,
    attention: Callable[[Array], Array],
    image_mask: Array | None,
    draft: bool = False,
    facts: TokenFacts | None = None,
) -> tuple[Array, Array, Array | RouterNotes]:
    """Attention and FFN sublayers around the residual streams.

    Args:
        params: one layer of `layers` or `mtp.layers`.
        x: streams [B, t, C, D]. pre: collapse weights handed over by the sublayer before, float32 [B, t, C].
        attention: normed input [B, t, D] -> output [B, t, D].
        facts: of the tokens, in training.

    Returns:
        streams, this block's FFN `pre` (for the next block), chosen experts [B, t, k] (`RouterNotes` with facts).
    """
    connect = functools.partial(_connect, config, numerics, params)
    x, y, pre_attn, post, comb = connect("attn", x, None, pre)
    x, y, pre_ffn, post_ffn, comb_ffn = connect("ffn", x, (attention(y), post, comb), pre_attn)
    u, experts = moe_module(config, numerics, draft).apply({"params": params["ffn"]}, y, image_mask, facts)
    return hc.expand(u, x, post_ffn, comb_ffn, numerics), pre_ffn, experts


def _connect(
    config: ModelConfig,
    numerics: Numerics,
    params: Params,
    sublayer: str,
    x: Array,
    update: tuple[Array, Array, Array] | None,
    pre: Array,
) -> tuple[Array, Array, Array, Array, Array]:
    """Between two sublayers: spread the output of the one before over the streams, read the next one's input from them.

    Args:
        sublayer: "attn" or "ffn", the next one. update: output [B, t, D], post and comb of the one before.

    Returns:
        streams; the sublayer's normed input y [B, t, D]; its coefficients pre, post, comb.
    """
    coefficients, norm = params[f"hc_{sublayer}"], params[f"{sublayer}_norm"]
    iterations, hc_eps, norm_eps = config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
    if numerics.kernels:
        norm = {"norm": norm["weight"]}
        return hc.connect(x, update, pre, {**coefficients, **norm}, iterations, hc_eps, norm_eps, numerics)
    if update is not None:
        x = hc.expand(update[0], x, update[1], update[2], numerics)
    mixed = hc.HyperConnection(iterations, hc_eps, norm_eps).apply({"params": coefficients}, x)
    y = RMSNorm(norm_eps, numerics).apply({"params": norm}, hc.collapse(x, pre, numerics))
    return x, y, *mixed


class Sharing:
    """What a group of layers shares: the newest selection, and the candidate pool.

    Attributes:
        index_loss: in training, `PackedSamples.index_loss`; an index source leaves what it returns in `index_note`.
    """

    def __init__(
        self, selection: Array | None = None, pool: Array | None = None, index_loss: Callable[..., Any] | None = None
    ):
        self.selection = selection
        self.pool = pool
        self.index_loss = index_loss
        self.index_note: Any = None


def csa2_attention(
    config: ModelConfig,
    numerics: Numerics,
    run: Run,
    params: Params,
    layer_params: Params,
    keys: KeyStore,
    state: Any,
    shared: Sharing,
    layer: Array | int,
    kv_slot: Array | int,
    index_slot: Array | int,
    pick: Callable[[Any, Array | int], Any],
    y: Array,
) -> tuple[Array, Any]:
    """Attention of one layer by its mode in the layer-share map; updates `shared` and returns output and state.

    Args:
        params: the whole tree (for `compressors` and `indexers`). layer_params: the layer's `attn` subtree.
        kv_slot, index_slot: the layer's sources, by key from the map. pick: takes one element of a stacked subtree.
        y: normed input [B, t, D].
    """
    attention = attention_module(config, numerics).bind({"params": layer_params})
    cos, sin = keys.angles(run.ratio > 0)
    qr, q = attention.queries(y, cos, sin)
    state, window = keys.window(state, run, layer, attention, y)

    if run.mode is Mode.FULL:
        compressor = compressor_module(config, numerics, run.ratio)
        source = pick(params["compressors"][f"r{run.ratio}"], kv_slot)
        state = keys.add_entries(state, compressor, source, y, kv_slot)
    if run.mode in (Mode.FULL, Mode.REINDEX):
        source = pick(params["indexers"], index_slot, numerics.kernels)
        # The indexer learns from its own loss only, and that loss teaches nothing else.
        inputs = jax.lax.stop_gradient((qr, y))
        queries, weights = indexer_module(config, numerics).apply({"params": source}, *inputs, cos, sin)
        constant = jax.lax.stop_gradient((queries, weights))
        shared.selection, shared.pool = keys.select(state, run, kv_slot, *constant, shared.pool)
        if shared.index_loss is not None:
            main = (attention, q, window, shared.selection)
            shared.index_note = shared.index_loss(state, run, kv_slot, *main, queries, weights)

    selection = None if run.mode is Mode.WINDOW else shared.selection
    o = keys.attend(state, run, kv_slot, attention, q, window, selection)
    return attention.output(o, cos, sin), state


def select_entries(
    config: ModelConfig,
    run: Run,
    scores: Array,
    visible: Array,
    newest_block: Array | None,
    entry_block: Array | None,
    pool: Array | None,
) -> tuple[Array, Array | None]:
    """Selection [B, t, index_topk] from scores [B, t, N], and the candidate pool after this index source.

    Args:
        visible: bool [B, t, N]. newest_block: int32 [B, t] for the source that builds the pool (see
            `indexer.candidate_blocks`). entry_block: int32 [B, N], or None when blocks are consecutive entries.
    """
    allowed = visible
    size = config.candidate_block_size
    if run.pool == "builds":
        pool = index.candidate_blocks(scores, visible, newest_block, entry_block, size, config.candidate_topk_blocks)
    elif run.pool == "searches":
        allowed = visible & index.pool_mask(pool, scores.shape[-1], entry_block, size)
    return index.select(scores, allowed, config.index_topk), pool
