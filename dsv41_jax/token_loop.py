"""From checked prompts to tokens: the request, and the loop that samples it."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from dsv41_jax.config import ModelConfig
from dsv41_jax.runner import cache_bucket
from dsv41_jax.sampling import SamplingOptions, is_whole, sample
from dsv41_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dsv41_jax.generate import Model

PREFILL_MODES = ("exact",)


def check_mode(mode: str) -> None:
    """Raise ValueError for an unknown prefill mode."""
    if mode not in PREFILL_MODES:
        raise ValueError(f"prefill mode {mode!r} is unknown; this version has: {', '.join(PREFILL_MODES)}")


def check_ids(config: ModelConfig, token_ids: object, ndim: int | tuple[int, ...]) -> np.ndarray:
    """Token ids as int32.

    Raises:
        ValueError: a wrong number of axes, no tokens, anything but whole numbers, or ids outside the vocabulary.
    """
    ids = np.asarray(token_ids)
    allowed = (ndim,) if isinstance(ndim, int) else ndim
    if ids.ndim not in allowed or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        axes = " or ".join(map(str, allowed))
        raise ValueError(f"token ids must be whole numbers in an array of {axes} axes, got {ids.dtype} {ids.shape}")
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ValueError(f"token ids must lie in 0..{config.vocab_size - 1}, got {ids.min()}..{ids.max()}")
    return ids.astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Request:
    """Checked prompts and options.

    Attributes:
        token_ids: int32 [rows, T], padded on the right; `rows` is a power of two. lengths: int32 [rows].
        wanted: how many of the rows are asked for; the rest fill the bucket.
        stops: ids that end a row. max_len: tokens a row of the cache holds.
    """

    token_ids: np.ndarray
    lengths: np.ndarray
    wanted: int
    stops: frozenset[int]
    max_new_tokens: int
    max_len: int
    options: SamplingOptions
    prefill_mode: str


def make_request(
    config: ModelConfig,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    max_new_tokens: int,
    options: SamplingOptions,
    stop_ids: Sequence[int],
    prefill_mode: str,
) -> Request:
    """Check everything and tokenise; ValueError names what is wrong."""
    check_mode(prefill_mode)
    if not is_whole(max_new_tokens) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r}: a whole number of at least 1 is needed")
    stops = frozenset(check_ids(config, list(stop_ids), 1).tolist()) if len(stop_ids) else frozenset()
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise ValueError(f"prompt {i} is {text!r}: a non-empty string is needed")
    encoded = [tokenizer.encode(text, add_bos=True) for text in texts]
    longest, limit = max(map(len, encoded)), config.max_position_embeddings
    if longest + max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed max_position_embeddings={limit}"
        )
    rows = 1 << (len(texts) - 1).bit_length()
    encoded += [encoded[0]] * (rows - len(texts))
    token_ids = np.full((rows, longest), config.pad_token_id, np.int32)
    for row, ids in enumerate(encoded):
        token_ids[row, : len(ids)] = ids
    return Request(
        token_ids=token_ids,
        lengths=np.array([len(ids) for ids in encoded], np.int32),
        wanted=len(texts),
        stops=stops | {config.eos_token_id},
        max_new_tokens=int(max_new_tokens),
        max_len=min(cache_bucket(longest + int(max_new_tokens)), limit),
        options=options,
        prefill_mode=prefill_mode,
    )


def token_loop(model: "Model", request: Request) -> Iterator[tuple[int, int]]:
    """(row, token) pairs in the order they are made; a row ends before its stop token."""
    options = request.options
    settings = (
        jnp.float32(options.temperature),
        jnp.int32(model.config.vocab_size if options.top_k is None else min(options.top_k, model.config.vocab_size)),
        jnp.float32(1.0 if options.top_p is None else options.top_p),
        jnp.uint32(options.seed),
    )
    logits, cache = model.prefill(request.token_ids, request.lengths, request.prefill_mode, max_len=request.max_len)
    running = set(range(request.wanted))
    for step in range(request.max_new_tokens):
        tokens = np.asarray(sample(logits, *settings, jnp.int32(step)))
        for row in sorted(running):
            if int(tokens[row]) in request.stops:
                running.discard(row)
            else:
                yield row, int(tokens[row])
        if not running or step + 1 == request.max_new_tokens:
            return
        logits, cache = model.decode(cache, tokens)
