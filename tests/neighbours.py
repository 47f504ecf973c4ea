"""Greedy decoding of a few prompts alone and together, for the tests that a row does not depend on its neighbours."""

from collections.abc import Iterator

import numpy as np

import dsv41_jax as ds
from tiny_golden import prompt


def greedy(model: ds.Model, prompts: list[np.ndarray], steps: int, max_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [B, steps + 1, V] after the prompts and after each greedy token; the tokens [B, steps + 1]."""
    lengths = np.array([len(p) for p in prompts])
    ids = np.stack([np.pad(p, (0, lengths.max() - len(p))) for p in prompts]).astype(np.int32)
    logits, cache = model.prefill(ids, lengths, max_len=max_len, all_logits=True)
    seen = [np.asarray(logits)[np.arange(len(ids)), lengths - 1]]
    for _ in range(steps):
        logits, cache = model.decode(cache, seen[-1].argmax(-1))
        seen.append(np.asarray(logits))
    seen = np.stack(seen, axis=1)
    return seen, seen.argmax(-1)


def alone_and_together(model: ds.Model, max_len: int, rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Logits [13, V] of each of 6 or 8 prompts alone (cache of `max_len`) and in a ragged batch of them.

    Checks that their ids are equal, and that the batch gives the same bits when its rows change places.
    """
    text = prompt("long")[0]
    # One of many blocks among short ones, and more rows than one decode step takes.
    prompts = [text[:5], text[20:150], text[60:73], text[100:117], text[40:42], text[7:40], text[9:10], text[80:96]]
    prompts, moved = prompts[:rows], [i for i in (2, 5, 7, 3, 1, 6, 4, 0) if i < rows]
    logits, ids = greedy(model, prompts, 12, 256)
    other_logits, other_ids = greedy(model, [prompts[i] for i in moved], 12, 256)
    np.testing.assert_array_equal(other_ids, ids[moved])
    np.testing.assert_array_equal(other_logits, logits[moved])
    for row, alone in enumerate(prompts):
        one_logits, one_ids = greedy(model, [alone], 12, max_len)
        np.testing.assert_array_equal(one_ids[0], ids[row])
        yield one_logits[0], logits[row]
