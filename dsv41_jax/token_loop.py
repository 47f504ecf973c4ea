"""From checked prompts to tokens: the request, and the loop that samples it."""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from dsv41_jax import ced
from dsv41_jax.arguments import check_id_list, check_whole
from dsv41_jax.completion import GeneratedToken, TokenLogprob
from dsv41_jax.config import ModelConfig
from dsv41_jax.image_input import ImageInput
from dsv41_jax.runner import cache_bucket
from dsv41_jax.sampling import (
    TOP_LOGPROBS,
    RowSettings,
    SamplingOptions,
    prompt_counts,
    row_settings,
    sample,
    token_logprobs,
)
from dsv41_jax.stop_strings import check_stops

if TYPE_CHECKING:
    from dsv41_jax.generate import Model

DEFAULT_PREFILL_MODE = "ced"  # of text calls


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """Checked options of a text call besides the prompts.

    Attributes:
        stop_ids: ids that end a row, the end-of-sequence token among them. stops: strings that end a row.
        logprobs: how many likeliest tokens to report beside the chosen one; None for no log probabilities.
        samples: how many texts are drawn for each prompt.
    """

    max_new_tokens: int
    sampling: SamplingOptions
    stop_ids: frozenset[int]
    stops: tuple[str, ...]
    logprobs: int | None
    samples: int
    prefill_mode: str
    speculate: bool


def check_options(
    config: ModelConfig,
    *,
    max_new_tokens: int,
    sampling: SamplingOptions,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    logprobs: int | None = None,
    n: int = 1,
    prefill_mode: str = DEFAULT_PREFILL_MODE,
    speculate: bool = False,
) -> TextOptions:
    """Check the options of a text call; ValueError or TypeError names what is wrong."""
    if prefill_mode == "ced" and not config.supports_ced:
        warnings.warn('prefill_mode="ced": this layer map has no encoder-only prefill, "exact" is used', stacklevel=4)
        prefill_mode = "exact"
    ced.check_mode(prefill_mode, config)
    sampling.check_vocabulary(config.vocab_size)
    if logprobs is not None:
        check_whole("logprobs", logprobs, 0, TOP_LOGPROBS)
    if not isinstance(speculate, bool):
        raise TypeError(f"speculate={speculate!r}: True or False is needed")
    if speculate and not config.n_draft:
        raise ValueError("speculate=True: this model has no draft blocks (num_nextn_predict_layers is 0)")
    return TextOptions(
        max_new_tokens=check_whole("max_new_tokens", max_new_tokens, 1),
        sampling=sampling,
        stop_ids=frozenset(check_id_list(config, "stop_ids", stop_ids)) | {config.eos_token_id},
        stops=check_stops(stop),
        logprobs=logprobs,
        samples=check_whole("n", n, 1, 1024),
        prefill_mode=prefill_mode,
        speculate=speculate,
    )


@dataclasses.dataclass(frozen=True)
class Request:
    """Prompts as a batch, and its options.

    Attributes:
        token_ids: int32 [rows, T], padded on the right; `rows` is a power of two. lengths: int32 [rows].
        wanted: how many of the rows are asked for (the samples of a prompt side by side); the rest fill the bucket.
        settings: the options on the device, one row each.
        images: for each row the images of its prompt, or None.
        max_len: tokens a row of the cache holds.
    """

    token_ids: np.ndarray
    lengths: np.ndarray
    wanted: int
    settings: RowSettings
    images: list[list[ImageInput]] | None
    max_len: int
    options: TextOptions


def make_request(
    config: ModelConfig,
    encoded: Sequence[Sequence[int]],
    options: TextOptions,
    images: Sequence[Sequence[ImageInput]] | None = None,
) -> Request:
    """A batch of tokenised prompts.

    Raises:
        ValueError: a prompt and its new tokens exceed the model's positions.
    """
    longest, limit = max(map(len, encoded)), config.max_position_embeddings
    if longest + options.max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens={options.max_new_tokens} exceed "
            f"max_position_embeddings={limit}"
        )
    samples = options.samples
    wanted = len(encoded) * samples
    rows = 1 << (wanted - 1).bit_length()
    prompt_of = [row // samples if row < wanted else 0 for row in range(rows)]
    token_ids = np.full((rows, longest), config.pad_token_id, np.int32)
    lengths = np.ones(rows, np.int32)  # rows that only fill the bucket read one token
    for row, prompt in enumerate(prompt_of[:wanted]):
        token_ids[row, : len(encoded[prompt])] = encoded[prompt]
        lengths[row] = len(encoded[prompt])
    # The first sample of a prompt is the one that n=1 gives.
    streams = [prompt + (row % samples << 16) for row, prompt in enumerate(prompt_of)]
    return Request(
        token_ids=token_ids,
        lengths=lengths,
        wanted=wanted,
        settings=row_settings([options.sampling] * rows, streams, config.vocab_size),
        images=None if images is None else [list(images[p]) if r < wanted else [] for r, p in enumerate(prompt_of)],
        max_len=min(cache_bucket(longest + options.max_new_tokens), limit),
        options=options,
    )


def token_loop(model: "Model", request: Request, ended: set[int]) -> Iterator[GeneratedToken]:
    """Tokens in the order they are made; a row ends before its stop token.

    Args:
        ended: rows that the caller has ended; the caller may add to it between tokens.
    """
    options = request.options
    counts = prompt_counts(request.token_ids, request.lengths, model.config.vocab_size)
    logits, cache = model.prefill(
        request.token_ids, request.lengths, options.prefill_mode, request.images, max_len=request.max_len
    )
    running = set(range(request.wanted))
    for step in range(options.max_new_tokens):
        drawn, counts = sample(logits, request.settings, counts, jnp.full(len(request.lengths), step, jnp.int32))
        tokens = np.asarray(drawn)
        reported = None if options.logprobs is None else logprob_rows(logits, drawn, options.logprobs)
        for row in sorted(running):
            if int(tokens[row]) in options.stop_ids:
                running.discard(row)
            else:
                yield GeneratedToken(row, int(tokens[row]), None if reported is None else reported[row])
        running -= ended
        if not running or step + 1 == options.max_new_tokens:
            return
        logits, cache = model.decode(cache, tokens)


def logprob_rows(logits: np.ndarray, tokens: np.ndarray, top: int) -> list[TokenLogprob]:
    """Log probabilities of tokens [B] drawn from logits [B, V], with the `top` likeliest beside each."""
    chosen, best, ids = map(np.asarray, token_logprobs(jnp.asarray(logits), jnp.asarray(tokens)))
    return [
        TokenLogprob(int(token), float(own), tuple(zip(row_ids[:top].tolist(), row_best[:top].tolist(), strict=True)))
        for token, own, row_ids, row_best in zip(np.asarray(tokens), chosen, ids, best, strict=True)
    ]
