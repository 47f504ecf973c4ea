"""Streams tensors through memory in chunks and counts what is no number. Nothing is mapped; one chunk is held."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from dsv41_jax.checkpoint.safetensors_file import TensorEntry, read_rows

CHUNK_BYTES = 16 << 20  # read at a time; the check holds about three times that

# safetensors dtype -> (integer view, mask, pattern): a value is not finite where its masked bits are the pattern.
# Every E2M1 code (I8) is a number, so those are read for what cannot be read, and for zeros.
_NOT_FINITE = {
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
    "F8_E8M0": (np.uint8, 0xFF, 0xFF),
    "BF16": (np.uint16, 0x7F80, 0x7F80),
    "F32": (np.uint32, 0x7F800000, 0x7F800000),
}
_QUANTISED = ("F8_E4M3", "I8")


@dataclass
class TensorCheck:
    """What one tensor's chunks showed.

    Attributes:
        name: the tensor. bad: values that are not finite. first_bad_row: the first row with one, or None.
        zero: whether every byte read of a quantised weight was zero. error: why it cannot be read, or None.
    """

    name: str
    bad: int = 0
    first_bad_row: int | None = None
    zero: bool = False
    error: str | None = None


def not_finite(block: np.ndarray, dtype: str) -> np.ndarray:
    """bool, shaped as `block`: NaN and infinity in bf16 and f32, NaN codes in E4M3, the byte 255 in E8M0."""
    if dtype not in _NOT_FINITE:
        return np.zeros(block.shape, bool)
    view, mask, pattern = _NOT_FINITE[dtype]
    bits = block.view(view)
    return (bits & view(mask)) == view(pattern)


def chunks(entry: TensorEntry) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive rows of at most CHUNK_BYTES, at least one row each."""
    rows = entry.shape[0]
    step = max(1, CHUNK_BYTES * rows // max(1, entry.nbytes))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def plan(entries: dict[str, TensorEntry], sample: float) -> tuple[list[tuple[str, list[tuple[int, int]]]], int]:
    """Which chunks to read: [(name, row ranges)] in file order, and their bytes.

    `sample` is the share of chunks, spread evenly over the stream of all of them; 1 takes every one.
    """
    result, total, due = [], 0, 0.5  # starts in the middle of a stride
    for name in sorted(entries, key=lambda n: (entries[n].file, entries[n].offset)):
        entry, ranges = entries[name], []
        for start, stop in chunks(entry):
            due += sample
            if due >= 1:
                due -= 1
                ranges.append((start, stop))
                total += (stop - start) * entry.nbytes // entry.shape[0]
        if ranges:
            result.append((name, ranges))
    return result, total


def check_tensors(
    entries: dict[str, TensorEntry], planned: Iterable[tuple[str, list[tuple[int, int]]]], progress
) -> Iterator[TensorCheck]:
    """Read the planned chunks and yield a result for every tensor; `progress` is called with the bytes of a chunk."""
    for name, ranges in planned:
        entry = entries[name]
        check = TensorCheck(name, zero=entry.dtype in _QUANTISED)
        for start, stop in ranges:
            try:
                block = read_rows(entry, start, stop)
            except (OSError, ValueError) as error:
                check.error, check.zero = str(error), False
                break
            bad = not_finite(block, entry.dtype)
            if bad.any():
                check.bad += int(np.count_nonzero(bad))
                if check.first_bad_row is None:
                    check.first_bad_row = start + int(np.argmax(bad.reshape(len(block), -1).any(axis=1)))
            if check.zero:
                check.zero = not block.view(np.uint8).any()
            progress(block.nbytes)
        yield check
