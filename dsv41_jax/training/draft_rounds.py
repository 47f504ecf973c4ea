"""Teacher-forced draft rounds at anchors inside whole samples: the drafter as it drafts, at many positions at once.

A round at anchor a reads the tapped streams of the `sliding_window` tokens before a, gets token a and noise, and
predicts tokens a+1 .. a+block. The Markov head gets the true token before each of them.
"""

import jax.numpy as jnp
from jax import Array

from dsv41_jax import dspark, quant
from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_loop import pick
from dsv41_jax.numerics import Numerics
from dsv41_jax.packed import sample_positions
from dsv41_jax.router_notes import TokenFacts


class DraftRounds:
    """Rounds of a batch; R = B * A rounds.

    Attributes:
        places: int32 [B, A, block], where each prediction is made: place p predicts token p + 1.
        previous, targets: int32 [R, block], token p and token p + 1.
        weights: float32 [R, block], 0 outside the anchor's sample and where the batch has weight 0.
    """

    def __init__(self, config: ModelConfig, batch: dict, anchors: Array):
        """batch: see `data.Batch`. anchors: int32 [B, A], at least 1 and at most T - block."""
        self.config = config
        self.anchors = anchors
        self.positions = sample_positions(batch["segment_ids"])
        self.places = anchors[..., None] + jnp.arange(config.dspark_block_size)
        self.previous = self.take(batch["token_ids"], self.places)
        self.targets = self.take(batch["targets"], self.places)
        self.start = self.take(self.positions, anchors[..., None])[:, 0]  # [R], the anchor's position in its sample
        inside = self.take(self.positions, self.places) == self.start[:, None] + jnp.arange(config.dspark_block_size)
        self.weights = self.take(batch["weights"], self.places) * inside

    def take(self, rows: Array, places: Array) -> Array:
        """rows [B, T, ...] at places int32 [B, A, m] (clipped into the row) -> [R, m, ...]."""
        b, t = rows.shape[:2]
        taken = rows[jnp.arange(b)[:, None, None], jnp.clip(places, 0, t - 1)]
        return taken.reshape(-1, *taken.shape[2:])

    def draft(self, numerics: Numerics, params: dict, taps: dict[int, Array]) -> tuple[Array, Array, Array]:
        """The drafts of all rounds, from taps {layer: [B, T, D]}.

        Returns:
            logits float32 [R, block, V], raw confidence float32 [R, block], and how many tokens each expert of the
            draft blocks had, float32 [blocks, 2, E].
        """
        config = self.config
        width = config.sliding_window
        back = self.anchors[..., None] - width + jnp.arange(width)
        # A place before the row is before the sample too, since the sample's first token has position 0.
        mask = self.start[:, None] - width + jnp.arange(width) >= 0
        inputs = dspark.main_input(config, numerics, params, taps)

        def window(m: Array) -> Array:
            rows = dspark.window_rows(config, numerics, params, m, inputs, self.positions)
            return self.take(quant.fake_q8(rows) if numerics.quantizes("window_kv") else rows, back)

        windows = jnp.stack([window(m) for m in range(config.n_draft)])
        first = self.previous[:, 0]
        facts = TokenFacts(jnp.zeros(self.targets.shape, jnp.int32), jnp.ones(self.targets.shape, jnp.float32))
        hidden, router = dspark.draft_hidden(
            config, numerics, params, first, self.start, lambda m: pick(windows, m), mask, facts
        )
        embedding, bias = dspark.markov(config, numerics, params, self.previous)
        logits = dspark.base_logits(config, numerics, params, hidden) + bias
        return logits, dspark.confidence(params, hidden, embedding), router.loads
