"""A stand-in for a model that generates: logits from a table, by the last two tokens and the position.

It keeps what it reads, so that a wrong rewind, a wrong anchor or a row read at another row's length changes the text.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np

from dsv41_jax.sampling import SamplingOptions
from dsv41_jax.token_loop import Request, TextOptions, make_request

ENTRIES = 61


@dataclasses.dataclass
class ToyCache:
    tokens: np.ndarray  # [B, max_len], -1 where nothing was read
    lengths: np.ndarray
    written: np.ndarray
    max_rewind: int

    def rewind(self, lengths) -> ToyCache:
        lengths = np.asarray(lengths)
        assert (lengths <= self.lengths).all() and (lengths >= self.written - self.max_rewind).all()
        tokens = np.where(np.arange(self.tokens.shape[1]) < lengths[:, None], self.tokens, -1)
        return ToyCache(tokens, lengths, self.written, self.max_rewind)


class ToyModel:
    """Args: vocab, block (draft tokens), agreement (1: drafts are the model's own choice, 0: unrelated to it)."""

    def __init__(self, vocab: int = 8, block: int = 3, agreement: float = 0.7, limit: int = 64, max_rewind: int = 16):
        self.config = SimpleNamespace(
            vocab_size=vocab,
            n_draft=1,
            dspark_block_size=block,
            max_position_embeddings=limit,
            pad_token_id=2,
            eos_token_id=vocab - 1,
        )
        rng = np.random.default_rng(0)
        self.table = 1.5 * rng.standard_normal((ENTRIES, vocab)).astype(np.float32)
        own = 1.5 * rng.standard_normal((ENTRIES, vocab)).astype(np.float32)
        self.draft_table = agreement * self.table + (1 - agreement) * own
        self.max_rewind, self.calls = max_rewind, []

    def entry(self, before, last, position):
        """Row of the table: arrays of the last two tokens (-1 for none), and where the next one will stand."""
        return (before * 5 + last * 3 + position * 7) % ENTRIES

    def prefill(self, token_ids, lengths, mode, images, max_len):
        assert mode == "exact" and images is None
        tokens = np.full((len(token_ids), max_len), -1)
        tokens[:, : token_ids.shape[1]] = np.where(np.arange(token_ids.shape[1]) < lengths[:, None], token_ids, -1)
        cache = ToyCache(tokens, np.asarray(lengths), np.asarray(lengths), self.max_rewind)
        return self._logits(cache, np.asarray(lengths)), cache

    def decode(self, cache, token_ids):
        ids = np.asarray(token_ids).reshape(len(cache.lengths), -1)
        self.calls.append(ids.shape[1])
        at = cache.lengths[:, None] + np.arange(ids.shape[1])
        assert at.max() < cache.tokens.shape[1] and ids.min() >= 0 and ids.max() < self.config.vocab_size
        tokens = cache.tokens.copy()
        np.put_along_axis(tokens, at, ids, axis=1)
        end = at[:, -1] + 1
        new = ToyCache(tokens, end, np.maximum(cache.written, end), self.max_rewind)
        logits = np.stack([self._logits(new, at[:, i] + 1) for i in range(ids.shape[1])], axis=1)
        cache.tokens = None  # donated
        return (logits[:, 0] if np.ndim(token_ids) == 1 else logits), new

    def draft(self, cache, token_ids, temperature=0, key=None):
        before, last = self._last(cache, cache.lengths)[1], np.asarray(token_ids)
        tokens, logits = [last], []
        for i in range(self.config.dspark_block_size):
            logits.append(self.draft_table[self.entry(before, last, cache.lengths + 1 + i)])
            warm = logits[-1] / max(temperature, 1e-6)
            # As in jax, a row's noise depends on its number in the batch, and not on how many follow it.
            rows = jax.random.key_data(key).tolist()  # a key for each row
            noise = np.stack([np.random.default_rng([i, *row]).gumbel(size=warm.shape[1:]) for row in rows])
            before, last = last, (warm + noise * (temperature > 0)).argmax(-1)
            tokens.append(last)
        return np.stack(tokens, axis=1), np.stack(logits, axis=1), None

    def _last(self, cache, lengths):
        rows = np.arange(len(lengths))
        return np.where(lengths > 1, cache.tokens[rows, lengths - 2], -1), cache.tokens[rows, lengths - 1]

    def _logits(self, cache, lengths):
        return self.table[self.entry(*self._last(cache, lengths), lengths)]


def toy_request(model: ToyModel, prompts, max_new_tokens, logprobs=None, stop_ids=(), **sampling) -> Request:
    """A request for prompts (lists of ids); without stop ids nothing ends a row, the end-of-sequence token included."""
    options = TextOptions(
        max_new_tokens=max_new_tokens,
        sampling=SamplingOptions(**sampling),
        stop_ids=frozenset(stop_ids),
        stops=(),
        logprobs=logprobs,
        samples=1,
        prefill_mode="exact",
        speculate=True,
    )
    return make_request(model.config, prompts, options)
