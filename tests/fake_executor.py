"""An executor without a model: what it is told is noted, and logits say which token comes next by a simple rule."""

from __future__ import annotations

import math
import types
from collections.abc import Callable

import numpy as np

from dsv41_jax.serving.executor import CacheSize
from dsv41_jax.serving.steps import Block, SetRows, Step

VOCAB, BLOCK = 64, 16
SECONDS = {"encoder": 0.04, "all": 0.06, "decode": 0.02}


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeExecutor:
    """After a token x comes (x + 1) mod 60. Each step takes a fixed time of the clock.

    Attributes:
        tokens: {row: ids in its cache}, checked against every step. steps: what was run.
    """

    def __init__(self, size: CacheSize, clock: Clock, on_step: Callable[[Step], None] | None = None):
        config = types.SimpleNamespace(
            vocab_size=VOCAB, hidden_size=8, supports_ced=True, sliding_window=8, max_position_embeddings=10**6
        )
        numerics = types.SimpleNamespace(dtype=np.dtype(np.float32))
        self.runner = types.SimpleNamespace(
            mesh=None, hasher=None, tables={}, config=config, numerics=numerics, params={}
        )
        self.arrays: dict = {}
        self.size, self.clock, self.block, self.tile, self.on_step = size, clock, BLOCK, math.gcd(size.rows, 4), on_step
        self.tables = np.zeros((size.rows, size.per_row), np.int32)
        self.tokens: dict[int, list[int]] = {}
        self.steps: list[Step] = []

    def wait(self) -> None:
        pass

    def run(self, step: Step) -> np.ndarray | None:
        self.steps.append(step)
        if self.on_step is not None:
            self.on_step(step)
        if isinstance(step, SetRows):
            self.tables[step.rows] = step.tables
            return None
        assert isinstance(step, Block)
        b, t = step.token_ids.shape
        self.clock.now += SECONDS["decode" if t == 1 else step.layers]
        logits = np.zeros((b, VOCAB), np.float32)
        for i in range(b):
            count, start, row = int(step.n_valid[i]), int(step.start[i]), step.first + i
            if not count:
                continue
            if start == 0:
                self.tokens[row] = []
            held = self.tokens[row]
            assert len(held) == start, f"row {row} holds {len(held)} tokens and is given those from {start} on"
            held += step.token_ids[i, :count].tolist()
            self._check_pages(row, len(held))
            logits[i, (held[-1] + 1) % 60] = 9.0
        return logits if step.layers == "all" else None

    def _check_pages(self, row: int, tokens: int) -> None:
        """A row's pages are its own: nobody else who holds tokens names them."""
        own = set(self.tables[row, : -(-tokens // 128)].tolist())
        assert len(own) == -(-tokens // 128), f"row {row} of {tokens} tokens has pages {own}"
