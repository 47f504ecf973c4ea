"""However a prompt is cut into calls, whoever shares the batch: the same numbers."""

from collections.abc import Iterator

import numpy as np
import pytest

import dsv41_jax as ds
from fast_compile import use_fast_steps
from tiny_golden import assert_close, prompt, recording

MAX_LEN = 512  # as in test_model_float32: the same programs


@pytest.fixture(scope="module")
def float32(tiny) -> Iterator[ds.Model]:
    with pytest.MonkeyPatch.context() as patch:
        use_fast_steps(patch)
        yield tiny("float32")


def test_prefill_and_300_decode_steps(float32):
    rng = np.random.default_rng(300)
    ids = rng.integers(3, 500, (1, 317)).astype(np.int32)
    whole, _ = float32.prefill(ids, max_len=MAX_LEN, all_logits=True)
    whole = np.asarray(whole[0])
    logits, cache = float32.prefill(ids[:, :17], max_len=MAX_LEN, all_logits=True)
    assert_close(logits[0], whole[:17])
    for position in range(17, 317):
        logits, cache = float32.decode(cache, ids[:, position])
        assert_close(logits[0], whole[position])


@pytest.mark.parametrize("seed", range(4))
def test_any_cut_gives_the_recorded_numbers(float32, seed):
    rng = np.random.default_rng(seed)
    ids, expected = prompt("long"), recording("long")["fp32.prefill_logits"]
    at = int(rng.integers(1, 60))
    logits, cache = float32.prefill(ids[:, :at], max_len=MAX_LEN, all_logits=True)
    assert_close(logits[0], expected[:at])
    while at < 90:
        n = int(rng.integers(1, 17))
        logits, cache = float32.decode(cache, ids[:, at : at + n])
        assert_close(logits[0], expected[at : at + n])
        at += n


def greedy(model: ds.Model, prompts: list[np.ndarray], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [B, steps + 1, V] after the prompts and after each greedy token; the tokens [B, steps + 1]."""
    lengths = np.array([len(p) for p in prompts])
    ids = np.stack([np.pad(p, (0, lengths.max() - len(p))) for p in prompts]).astype(np.int32)
    logits, cache = model.prefill(
        ids, lengths, max_len=MAX_LEN if len(prompts) == 1 and model.numerics == "float32" else 256
    )
    seen = [np.asarray(logits)]
    for _ in range(steps):
        logits, cache = model.decode(cache, seen[-1].argmax(-1))
        seen.append(np.asarray(logits))
    seen = np.stack(seen, axis=1)
    return seen, seen.argmax(-1)


def neighbours(model: ds.Model) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Logits [13, V] of each of 4 prompts alone, and in a ragged batch, which gives the same bits in other slots."""
    text = prompt("long")[0]
    prompts = [text[:5], text[20:50], text[60:73], text[100:117]]
    moved = [2, 0, 3, 1]
    logits, ids = greedy(model, prompts, 12)
    other_logits, other_ids = greedy(model, [prompts[i] for i in moved], 12)
    np.testing.assert_array_equal(other_ids, ids[moved])
    np.testing.assert_array_equal(other_logits, logits[moved])
    for row, alone in enumerate(prompts):
        one_logits, one_ids = greedy(model, [alone], 12)
        np.testing.assert_array_equal(one_ids[0], ids[row])
        yield one_logits[0], logits[row]


def test_a_row_does_not_depend_on_its_neighbours_float32(float32):
    for alone, in_batch in neighbours(float32):
        assert_close(alone, in_batch)  # XLA adds up the rows of a larger batch in another order


def test_a_row_does_not_depend_on_its_neighbours_released(tiny):
    for alone, in_batch in neighbours(tiny("released")):
        np.testing.assert_array_equal(alone, in_batch)
