"""Decoder replay in training: below which row position a token's decoder window keys do not exist.

At a prefill the layers above the last KV source run on the prompt's last W tokens only (spec/training.md 3.7), so the
tokens from there on see no window key of the prompt's earlier tokens.
"""

from __future__ import annotations

import numpy as np


def replay_floors(length: int, start: int, prompt_length: int | None, window: int) -> np.ndarray:
    """int32 [length] floors of a sample that starts at row position `start`; all 0 without a prompt.

    Tokens from W before the prompt's end on have the floor `start + max(0, prompt_length - window)`.
    """
    floors = np.zeros(length, np.int32)
    if prompt_length is not None:
        within = max(0, prompt_length - window)
        floors[within:] = start + within
    return floors


def drawn_prompt_length(length: int, probability: float, seed: int, row: int, sample: int) -> int | None:
    """A prompt length from 1 to `length` - 1 with the given probability, else None.

    By a counter-based generator: the same whatever was drawn before, on every process.

    Args:
        length: tokens of the sample. probability: from 0 to 1. seed: of the run.
        row: number of the row in the whole run. sample: number of the sample in its row.
    """
    if length < 2 or not probability:
        return None
    generator = np.random.Generator(np.random.Philox(key=[seed, 0x5EB1A7], counter=[0, 0, sample, row]))
    if generator.random() >= probability:
        return None
    return int(generator.integers(1, length))
