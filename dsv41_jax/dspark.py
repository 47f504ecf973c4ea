"""DSpark: draft blocks that propose the next tokens from the backbone's tapped streams.

Each draft block keeps a window of KV rows made from one shared input per token (the tapped means, projected). A round
feeds the anchor token and noise tokens through the blocks; a low-rank Markov head then adds what the previous token
says, left to right.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import hyper_connections as hc
from dsv41_jax import quant, rings
from dsv41_jax.blocks import Params, attention_module, block
from dsv41_jax.cache import CacheArrays
from dsv41_jax.config import ModelConfig
from dsv41_jax.kernel_block import attend_everything
from dsv41_jax.layer_loop import pick
from dsv41_jax.linear import Linear
from dsv41_jax.norms import RMSNorm
from dsv41_jax.numerics import Numerics, project_rows
from dsv41_jax.rope import angles, layer_frequencies
from dsv41_jax.router_notes import RouterNotes, TokenFacts
from dsv41_jax.vocabulary import by_vocabulary, embed_ids, logits_of


def main_input(config: ModelConfig, numerics: Numerics, params: Params, taps: dict[int, Array]) -> Array:
    """The draft blocks' input for each token: tapped means {layer: [B, t, D]} -> [B, t, D]."""
    joined = jnp.concatenate([taps[layer] for layer in config.taps], axis=-1)
    mtp = params["mtp"]
    linear = Linear(numerics.parallel.share(config.hidden_size), numerics)
    project = functools.partial(linear.apply, {"params": mtp["main_proj"]})
    projected = numerics.parallel.by_columns(project, joined, config.hidden_size)
    return RMSNorm(config.rms_norm_eps, numerics).apply({"params": mtp["main_norm"]}, projected)


def window_rows(config: ModelConfig, numerics: Numerics, params: Params, m: int, x: Array, positions: Array) -> Array:
    """Window KV [B, t, d] of draft block m from tokens' inputs x [B, t, D], not quantised yet."""
    cos, sin = angles(positions, layer_frequencies(config, False))
    layer = pick(params["mtp"]["layers"], m, numerics.kernels)
    return attention_module(config, numerics).apply({"params": layer["attn"]}, x, cos, sin, method="window_rows")


def seed_windows(
    config: ModelConfig,
    numerics: Numerics,
    params: Params,
    arrays: CacheArrays,
    taps: dict[int, Array],
    start: Array,
    n_valid: Array,
) -> CacheArrays:
    """Add a block's tokens to every draft window."""
    x = main_input(config, numerics, params, taps)
    positions = start[:, None] + numerics.parallel.first_token(x.shape[1]) + jnp.arange(x.shape[1])

    def seed(ring: rings.Ring, m: Array) -> tuple[rings.Ring, None]:
        rows = rings.stored_form(window_rows(config, numerics, params, m, x, positions), numerics)
        rows = rings.whole_block(rows, numerics.parallel)
        return rings.write_window(ring, m, rows, start, n_valid), None

    ring, _ = jax.lax.scan(seed, arrays.draft_window, jnp.arange(config.n_draft))
    return arrays.replace(draft_window=ring)


def draft_hidden(
    config: ModelConfig,
    numerics: Numerics,
    params: Params,
    anchor: Array,
    start: Array,
    window_kv: Callable[[Array], Array],
    window_mask: Array,
    facts: TokenFacts | None = None,
) -> Array | tuple[Array, RouterNotes]:
    """Hidden states of one round.

    Args:
        anchor: int32 [B], the token at position start [B]; noise tokens follow it.
        window_kv: draft block m -> its keys of earlier positions [B, n, d] (for kernels, as the ring stores them);
            window_mask bool [B, n].
        facts: of the round's tokens, in training: then the experts have a gradient on any mesh.

    Returns:
        [B, block, D], collapsed and not normed; with facts also what the experts of the blocks report.
    """
    size = config.dspark_block_size
    b = anchor.shape[0]
    ids = jnp.full((b, size), config.dspark_noise_token_id, jnp.int32).at[:, 0].set(anchor)
    positions = start[:, None] + jnp.arange(size)
    cos, sin = angles(positions, layer_frequencies(config, False))
    module = attention_module(config, numerics)
    embedded = embed_ids(config, numerics, params, ids)
    x = jnp.broadcast_to(embedded[:, :, None], (b, size, config.hc_mult, config.hidden_size))
    pre = hc.identity_mix((b, size), config.hc_mult)
    n = window_mask.shape[-1]
    mask = jnp.concatenate(
        [jnp.broadcast_to(window_mask[:, None], (b, size, n)), jnp.ones((b, size, size), bool)], axis=-1
    )

    def draft_block(carry: tuple[Array, Array], m: Array) -> tuple[tuple[Array, Array], RouterNotes | None]:
        layer = pick(params["mtp"]["layers"], m, numerics.kernels)
        variables = {"params": layer["attn"]}

        def attention(y: Array) -> Array:
            _, q = module.apply(variables, y, cos, sin, method="queries")
            own = module.apply(variables, y, cos, sin, method="window_rows")
            if numerics.kernels:
                stored = rings.joined(window_kv(m), rings.stored_form(own, numerics))
                o = attend_everything(q, stored, mask[:, 0], layer["attn"]["attn_sink"], numerics)
            else:
                own = quant.fake_q8(own) if numerics.quantizes("window_kv") else own
                keys = jnp.concatenate([window_kv(m).astype(own.dtype), own], axis=1)
                o = module.apply(variables, q, keys, mask, None, None, method="attend")
            return module.apply(variables, o, cos, sin, method="output")

        x, pre, notes = block(config, numerics, layer, *carry, attention, None, draft=True, facts=facts)
        return (x, pre), None if facts is None else notes

    (x, pre), notes = jax.lax.scan(draft_block, (x, pre), jnp.arange(config.n_draft))
    hidden = hc.collapse(x, pre, numerics)
    return hidden if facts is None else (hidden, notes)


def base_logits(config: ModelConfig, numerics: Numerics, params: Params, hidden: Array) -> Array:
    """Logits before the Markov bias: [..., D] -> float32 [..., V]."""
    return logits_of(config, numerics, params, hidden, params["mtp"]["norm"])


def markov(config: ModelConfig, numerics: Numerics, params: Params, previous: Array) -> tuple[Array, Array]:
    """Embedding [..., rank] and logit bias float32 [..., V] of the previous token ids [...]."""
    e = params["mtp"]["markov_head"]["embed"]["weight"][previous].astype(numerics.dtype)
    return e, by_vocabulary(config, numerics, params["mtp"]["markov_head"]["head"], e)


def confidence(params: Params, hidden: Array, embedding: Array) -> Array:
    """Raw confidence float32 [...] from hidden [..., D] (before the norm) and the Markov embedding [..., rank]."""
    joined = jnp.concatenate([hidden, embedding], axis=-1).astype(jnp.float32)
    return project_rows(joined, params["mtp"]["confidence_head"]["proj"]["weight"].astype(jnp.float32))[..., 0]


def draft(
    config: ModelConfig,
    numerics: Numerics,
    params: Params,
    arrays: CacheArrays,
    anchor: Array,
    start: Array,
    temperature: Array,
    key: Array,
) -> tuple[Array, Array, Array]:
    """One draft round after the backbone has processed `start` tokens of each row.

    Args:
        anchor: int32 [B], the next token, at position start [B]. temperature: float32 scalar, 0 for argmax. key: a PRNG
            key, or one for each row [B], so that a row's drafts do not depend on its place.

    Returns:
        tokens int32 [B, block + 1] (the anchor first), logits float32 [B, block, V], raw confidence float32 [B, block].
    """
    width = config.sliding_window
    position = start[:, None] - width + jnp.arange(width)
    window_mask = position >= jnp.maximum(arrays.decoder_floor, 0)[:, None]

    def window_kv(m: Array) -> Array | rings.Ring:
        if numerics.kernels:
            return rings.stored_before(arrays.draft_window, m, start, width)
        return rings.window_before(arrays.draft_window, m, start, width, numerics)

    hidden = draft_hidden(config, numerics, params, anchor, start, window_kv, window_mask)
    base = base_logits(config, numerics, params, hidden)

    keys = key if key.ndim else jax.random.split(key, anchor.shape[0])

    def propose(previous: Array, i: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        e, bias = markov(config, numerics, params, previous)
        logits = base[:, i] + bias
        warm = logits / jnp.maximum(temperature, 1e-6)
        sampled = jax.vmap(lambda k, row: jax.random.categorical(jax.random.fold_in(k, i), row))(keys, warm)
        token = jnp.where(temperature > 0, sampled, jnp.argmax(logits, axis=-1)).astype(jnp.int32)
        return token, (token, logits, confidence(params, hidden[:, i], e))

    _, (tokens, logits, scores) = jax.lax.scan(propose, anchor, jnp.arange(config.dspark_block_size))
    tokens = jnp.concatenate([anchor[:, None], tokens.T], axis=1)
    return tokens, jnp.moveaxis(logits, 0, 1), scores.T
