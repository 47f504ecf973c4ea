"""Reader and writer of single safetensors files: a header, and one byte range per tensor.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes back to back. Nothing is
memory-mapped: `read` and `read_rows` fetch exactly the bytes asked for, so the memory in use is what was read.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

# F8_E4M3 is the OCP variant (bias 7, finite only), F8_E8M0 holds 2^(byte - 127): typed arrays, never integers.
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
        "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
    }.items()
}  # fmt: skip

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library; the largest released header is under 1 MB
_MAX_IO = 1 << 30  # one system call moves less than 2^31 bytes


class CheckpointError(ValueError):
    """A checkpoint cannot be used as it is. The message names file and tensor and says what to do."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        name: name in the header.
        dtype: safetensors dtype name, a key of `DTYPES`.
        shape: shape; () is a scalar.
        file: the file.
        offset: absolute position of the first byte in the file.
        nbytes: number of bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    @property
    def numpy_dtype(self) -> np.dtype:
        return DTYPES[self.dtype]


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """`object_pairs_hook` for json that refuses a key given twice (json itself keeps the last one silently)."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice!r} appears twice")
    return result


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of safetensors dtype `dtype`."""
    count = DTYPES[dtype].itemsize
    for n in shape:
        count *= n
    return count


def _parse_entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise CheckpointError(f"{where}: the header entry must hold dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: unknown dtype {dtype!r}; this reader knows {', '.join(DTYPES)}")
    # bool is an int in Python; `type(...) is int` keeps true/false out of shapes and offsets.
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise CheckpointError(f"{where}: shape {shape!r} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        raise CheckpointError(f"{where}: data_offsets {offsets!r} is not a pair of integers")
    begin, end = offsets
    if not 0 <= begin <= end:
        raise CheckpointError(f"{where}: data_offsets {offsets} are out of order")
    wanted = tensor_bytes(dtype, shape)
    if end - begin != wanted:
        raise CheckpointError(
            f"{where}: {dtype} {shape} takes {wanted} bytes but data_offsets {offsets} hold {end - begin}"
        )
    return TensorEntry(name, dtype, tuple(shape), path, data_start + begin, wanted)


def _check_layout(path: Path, entries: Iterable[TensorEntry], data_start: int, file_size: int) -> None:
    position, previous = data_start, None
    for entry in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if entry.offset < position:
            raise CheckpointError(f"{path}: tensors {previous!r} and {entry.name!r} overlap")
        if entry.offset > position:
            raise CheckpointError(
                f"{path}: {entry.offset - position} bytes before tensor {entry.name!r} belong to no tensor"
            )
        position, previous = entry.offset + entry.nbytes, entry.name
        if position > file_size:
            raise CheckpointError(
                f"{path}: truncated: tensor {entry.name!r} ends at byte {position} but the file has {file_size} bytes; "
                "fetch the file again"
            )
    if position != file_size:
        raise CheckpointError(
            f"{path}: {file_size - position} bytes after the last tensor belong to no tensor; fetch the file again"
        )


def read_header(path: str | os.PathLike) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Read and check the header of a safetensors file; no tensor bytes are touched.

    Returns:
        ({name: entry} in header order, the `__metadata__` strings).

    Raises:
        CheckpointError: missing or truncated file, header too long or not JSON, a name twice, unknown dtype, sizes that
            disagree, offsets out of order, overlapping, outside the file or leaving bytes unused.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(
                    f"{path}: truncated: {file_size} bytes cannot hold a safetensors header; fetch the file again"
                )
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: the header claims {length} bytes, more than the limit of {MAX_HEADER_BYTES}; "
                    "this is not a safetensors file"
                )
            if 8 + length > file_size:
                raise CheckpointError(
                    f"{path}: truncated: the header claims {length} bytes but the file has {file_size} bytes; "
                    "fetch the file again"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings")
    entries = {name: _parse_entry(path, name, value, 8 + length) for name, value in header.items()}
    _check_layout(path, entries.values(), 8 + length, file_size)
    return entries, metadata


def _read_bytes(entry: TensorEntry, offset: int, target: np.ndarray) -> None:
    view = memoryview(target.reshape(-1).view(np.uint8))
    with open(entry.file, "rb", buffering=0) as file:
        done = 0
        while done < len(view):
            n = os.preadv(file.fileno(), [view[done : done + _MAX_IO]], offset + done)
            if n == 0:
                raise CheckpointError(
                    f"{entry.file}: truncated inside tensor {entry.name!r} since it was opened; fetch the file again"
                )
            done += n


def read_rows(entry: TensorEntry, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of a tensor of at least one axis, as [stop - start, ...] in its own dtype.

    Only those rows' bytes are read. IndexError if the range leaves the tensor.
    """
    if not entry.shape or not 0 <= start <= stop <= entry.shape[0]:
        raise IndexError(f"{entry.name}: rows [{start}, {stop}) are outside shape {entry.shape}")
    row_bytes = entry.nbytes // entry.shape[0] if entry.shape[0] else 0
    rows = np.empty((stop - start, *entry.shape[1:]), entry.numpy_dtype)
    _read_bytes(entry, entry.offset + start * row_bytes, rows)
    return rows


def read(entry: TensorEntry) -> np.ndarray:
    """The whole tensor, in its own shape and dtype (bf16, E4M3 and E8M0 as ml_dtypes; I8 stays int8)."""
    result = np.empty(entry.shape, entry.numpy_dtype)
    _read_bytes(entry, entry.offset, result)
    return result


def file_head(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str] | None = None) -> bytes:
    """What comes before the data in a file of these tensors (name, safetensors dtype, shape), laid back to back."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, dtype, shape in tensors:
        end = position + tensor_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # aligns the data, as the format's own library does
    return len(raw).to_bytes(8, "little") + raw


def write_file(
    path: str | os.PathLike,
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
    blocks_of: Callable[[str], Iterable[np.ndarray]],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write one safetensors file block by block, so that only one block is in memory.

    Args:
        path: the file, overwritten in place; the caller gives it a temporary name where readers may be looking.
        tensors: (name, safetensors dtype, shape) of every tensor, in file order.
        blocks_of: called once per name, in that order; the tensor's rows as one or more consecutive arrays.
        metadata: strings for the header's `__metadata__`.

    Raises:
        ValueError: the blocks of a tensor are not what was announced.
    """
    head = file_head(tensors, metadata)
    with open(path, "wb") as file:
        file.write(head)
        for name, dtype, shape in tensors:
            left = tensor_bytes(dtype, shape)
            for block in blocks_of(name):
                left -= block.nbytes
                if block.dtype != DTYPES[dtype] or left < 0:
                    raise ValueError(
                        f"{path}: {name}: a block {block.dtype} {block.shape} does not fit into {dtype} {shape}"
                    )
                file.write(memoryview(np.ascontiguousarray(block).reshape(-1).view(np.uint8)))
            if left:
                raise ValueError(f"{path}: {name}: {left} bytes of the announced {dtype} {shape} are missing")
        file.flush()
        os.fsync(file.fileno())
