"""Engram addresses: which table rows the n-grams that end at each position read. Host side, exact 64-bit integers.

    compress  raw ids -> compressed ids, dead (image) positions marked
    hash      the last N compressed ids -> one table row per n-gram size (2..N) and head, for every Engram layer

JAX without x64 would truncate the products silently, so this is numpy; the row ids that come out fit int32.
Source: report, Engram; spec section 10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dsv41_jax.engram_layout import engram_layout
from dsv41_jax.token_map import check_token_map

if TYPE_CHECKING:
    from dsv41_jax.config import ModelConfig

DEAD = -1  # in compressed ids: an image position, or one before the sequence start. No n-gram looks past it.


def segment_starts(segment_ids: np.ndarray) -> np.ndarray:
    """bool [B, T], True at the first token of every packed sample, from segment ids [B, T]."""
    segment_ids = np.asarray(segment_ids)
    starts = np.ones(segment_ids.shape, bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return starts


class EngramHasher:
    """The hash of all Engram layers of a config.

    Args:
        config: model config.
        token_map: integers [vocab_size], raw id -> compressed id.

    Raises:
        ValueError: no Engram layers, a token map that does not fit the config, or more rows than int32 can count.
    """

    def __init__(self, config: ModelConfig, token_map: np.ndarray) -> None:
        layout = engram_layout(config)
        if not layout.layer_ids:
            raise ValueError("this config has no Engram layers")
        if max(layout.table_rows) > np.iinfo(np.int32).max:
            raise ValueError(f"Engram tables of {layout.table_rows} rows: row ids would not fit int32")
        self.layer_ids = layout.layer_ids
        self.columns = layout.columns
        self.lookback = layout.max_ngram_size - 1
        self._token_map = check_token_map(token_map, config.vocab_size, config.engram_compressed_vocab_size)
        self._pad = self._token_map[config.engram_pad_token_id]
        # Unsigned numpy remainders need no sign correction; every number here is below 2^63 either way.
        by_layer = (len(layout.layer_ids), 1, 1, self.lookback, layout.n_heads)
        self._primes = np.array(layout.primes, np.uint64).reshape(by_layer)
        self._offsets = np.array(layout.offsets, np.uint64).reshape(by_layer)
        multipliers = np.array(layout.multipliers, np.uint64).reshape(len(layout.layer_ids), layout.max_ngram_size)
        self._multipliers = multipliers.T[:, :, None, None]  # [look-back, layers, 1, 1]

    def compress(self, token_ids: np.ndarray, image_mask: np.ndarray | None = None) -> np.ndarray:
        """Raw ids [B, T] -> compressed ids int64 [B, T], DEAD where `image_mask` [B, T] is True.

        Raises ValueError for ids outside the vocabulary.
        """
        token_ids = np.asarray(token_ids)
        if token_ids.size and not (token_ids.min() >= 0 and token_ids.max() < len(self._token_map)):
            raise ValueError(f"token ids must lie in 0..{len(self._token_map) - 1}")
        compressed = self._token_map[token_ids]
        return compressed if image_mask is None else np.where(np.asarray(image_mask), DEAD, compressed)

    def empty_history(self, batch: int) -> np.ndarray:
        """History of `batch` sequences that have not begun: int64 [B, N-1] of DEAD."""
        return np.full((batch, self.lookback), DEAD, np.int64)

    def hash(
        self, compressed: np.ndarray, history: np.ndarray | None = None, starts: np.ndarray | None = None
    ) -> np.ndarray:
        """Table row of every n-gram.

        Args:
            compressed: compressed ids [B, T], DEAD at image positions.
            history: the N-1 compressed ids before them [B, N-1], oldest first; None at the sequence start.
            starts: bool [B, T], True where a packed sample begins; n-grams do not reach across.

        Returns:
            int32 [layers, B, T, columns], columns size-major (2..N), head-minor.
        """
        batch, length = compressed.shape
        ids = self._with_history(compressed, history)
        rows = np.empty((len(self.layer_ids), batch, length, *self._primes.shape[-2:]), np.int32)
        cut = np.zeros((batch, length), bool)
        mixed: np.ndarray | None = None
        for back in range(self.lookback + 1):
            slot = ids[:, self.lookback - back : self.lookback - back + length]
            if starts is not None and back:
                # Token t-back+1 begins a sample, so token t-back belongs to the one before.
                cut[:, back - 1 :] |= starts[:, : max(length - back + 1, 0)]
            cut = cut | (slot < 0)
            product = np.where(cut, self._pad, slot).astype(np.uint64) * self._multipliers[back]
            mixed = product if mixed is None else mixed ^ product
            if back:
                bucket = mixed[..., None] % self._primes[..., back - 1, :] + self._offsets[..., back - 1, :]
                rows[..., back - 1, :] = bucket
        return rows.reshape(*rows.shape[:3], self.columns)

    def advance(
        self,
        compressed: np.ndarray,
        history: np.ndarray | None = None,
        starts: np.ndarray | None = None,
        n_valid: np.ndarray | None = None,
    ) -> np.ndarray:
        """The history int64 [B, N-1] after the first `n_valid` [B] (default all) of `compressed` [B, T]."""
        batch, length = compressed.shape
        ends = np.full(batch, length) if n_valid is None else np.asarray(n_valid)
        window = ends[:, None] + np.arange(self.lookback)
        kept = np.take_along_axis(self._with_history(compressed, history), window, axis=1)
        if starts is None:
            return kept
        begins = np.concatenate([np.zeros((batch, self.lookback), bool), starts], axis=1)
        # An entry is out of reach where a later one begins a sample.
        begun = np.logical_or.accumulate(np.take_along_axis(begins, window, axis=1)[:, ::-1], axis=1)[:, ::-1]
        later = np.zeros_like(begun)
        later[:, :-1] = begun[:, 1:]
        return np.where(later, DEAD, kept)

    def __call__(
        self,
        token_ids: np.ndarray,
        image_mask: np.ndarray | None = None,
        history: np.ndarray | None = None,
        starts: np.ndarray | None = None,
        n_valid: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """`hash` and `advance` of raw ids [B, T]: rows int32 [layers, B, T, columns], then history [B, N-1]."""
        compressed = self.compress(token_ids, image_mask)
        return self.hash(compressed, history, starts), self.advance(compressed, history, starts, n_valid)

    def _with_history(self, compressed: np.ndarray, history: np.ndarray | None) -> np.ndarray:
        history = self.empty_history(len(compressed)) if history is None else history
        return np.concatenate([history, compressed], axis=1)
