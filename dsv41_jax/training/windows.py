"""Training batches: fixed-length windows of a token array and the Engram rows they address, by (seed, step) alone.

An epoch visits every window once, in an order drawn from the seed and the epoch's number; its windows start at an
offset drawn likewise. Nothing has to be saved to resume but the step's number.
"""

from dataclasses import dataclass

import numpy as np

from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_hash import EngramHasher, segment_starts


@dataclass(frozen=True)
class Batch:
    """token_ids, targets, segment_ids int32 [B, T]; weights float32 [B, T]; memory {"l<L>": int32 [B, T, columns]}."""

    token_ids: np.ndarray
    targets: np.ndarray
    segment_ids: np.ndarray
    weights: np.ndarray
    memory: dict[str, np.ndarray]

    def arrays(self) -> dict:
        """A pytree for a jitted step."""
        return dict(vars(self))


class Windows:
    """Batches of windows over one token array.

    Args:
        tokens: integers [n], samples that begin with BOS, one after another.
        config: for BOS and the Engram layers.
        token_map: integers [vocab_size], raw id -> compressed id.
        batch, length: shape of a batch.
        seed: of the order.
    """

    def __init__(
        self, tokens: np.ndarray, config: ModelConfig, token_map: np.ndarray, batch: int, length: int, seed: int
    ):
        self.tokens, self.config, self.batch, self.length, self.seed = tokens, config, batch, length, seed
        self.hasher = EngramHasher(config, token_map) if config.engram_layer_ids else None
        self.per_epoch = (len(tokens) - 1) // length - 1  # one window less, so that the offset has room
        if self.per_epoch < 1:
            raise ValueError(f"{len(tokens)} tokens are fewer than two windows of {length}")

    def starts(self, step: int) -> np.ndarray:
        """First token of each window of batch `step`, int64 [batch]."""
        numbers = step * self.batch + np.arange(self.batch)
        starts = np.empty(self.batch, np.int64)
        for epoch in np.unique(numbers // self.per_epoch):
            rng = np.random.default_rng([self.seed, int(epoch)])
            offset = rng.integers(self.length)
            order = rng.permutation(self.per_epoch)
            mine = numbers // self.per_epoch == epoch
            starts[mine] = offset + self.length * order[numbers[mine] % self.per_epoch]
        return starts

    def __call__(self, step: int) -> Batch:
        """Batch number `step`."""
        index = self.starts(step)[:, None] + np.arange(self.length + 1)
        return self.make(self.tokens[index].astype(np.int32))

    def make(self, ids: np.ndarray) -> Batch:
        """A batch from ids [B, T + 1]. A BOS begins a sample; it is never a target."""
        token_ids, targets = ids[:, :-1], ids[:, 1:]
        segment_ids = np.cumsum(token_ids == self.config.bos_token_id, axis=1, dtype=np.int32)
        weights = (targets != self.config.bos_token_id).astype(np.float32)
        memory = {}
        if self.hasher is not None:
            rows, _ = self.hasher(token_ids, starts=segment_starts(segment_ids))
            memory = {f"l{layer}": rows[i] for i, layer in enumerate(self.config.engram_layer_ids)}
        return Batch(token_ids, targets, segment_ids, weights, memory)


def evaluation_rows(tokens: np.ndarray, length: int, pad: int) -> np.ndarray:
    """All of `tokens` in rows [n, length + 1] that overlap by one: each token but the first is a target once."""
    n = -(-(len(tokens) - 1) // length)
    padded = np.concatenate([tokens.astype(np.int32), np.full(n * length + 1 - len(tokens), pad, np.int32)])
    return padded[np.arange(n)[:, None] * length + np.arange(length + 1)]
