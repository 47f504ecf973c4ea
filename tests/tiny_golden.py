"""Golden recordings of tiny model A, and the comparisons that whole-model tests make with them.

Tolerances: float32 agrees to about 8e-6 whatever the length. In `released`, one flipped bf16 bit can flip an FP8 code
and then a choice, so whole-model numbers of two correct programs are only near each other; the limits are about twice
what perturbed twins of the reference show.
"""

import functools
from pathlib import Path

import numpy as np

from dsv41_jax import ImageInput
from oracle_weights import read_safetensors

GOLDEN = Path(__file__).parent / "golden"
INDEX_SOURCES = (2, 4, 6, 8)
CANDIDATE_SOURCE = 6
EDGES = (1, 2, 3, 15, 16, 17, 31, 32, 33)  # prompt lengths of `edges`: groups of 2, windows of 16
FLOAT32_ATOL = 1e-4


@functools.cache
def recording(case: str) -> dict[str, np.ndarray]:
    """All arrays of a recording, "short" to "grads"."""
    return read_safetensors(GOLDEN / f"tinyA_{case}.safetensors")


def prompt(case: str) -> np.ndarray:
    """Token ids int32 [1, n] of a recording with one prompt."""
    return recording(case)["input_ids"].reshape(1, -1).astype(np.int32)


def image_inputs() -> list[ImageInput]:
    """The two images of the `image` recording."""
    g = recording("image")
    starts = [g[f"image{i}.grid_start"] for i in range(2)]
    return [ImageInput(g[f"image{i}.patches"], (s[0], s[1]), s[2]) for i, s in enumerate(starts)]


def assert_close(actual, expected: np.ndarray) -> None:
    """float32 numerics: every number within 1e-4."""
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected, rtol=0, atol=FLOAT32_ATOL)


def rms(difference: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(difference, dtype=np.float64))))


def assert_rms(actual, expected: np.ndarray, limit: float, argmax: float | None = None) -> None:
    """Root mean square of the difference at most `limit`; the likeliest token equal in at least a share `argmax`."""
    actual = np.asarray(actual, np.float32)
    assert actual.shape == expected.shape
    assert rms(actual - expected) <= limit, f"rms {rms(actual - expected):.4f} > {limit}"
    if argmax is not None:
        agree = np.mean(actual.argmax(-1) == expected.argmax(-1))
        assert agree >= argmax, f"the likeliest token agrees in {agree:.3f} of the rows, not {argmax}"


def assert_near(actual, expected: np.ndarray, equal: float = 0.97) -> None:
    """One mechanism in bf16: relative rms at most 5e-3, and at least a share `equal` of the numbers bit-equal."""
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    assert actual.shape == expected.shape
    relative = rms(actual - expected) / rms(expected)
    assert relative <= 5e-3, f"relative rms {relative:.2e}"
    share = np.mean(actual == expected)
    assert share >= equal, f"{share:.3f} of the numbers are equal"


def recorded_rows(case: str, key: str, width: int = 8) -> np.ndarray:
    """A recorded selection [n, width]: ascending row numbers, -1 for an empty slot."""
    rows = recording(case)[key]
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=-1)


def changed_rows(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """bool [n]: rows of [n, k] whose sets differ."""
    return (np.sort(actual, axis=-1) != np.sort(expected, axis=-1)).any(-1)


def assert_same_sets(actual: np.ndarray, expected: np.ndarray) -> None:
    """Selections, experts: the set of every row [n, k] is equal."""
    assert actual.shape == expected.shape
    wrong = np.flatnonzero(changed_rows(actual, expected))
    assert not wrong.size, f"{wrong.size} of {len(expected)} rows differ, the first is {wrong[0]}"


def pool_rows(pool: np.ndarray, block: int, rows: int) -> np.ndarray:
    """Candidate blocks [n, P] (-1 for none) as the mask bool [n, rows] of their rows."""
    kept = (pool[..., None] == np.arange(-(-rows // block))).any(axis=1)
    return np.repeat(kept, block, axis=1)[:, :rows]


def pool_blocks(mask: np.ndarray, block: int, width: int) -> np.ndarray:
    """The inverse of `pool_rows`: a mask [n, rows] as block numbers [n, width]."""
    blocks = np.full((len(mask), width), -1, np.int32)
    for row, kept in enumerate(mask):
        numbers = np.unique(np.flatnonzero(kept) // block)
        blocks[row, : len(numbers)] = numbers
    return blocks


def check_prefill_logits(logits, case: str) -> None:
    """float32 logits [n, V] of the prompt."""
    assert_close(logits, recording(case)["fp32.prefill_logits"])


def check_block_output(values: dict[str, dict[int, np.ndarray]], layer: int) -> None:
    """float32 streams and mix after a layer, in the prompt of `short`; values as `layer_by_layer` keeps them."""
    g = recording("short")
    expected = g[f"fp32.block{layer}.out"]
    assert_close(values["out"][layer][: len(expected)], expected)
    assert_close(values["pre"][layer][: len(expected)], g[f"fp32.block{layer}.pre_mix"])


def check_selection(values: dict[str, dict[int, np.ndarray]], case: str, source: int) -> None:
    """Entries that an index source selects for the tokens of a prompt, in float32."""
    expected = recorded_rows(case, f"fp32.prefill_topk.{source}")
    assert_same_sets(values["selection"][source][: len(expected)], expected)


def check_first_draft(round_: tuple, case: str) -> None:
    """float32 tokens, logits and confidence of the draft round right after the prompt; each has one row."""
    g = recording(case)
    tokens, logits, confidence = round_
    assert_close(logits[0], g["fp32.dspark_after_prefill_logits"])
    assert_close(confidence[0], g["fp32.dspark_after_prefill_confidence"])
    np.testing.assert_array_equal(tokens[0], g["fp32.dspark_after_prefill_tokens"])
