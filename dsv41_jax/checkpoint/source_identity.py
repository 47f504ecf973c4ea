"""Recognises the folder a conversion reads, so that a resumed one does not mix two models."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from dsv41_jax.checkpoint.released_folder import ReleasedFolder
from dsv41_jax.checkpoint.safetensors_file import read_header
from dsv41_jax.checkpoint.tensor_source import TensorSource


def identity(source: TensorSource) -> dict[str, str]:
    """{file: its size and the CRC-32 of its header} of the files that say what the source holds.

    Other small files count whole. It is the same for copies of a folder, and tells apart folders whose tensors have
    other names, shapes, or places, but not other values.
    """
    result = {}
    for file in _files(source):
        name = str(file.relative_to(source.path))
        if file.suffix == ".safetensors":
            read_header(file)  # a header that is not sound is refused
            with open(file, "rb") as stream:
                head = stream.read(8)
                head += stream.read(int.from_bytes(head, "little"))
            result[name] = f"{file.stat().st_size} bytes, header {zlib.crc32(head):08x}"
        elif name == "config.json" or file.name in (".zarray", "zarr.json", "_METADATA", "manifest.ocdbt"):
            result[name] = f"{file.stat().st_size} bytes, content {zlib.crc32(file.read_bytes()):08x}"
    return result


def stamp(source: TensorSource) -> str:
    """A short text that changes when any file of the source is written to: from all sizes and modification times."""
    files = {str(file.relative_to(source.path)): file.stat() for file in _files(source)}
    times = {name: (status.st_size, status.st_mtime_ns) for name, status in files.items()}
    return f"{zlib.crc32(json.dumps(times, sort_keys=True).encode()):08x}"


def _files(source: TensorSource) -> Iterator[Path]:
    yield source.path / "config.json"
    if isinstance(source, ReleasedFolder):
        yield from sorted({entry.file for entry in source.entries.values()})
    else:
        yield from sorted(source.path.glob("*.safetensors"))
        yield from sorted(file for file in (source.path / "params").rglob("*") if file.is_file())
