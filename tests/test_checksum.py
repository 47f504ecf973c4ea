"""CRC-32 of tensors: that of the standard library, whole or joined from pieces."""

import zlib

import ml_dtypes
import numpy as np
import pytest

from dsv41_jax.checkpoint.checksum import CHECKSUM_FILE, Checksums, crc32, joined, read_checksums
from dsv41_jax.checkpoint.safetensors_file import CheckpointError

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu, np.int8])
def test_it_is_the_bytes_that_count(dtype):
    array = RANDOM.integers(0, 256, (7, 8), np.uint8).view(dtype)
    assert crc32(array) == zlib.crc32(array.tobytes())
    assert crc32(array.T) == zlib.crc32(array.T.tobytes())
    assert crc32(array[3:], crc32(array[:3])) == crc32(array)


@pytest.mark.parametrize("sizes", [(5, 0), (0, 5), (1, 1), (1000, 3), (3, 1000), (70000, 65536), (12345, 54321)])
def test_joined(sizes):
    first, second = (RANDOM.bytes(n) for n in sizes)
    assert joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_joined_over_more_than_four_gigabytes():
    """Zeros only, whose checksum is joined by doubling: against 2^32 of them in one go, in parts of 64 MiB."""
    block, whole = bytes(1 << 26), 0
    doubled, size = zlib.crc32(block), 1 << 26
    while size < 1 << 32:
        doubled, size = joined(doubled, doubled, size), 2 * size
    for _ in range(1 << 6):
        whole = zlib.crc32(block, whole)
    assert doubled == whole


def test_file(tmp_path):
    assert read_checksums(tmp_path) is None
    written = Checksums({"a.weight": 0, "b.scale": 0xFFFFFFFF}, "12-34")
    written.write(tmp_path)
    assert read_checksums(tmp_path) == written
    assert [file.name for file in tmp_path.iterdir()] == [CHECKSUM_FILE]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"algorithm": "md5", "conversion": "", "tensors": {}}',
        '{"algorithm": "crc32", "conversion": ""}',
        '{"algorithm": "crc32", "conversion": "", "tensors": {"a": "xyz"}}',
        '{"algorithm": "crc32", "conversion": "", "tensors": {"a": "1", "a": "2"}}',
        '{"algorithm": "crc32", "conversion": "", "tensors": 3}',
    ],
)
def test_a_file_that_is_not_one_is_refused(text, tmp_path):
    (tmp_path / CHECKSUM_FILE).write_text(text)
    with pytest.raises(CheckpointError, match="checksums.json: damaged"):
        read_checksums(tmp_path)
