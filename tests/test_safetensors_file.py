"""The byte-range reader and writer of safetensors files: malformed headers are refused, only wanted bytes are read."""

import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest

from dsv41_jax.checkpoint import safetensors_file
from dsv41_jax.checkpoint.safetensors_file import (
    DTYPES,
    CheckpointError,
    TensorEntry,
    read,
    read_header,
    read_rows,
    write_file,
)
from oracle_weights import read_safetensors


def raw_file(path, header, data=b"", length=None):
    """A file with the given header (dict or bytes), whether or not it makes sense."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_every_dtype_survives_a_round_trip(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {}
    for i, (name, dtype) in enumerate(DTYPES.items()):
        raw = rng.integers(0, 2 if name == "BOOL" else 256, (3, i + 1, dtype.itemsize), dtype=np.uint8)
        tensors[f"t.{name}"] = (name, raw.view(dtype)[..., 0])
    tensors["scalar"] = ("F32", np.array(2.5, np.float32))
    tensors["empty"] = ("BF16", np.zeros((0, 7), ml_dtypes.bfloat16))
    path = tmp_path / "a.safetensors"
    announced = [(name, dtype, value.shape) for name, (dtype, value) in tensors.items()]
    # In pieces of one row, except where there are no rows.
    write_file(path, announced, lambda n: list(tensors[n][1]) if tensors[n][1].ndim else [tensors[n][1]], {"k": "v"})
    entries, metadata = read_header(path)
    assert metadata == {"k": "v"} and list(entries) == list(tensors)
    for name, (_, value) in tensors.items():
        found = read(entries[name])
        assert found.dtype == value.dtype and found.shape == value.shape
        assert found.tobytes() == value.tobytes()
        if value.ndim and len(value):
            assert read_rows(entries[name], 1, 3).tobytes() == value[1:3].tobytes()
            assert read_rows(entries[name], 2, 2).shape == (0, *value.shape[1:])
    assert min(e.offset for e in entries.values()) % 8 == 0


def test_reads_the_golden_model_like_an_independent_reader(golden):
    entries, _ = read_header(golden / "tinyA_model.safetensors")
    other = read_safetensors(golden / "tinyA_model.safetensors")
    assert entries.keys() == other.keys()
    for name, value in other.items():
        found = read(entries[name])
        assert found.dtype == value.dtype and found.shape == value.shape and found.tobytes() == value.tobytes()


HEADERS = {
    "not JSON": (b"{]", "not valid JSON"),
    "not an object": (b"[1]", "not a JSON object"),
    "not UTF-8": (b'{"\xff": 1}', "not valid JSON"),
    "deep": (b"[" * 100_000, "not valid JSON"),
    "twice": (b'{"a": {}, "a": {}}', "'a' appears twice"),
    "no dtype": ({"a": {"shape": [4], "data_offsets": [0, 4]}}, "tensor 'a'.*dtype, shape and data_offsets"),
    "entry no object": ({"a": 3}, "tensor 'a'.*dtype, shape and data_offsets"),
    "unknown dtype": ({"a": entry("F7")}, "tensor 'a': unknown dtype 'F7'"),
    "dtype no string": ({"a": entry(["U8"])}, "tensor 'a': unknown dtype"),
    "negative size": ({"a": entry(shape=[-4])}, "tensor 'a': shape"),
    "size no integer": ({"a": entry(shape=[4.0])}, "tensor 'a': shape"),
    "size true": ({"a": entry(shape=[True, 4])}, "tensor 'a': shape"),
    "offsets three": ({"a": entry(offsets=[0, 4, 8])}, "not a pair"),
    "offsets reversed": ({"a": entry(offsets=[4, 0])}, "out of order"),
    "offsets negative": ({"a": entry(offsets=[-4, 0])}, "out of order"),
    "sizes disagree": ({"a": entry(shape=[5])}, r"U8 \[5\] takes 5 bytes but data_offsets \[0, 4\] hold 4"),
    "huge shape": ({"a": entry(shape=[1 << 40, 1 << 40])}, "takes"),
    "overlap": ({"a": entry(), "b": entry(offsets=[2, 6])}, "'a' and 'b' overlap"),
    "same place": ({"a": entry(), "b": entry()}, "overlap"),
    "hole": ({"a": entry(), "b": entry(offsets=[6, 10])}, "2 bytes before tensor 'b'"),
    "out of range": ({"a": entry(), "b": entry(shape=[8], offsets=[4, 12])}, "truncated: tensor 'b' ends at byte"),
    "bytes left over": ({"a": entry()}, "6 bytes after the last tensor"),
    "metadata": ({"__metadata__": {"a": 1}}, "__metadata__"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_malformed_headers_are_refused(case, tmp_path):
    header, message = HEADERS[case]
    path = raw_file(tmp_path / "bad.safetensors", header, bytes(10))
    with pytest.raises(CheckpointError, match=message) as error:
        read_header(path)
    assert str(path) in str(error.value)


def test_truncated_and_oversized_files_are_refused(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_header(tmp_path / "absent.safetensors")
    (tmp_path / "short.safetensors").write_bytes(b"1234")
    with pytest.raises(CheckpointError, match="truncated: 4 bytes"):
        read_header(tmp_path / "short.safetensors")
    with pytest.raises(CheckpointError, match="truncated: the header claims 1000 bytes"):
        read_header(raw_file(tmp_path / "cut.safetensors", b"{}", length=1000))
    # A header length of a file that is something else: refused on the number alone, although the file is long enough.
    path = raw_file(tmp_path / "huge.safetensors", b"{}", length=1 << 32)
    os.truncate(path, 1 << 34)
    with pytest.raises(CheckpointError, match="more than the limit"):
        read_header(path)


def test_a_file_cut_after_opening_is_noticed(tmp_path):
    path = raw_file(tmp_path / "a.safetensors", {"a": entry()}, bytes(4))
    entries, _ = read_header(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="truncated inside tensor 'a'"):
        read(entries["a"])


def test_only_the_rows_asked_for_are_read(tmp_path, monkeypatch):
    """Pitfall 29: three rows of a table far larger than memory; the file is sparse, its header claims 98 GB."""
    rows, width = 384_006_168, 256
    path = raw_file(tmp_path / "table.safetensors", {"t": entry("F8_E4M3", (rows, width), (0, rows * width))})
    start = path.stat().st_size
    os.truncate(path, start + rows * width)
    with open(path, "r+b") as file:
        file.seek(start + (rows - 2) * width)
        file.write(bytes([0x38]) * 2 * width)
    asked = []
    plain = os.preadv
    monkeypatch.setattr(safetensors_file.os, "preadv", lambda f, b, o: asked.append(sum(map(len, b))) or plain(f, b, o))
    found = read_rows(read_header(path)[0]["t"], rows - 3, rows)
    assert asked == [3 * width]
    np.testing.assert_array_equal(found.astype(np.float32), np.array([[0], [1], [1]], np.float32).repeat(width, 1))
    for outside in ((rows - 1, rows + 1), (-1, 1), (2, 1)):
        with pytest.raises(IndexError, match="outside shape"):
            read_rows(read_header(path)[0]["t"], *outside)


def test_long_tensors_are_read_in_several_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_file, "_MAX_IO", 3)
    path = raw_file(tmp_path / "a.safetensors", {"a": entry()}, b"abcd")
    assert read(read_header(path)[0]["a"]).tobytes() == b"abcd"


def test_writer_refuses_blocks_that_do_not_add_up(tmp_path):
    announced = [("a", "BF16", (2, 3))]
    row = np.zeros((1, 3), ml_dtypes.bfloat16)
    for blocks, message in (
        ([row], "6 bytes of the announced"),
        ([row] * 3, "does not fit into"),
        ([row.astype(np.float16)] * 2, "does not fit into"),
    ):
        with pytest.raises(ValueError, match=f"a: .*{message}"):
            write_file(tmp_path / "a.safetensors", announced, lambda name, blocks=blocks: blocks)


# Bytes of the formats, read through the file (pitfalls 4, 5 and 6).


def through_a_file(tmp_path, dtype, codes):
    codes = np.asarray(codes, np.uint8)
    header = {"a": entry(dtype, codes.shape, (0, codes.nbytes))}
    return read(read_header(raw_file(tmp_path / "f.safetensors", header, codes.tobytes()))[0]["a"])


def test_e4m3_bytes_are_the_ocp_variant(golden, tmp_path):
    found = through_a_file(tmp_path, "F8_E4M3", np.arange(256))
    assert found.dtype == ml_dtypes.float8_e4m3fn
    assert float(found[0x38]) == 1.0
    np.testing.assert_array_equal(found.astype(np.float32), np.load(golden / "quant.npz")["e4m3_table"])


def test_e8m0_bytes_are_powers_of_two(golden, tmp_path):
    found = through_a_file(tmp_path, "F8_E8M0", np.arange(256))
    assert float(found[120]) == 2.0**-7
    np.testing.assert_array_equal(found.astype(np.float32), np.load(golden / "quant.npz")["e8m0_table"])


def test_entry_knows_its_type():
    assert TensorEntry("a", "I8", (2,), None, 0, 2).numpy_dtype == np.int8
