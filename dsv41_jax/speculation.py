"""Speculative generation: draft, verify in one step, accept what the model would have drawn itself, rewind.

A round starts from a token that is drawn but not in the cache yet, the anchor:

    draft    the DSpark blocks propose k tokens after it
    verify   the model reads anchor + drafts as one block: the distribution p_i of the token after each of them
    accept   draft i, drawn from q_i, with probability min(1, p_i / q_i), as long as none was refused
    next     from max(p_i - q_i, 0) at the first refusal, from p_k where all were accepted: the next anchor
    rewind   the cache forgets the refused drafts

So a round gives 1 to k + 1 tokens, each distributed exactly as if drawn one by one from p (Leviathan et al. 2023). At
temperature 0, p and q are all on one token, and this is: accept while the draft is the likeliest token.
Source: report, DSpark; spec section 12.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax.completion import GeneratedToken
from dsv41_jax.runner import cache_bucket
from dsv41_jax.sampling import RowSettings, TokenCounts, count_tokens, prompt_counts, sample, sampling_logits
from dsv41_jax.token_loop import logprob_rows

if TYPE_CHECKING:
    from dsv41_jax.generate import Model
    from dsv41_jax.token_loop import Request

_DRAFT_STREAM = 2**32 - 1  # no token of an output has this place


@flax.struct.dataclass
class Verdict:
    """What a round gives each row.

    Attributes:
        accepted: int32 [B], drafts accepted, 0 to k.
        tokens: int32 [B, k + 1]; the first accepted + 1 of a row are its new tokens, the rest has no meaning.
        counts: what the penalties look at, after those tokens.
    """

    accepted: Array
    tokens: Array
    counts: TokenCounts


@jax.jit
def accept(
    target_logits: Array,
    draft_logits: Array,
    drafts: Array,
    settings: RowSettings,
    counts: TokenCounts,
    step: Array,
) -> Verdict:
    """Judge the drafts of one round.

    Args:
        target_logits: float32 [B, k + 1, V], the model's after the anchor and after each draft.
        draft_logits: float32 [B, k, V]; drafts int32 [B, k] were drawn from their softmax at the rows' temperatures
            (where that is 0, they may be any tokens).
        settings, counts: see `sampling`; the counts include the anchor.
        step: int32 [B], how many tokens of the output were drawn before. A row's random numbers depend on its seed, its
            stream and the place of a token in the output.
    """
    batch, places, vocab = target_logits.shape
    warm = draft_logits / jnp.maximum(settings.temperature, 1e-6)[:, None, None]
    drawn_from = jax.nn.softmax(warm, axis=-1)
    q = jnp.where(settings.temperature[:, None, None] > 0, drawn_from, jax.nn.one_hot(drafts, vocab))
    # After the last draft nothing was proposed: q is 0, and the token comes from p.
    q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
    drafts = jnp.pad(drafts, ((0, 0), (0, 1)))

    def place(counts: TokenCounts, inputs: tuple) -> tuple[TokenCounts, tuple[Array, Array]]:
        """Whether the draft here is accepted, and the token that takes its place otherwise, if all before it were."""
        logits, q, draft, i = inputs
        p = jax.nn.softmax(sampling_logits(logits, settings, counts), axis=-1)
        at_draft = jnp.arange(batch), draft
        choice, redraw = _keys(settings, step + i)
        accepted = (jax.vmap(jax.random.uniform)(choice) * q[at_draft] < p[at_draft]) & (i < places - 1)
        rest = jnp.maximum(p - q, 0)
        rest = jnp.where(rest.sum(axis=-1, keepdims=True) > 0, rest, p)  # p = q but for rounding
        other = jax.vmap(jax.random.categorical)(redraw, jnp.log(rest)).astype(jnp.int32)
        return count_tokens(counts, draft), (accepted, other)

    inputs = (jnp.moveaxis(target_logits, 1, 0), jnp.moveaxis(q, 1, 0), drafts.T, jnp.arange(places))
    _, (agreed, others) = jax.lax.scan(place, counts, inputs)
    accepted = jnp.cumprod(agreed, axis=0).sum(axis=0).astype(jnp.int32)
    i, n = jnp.arange(places), accepted[:, None]
    tokens = jnp.where(i < n, drafts, others.T)
    in_output = counts.in_output.at[jnp.arange(batch)[:, None], tokens].add((i <= n).astype(jnp.int32))
    return Verdict(accepted, tokens, counts.replace(in_output=in_output))


@jax.jit
def _draft_keys(settings: RowSettings, round_: Array) -> Array:
    """Keys [B] of a round's drafts, by each row's seed and stream."""

    def key(seed: Array, stream: Array) -> Array:
        row = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), _DRAFT_STREAM)
        return jax.random.fold_in(row, round_)

    return jax.vmap(key)(settings.seed, settings.stream)


def _keys(settings: RowSettings, step: Array) -> tuple[Array, Array]:
    """Keys [B] of the choice at each row's `step`-th token of the output, and of drawing another instead."""

    def keys(seed: Array, stream: Array, step: Array) -> tuple[Array, Array]:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), step)
        return jax.random.fold_in(key, 1), jax.random.fold_in(key, 2)

    return jax.vmap(keys)(settings.seed, settings.stream, step)


class SpeculationStats:
    """Counts rounds by how many drafts they accepted.

    Attributes:
        rounds: int64 [k + 1], rounds of running rows that accepted 0, 1, .. k drafts.
    """

    def __init__(self, block: int):
        self.rounds = np.zeros(block + 1, np.int64)

    @property
    def mean_accepted(self) -> float:
        """Drafts accepted in a round, on average; a round gives one token more. 0 before the first."""
        return float(self.rounds @ np.arange(len(self.rounds)) / max(1, self.rounds.sum()))

    @property
    def accepted_by_place(self) -> np.ndarray:
        """Share of rounds that accepted the first, second, .. draft: [k]."""
        return self.rounds[::-1].cumsum()[::-1][1:] / max(1, self.rounds.sum())


def speculative_loop(
    model: Model, request: Request, ended: set[int], stats: SpeculationStats | None = None
) -> Iterator[GeneratedToken]:
    """As `token_loop`, several tokens of a row at a time. The text's distribution is the same; at temperature 0 the
    text is, where the numerics of a block and of a single token agree.

    Args:
        ended: rows that the caller has ended; the caller may add to it between tokens.
        stats: receives the rounds.

    Raises:
        ValueError: a model without draft blocks.
    """
    config, options, batch = model.config, request.options, len(request.lengths)
    if not config.n_draft:
        raise ValueError("speculation needs draft blocks, and this model has none (num_nextn_predict_layers is 0)")
    temperature = options.sampling.temperature
    # Rejected drafts need room past the last token; without it the last rounds are shorter.
    longest = int(request.lengths.max()) + options.max_new_tokens + config.dspark_block_size
    max_len = min(cache_bucket(longest), config.max_position_embeddings)
    counts = prompt_counts(request.token_ids, request.lengths, config.vocab_size)
    logits, cache = model.prefill(
        request.token_ids, request.lengths, options.prefill_mode, request.images, max_len=max_len
    )
    anchor, counts = sample(logits, request.settings, counts, jnp.zeros(batch, jnp.int32))
    lengths, made = request.lengths.astype(np.int32), np.zeros(batch, np.int32)
    tokens, accepted, block_logits = np.asarray(anchor)[:, None], np.zeros(batch, np.int32), logits[:, None]
    running, round_ = set(range(request.wanted)), 0
    while True:
        reported = None
        if options.logprobs is not None:
            flat = np.asarray(block_logits).reshape(-1, config.vocab_size)
            reported = logprob_rows(flat, tokens.reshape(-1), options.logprobs)
        for row in sorted(running):
            for i, token in enumerate(tokens[row, : accepted[row] + 1].tolist()):
                if token in options.stop_ids:
                    running.discard(row)
                    break
                yield GeneratedToken(row, token, None if reported is None else reported[row * tokens.shape[1] + i])
                made[row] += 1
                if row in ended or made[row] == options.max_new_tokens:
                    running.discard(row)
                    break
        running -= ended
        if not running:
            return
        # Rows that have ended are read along and rewound: they keep their place in the batch, and their length.
        active = np.isin(np.arange(batch), list(running))
        read = int(min(config.dspark_block_size + 1, cache.max_rewind, max_len - lengths.max()))
        anchor = tokens[np.arange(batch), accepted]
        drafts, draft_logits = _draft(
            model, cache, anchor, read - 1, temperature, _draft_keys(request.settings, jnp.uint32(round_))
        )
        block_logits, cache = model.decode(cache, np.concatenate([anchor[:, None], drafts], axis=1))
        verdict = accept(block_logits, draft_logits, jnp.asarray(drafts), request.settings, counts, jnp.array(made))
        tokens, accepted, counts = np.asarray(verdict.tokens), np.asarray(verdict.accepted), verdict.counts
        if stats is not None:
            stats.rounds += np.bincount(accepted[active], minlength=len(stats.rounds))
        # A row at its last token is not read on: with no room to spare, the others need it to leave them some.
        reach = np.minimum(lengths + 1 + accepted, request.lengths + options.max_new_tokens - 1)
        lengths = np.where(active, reach, lengths).astype(np.int32)
        cache, round_ = cache.rewind(lengths), round_ + 1


def _draft(
    model: Model, cache, anchor: np.ndarray, count: int, temperature: float, key: Array
) -> tuple[np.ndarray, Array]:
    """The first `count` drafts int32 [B, count] after the anchors [B], and their logits [B, count, V]."""
    if count == 0:
        return np.zeros((len(anchor), 0), np.int32), jnp.zeros((len(anchor), 0, model.config.vocab_size))
    tokens, logits, _ = model.draft(cache, anchor, temperature, key)
    return np.asarray(tokens)[:, 1 : count + 1], logits[:, :count]
