"""Choosing the next token from logits.

The order is: penalties and bias on the model's own logits, then temperature, top-k, top-p and min-p. Every option is an
array of one number a row, so rows of different requests can share a batch and no value of an option compiles anything.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax.arguments import check_real, check_whole, is_real, is_whole

TOP_LOGPROBS = 20


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen.

    Attributes:
        temperature: 0 takes the most likely token; larger values flatten the distribution.
        top_k: only the k most likely tokens; None for all.
        top_p: only the most likely tokens that together reach this probability (after temperature and top_k); None or 1
            for all.
        min_p: only tokens at least this likely relative to the likeliest (after temperature); None or 0 for all.
        repetition_penalty: positive logits of tokens of the prompt and the output are divided by it, negative ones
            multiplied; 1 does nothing.
        presence_penalty: taken from the logit of each token of the output, -2 to 2.
        frequency_penalty: the same times how often the token is in the output, -2 to 2.
        logit_bias: {token id: -100 to 100}, added to logits.
        seed: seed of the run. Row i draws from a stream of its own, made from the seed and i.

    Raises:
        ValueError: naming the option, its value and what is allowed. TypeError: logit_bias is no mapping.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int = 0

    def __post_init__(self):
        check_real("temperature", self.temperature, 0, 1e6)
        if self.top_k is not None:
            check_whole("top_k", self.top_k, 1)
        if self.top_p is not None and not (is_real(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p={self.top_p!r}: a number above 0 and at most 1 is needed, or None for all tokens")
        if self.min_p is not None:
            check_real("min_p", self.min_p, 0, 1)
        check_real("repetition_penalty", self.repetition_penalty, 0.01, 100)
        for name in ("presence_penalty", "frequency_penalty"):
            check_real(name, getattr(self, name), -2, 2)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise TypeError(f"logit_bias={self.logit_bias!r}: a mapping from token id to a number is needed")
            for token_id, bias in self.logit_bias.items():
                if not is_whole(token_id):
                    raise ValueError(f"logit_bias has the key {token_id!r}: a token id (a whole number) is needed")
                check_real(f"logit_bias[{token_id}]", bias, -100, 100)
        check_whole("seed", self.seed, 0, 2**32 - 1)

    def check_vocabulary(self, vocab: int) -> None:
        """ValueError for a biased id outside the vocabulary."""
        for token_id in self.logit_bias or ():
            if not 0 <= token_id < vocab:
                raise ValueError(f"logit_bias has the token id {token_id}: ids must lie in 0..{vocab - 1}")


@flax.struct.dataclass
class RowSettings:
    """The options of a batch on the device.

    float32 [B] unless noted; top_k int32 [B] (V for all), top_p and min_p 1 and 0 for all; seed and stream uint32 [B]:
    what a row draws from; bias float32 [B, V].
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    presence_penalty: Array
    frequency_penalty: Array
    bias: Array
    seed: Array
    stream: Array


@flax.struct.dataclass
class TokenCounts:
    """What the penalties look at: in_prompt bool [B, V], in_output int32 [B, V] (how often)."""

    in_prompt: Array
    in_output: Array


def row_settings(options: Sequence[SamplingOptions], streams: Sequence[int], vocab: int) -> RowSettings:
    """Settings of B rows, each with its options and the number of its random stream."""
    bias = np.zeros((len(options), vocab), np.float32)
    for row, option in enumerate(options):
        for token_id, value in (option.logit_bias or {}).items():
            bias[row, token_id] = value

    def column(dtype, values) -> Array:
        return jnp.asarray(np.array(list(values), dtype))

    return RowSettings(
        temperature=column(np.float32, (o.temperature for o in options)),
        top_k=column(np.int32, (vocab if o.top_k is None else min(o.top_k, vocab) for o in options)),
        top_p=column(np.float32, (1 if o.top_p is None else o.top_p for o in options)),
        min_p=column(np.float32, (0 if o.min_p is None else o.min_p for o in options)),
        repetition_penalty=column(np.float32, (o.repetition_penalty for o in options)),
        presence_penalty=column(np.float32, (o.presence_penalty for o in options)),
        frequency_penalty=column(np.float32, (o.frequency_penalty for o in options)),
        bias=jnp.asarray(bias),
        seed=column(np.uint32, (o.seed for o in options)),
        stream=column(np.uint32, streams),
    )


def prompt_counts(token_ids: np.ndarray, lengths: np.ndarray, vocab: int) -> TokenCounts:
    """Counts before the first token of the output: int32 [B, T] prompts of real lengths [B]."""
    in_prompt = np.zeros((len(token_ids), vocab), bool)
    for row, (ids, length) in enumerate(zip(token_ids, lengths, strict=True)):
        in_prompt[row, ids[:length]] = True
    return TokenCounts(jnp.asarray(in_prompt), jnp.zeros(in_prompt.shape, jnp.int32))


def penalized_logits(logits: Array, settings: RowSettings, counts: TokenCounts) -> Array:
    """logits [B, V] with penalties and bias: float32 [B, V]."""
    logits = logits.astype(jnp.float32)
    seen = counts.in_prompt | (counts.in_output > 0)
    penalty = settings.repetition_penalty[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits -= settings.frequency_penalty[:, None] * counts.in_output
    logits -= settings.presence_penalty[:, None] * (counts.in_output > 0)
    return logits + settings.bias


def filtered_logits(logits: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """logits [B, V] / temperature, with -inf outside top-k, top-p and min-p. Ties at the border are kept.

    Options are [B]: temperature float32 > 0, top_k int32 (V for all), top_p float32 (1 for all), min_p float32 (0 for
    all).
    """
    v = logits.shape[-1]
    warm = logits.astype(jnp.float32) / temperature[:, None]

    def lowest_kept(warm: Array) -> Array:
        ordered = -jnp.sort(-warm, axis=-1)
        kth = jnp.take_along_axis(ordered, jnp.minimum(top_k, v)[:, None] - 1, axis=-1)
        p = jax.nn.softmax(jnp.where(ordered >= kth, ordered, -jnp.inf), axis=-1)
        before = jnp.cumsum(p, axis=-1) - p
        inside = ((before < top_p[:, None]) | (jnp.arange(v) == 0)) & (ordered >= kth)  # the likeliest always stays
        lowest = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
        return jnp.where(top_p[:, None] >= 1, kth, lowest)

    # Sorting the vocabulary is most of the work, and most requests do not need it.
    lowest = jax.lax.cond(
        jnp.any((top_k < v) | (top_p < 1)), lowest_kept, lambda warm: jnp.min(warm, axis=-1, keepdims=True), warm
    )
    lowest = jnp.maximum(lowest, jnp.max(warm, axis=-1, keepdims=True) + jnp.log(min_p)[:, None])
    return jnp.where(warm >= lowest, warm, -jnp.inf)


def sampling_logits(logits: Array, settings: RowSettings, counts: TokenCounts) -> Array:
    """Logits [B, V] of the distribution that tokens are drawn from, float32, -inf where filtered out.

    Where the temperature is 0 it is all on the likeliest token (the lowest id of equal ones).
    """
    penalized = penalized_logits(logits, settings, counts)
    filtered = filtered_logits(
        penalized, jnp.maximum(settings.temperature, 1e-6), settings.top_k, settings.top_p, settings.min_p
    )
    best = jnp.argmax(penalized, axis=-1)[:, None] == jnp.arange(logits.shape[-1])
    return jnp.where(settings.temperature[:, None] > 0, filtered, jnp.where(best, 0.0, -jnp.inf))


def row_keys(settings: RowSettings, step: Array) -> Array:
    """PRNG keys [B] of the rows' next tokens; step int32 [B], how many tokens of the output were drawn before."""

    def key(seed: Array, stream: Array, step: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), step)

    return jax.vmap(key)(settings.seed, settings.stream, step)


@jax.jit
def sample(logits: Array, settings: RowSettings, counts: TokenCounts, step: Array) -> tuple[Array, TokenCounts]:
    """Next token of each row.

    Args:
        logits: float32 [B, V]. step: int32 [B], how many tokens of the output were drawn before.

    Returns:
        int32 [B], and the counts with it.
    """

    keys = row_keys(settings, step)
    tokens = jax.vmap(jax.random.categorical)(keys, sampling_logits(logits, settings, counts)).astype(jnp.int32)
    return tokens, count_tokens(counts, tokens)


def count_tokens(counts: TokenCounts, tokens: Array) -> TokenCounts:
    """Counts after one more token of each row, int32 [B]."""
    return counts.replace(in_output=counts.in_output.at[jnp.arange(tokens.shape[0]), tokens].add(1))


@jax.jit
def token_logprobs(logits: Array, tokens: Array) -> tuple[Array, Array, Array]:
    """Log probabilities under the model itself: before penalties, bias, temperature and filters.

    Args:
        logits: [B, V]. tokens: int32 [B], the chosen ones.

    Returns:
        of the chosen tokens float32 [B]; of the K = min(20, V) likeliest tokens float32 [B, K], and their ids int32
        [B, K].
    """
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    best, ids = jax.lax.top_k(logprobs, min(TOP_LOGPROBS, logits.shape[-1]))
    return jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0], best, ids
