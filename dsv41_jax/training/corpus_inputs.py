"""Documents from files: plain text, JSON lines and Parquet."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv41_jax.settings import Settings, setting

KINDS = {"text": (".txt", ".text", ".md"), "jsonl": (".jsonl", ".ndjson"), "parquet": (".parquet",)}


@dataclasses.dataclass(frozen=True)
class InputSettings(Settings):
    """How documents are read from files."""

    kind: str = setting("auto", "what the files are; auto goes by their suffix", choices=("auto", *KINDS))
    split: str = setting(
        "file",
        "of text files: a document is the whole file, or what stands between blank lines",
        choices=("file", "blank"),
    )
    text_field: str = setting("text", "of JSONL and Parquet: field of the text")
    prompt_field: str | None = setting(None, "field of a prompt; the document is the prompt and then the response")
    response_field: str | None = setting(None, "field of the response, with --prompt_field")
    image_field: str | None = setting(None, "field of an image or a list of them: path, bytes or data URL")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompt_field is None) != (self.response_field is None):
            raise ValueError("prompt_field and response_field are needed together, or neither")

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Fields whose texts make the document, in order."""
        return (self.text_field,) if self.prompt_field is None else (self.prompt_field, self.response_field)

    @property
    def fields(self) -> tuple[str, ...]:
        """All fields that a document is read from."""
        return self.text_fields + (() if self.image_field is None else (self.image_field,))


@dataclasses.dataclass(frozen=True)
class RawDocument:
    """texts: one, or a prompt and its response. images: encoded. where: file and line. size: bytes read for it."""

    texts: tuple[str, ...]
    images: tuple[bytes, ...]
    where: str
    size: float


def find_files(inputs: Sequence[str], settings: InputSettings) -> list[tuple[Path, str]]:
    """(file, kind) of all inputs: files, or folders with all their files of a known suffix, in the order of names.

    Raises:
        FileNotFoundError: nothing there. ValueError: an unknown kind, a field that a Parquet file lacks, or Parquet
            without pyarrow.
    """
    found = []
    for name in inputs:
        place = Path(name)
        if not place.exists():
            raise FileNotFoundError(f"{name}: no such file or folder")
        files = [place]
        if place.is_dir():
            files = sorted(file for file in place.rglob("*") if file.is_file() and _kind(file, settings) is not None)
            if not files:
                raise FileNotFoundError(f"{name}: no file in this folder has a suffix of {KINDS}")
        for file in files:
            kind = _kind(file, settings)
            if kind is None:
                raise ValueError(f"{file}: unknown suffix {file.suffix!r}; give --kind={'|'.join(KINDS)}")
            if kind == "parquet":
                columns = _parquet(file).schema_arrow.names
                if missing := sorted(set(settings.fields) - set(columns)):
                    raise ValueError(f"{file}: no column {missing}; it has {columns}")
            if kind == "text" and settings.fields != ("text",):
                raise ValueError(f"{file}: a text file has no fields; they are for JSONL and Parquet")
            found.append((file, kind))
    if not found:
        raise ValueError("no input files")
    return found


def _kind(file: Path, settings: InputSettings) -> str | None:
    if settings.kind != "auto":
        return settings.kind
    return next((kind for kind, suffixes in KINDS.items() if file.suffix.lower() in suffixes), None)


def read_documents(file: Path, kind: str, settings: InputSettings) -> Iterator[RawDocument]:
    """The documents of a file. Raises ValueError naming the file and line of what cannot be read."""
    if kind == "text":
        yield from _text(file, settings)
        return
    for where, values, size in _jsonl(file) if kind == "jsonl" else _parquet_rows(file, settings):
        texts = []
        for field in settings.text_fields:
            if not isinstance(values.get(field), str):
                raise ValueError(f"{where}: field {field!r} must be a string; the fields are {sorted(values)}")
            texts.append(values[field])
        images = () if settings.image_field is None else _images(values.get(settings.image_field), file.parent, where)
        yield RawDocument(tuple(texts), images, where, size)


def _text(file: Path, settings: InputSettings) -> Iterator[RawDocument]:
    with open(file, encoding="utf-8", newline="") as opened:
        try:
            if settings.split == "file":
                text = opened.read()
                yield RawDocument((text,), (), str(file), len(text.encode()))
                return
            for blank, lines in itertools.groupby(opened, key=lambda line: not line.strip()):
                text = "".join(lines)
                if not blank:
                    yield RawDocument((text.rstrip("\r\n"),), (), f"{file}: {text[:40]!r}", len(text.encode()))
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not UTF-8 text: {error}") from error


def _jsonl(file: Path) -> Iterator[tuple[str, Mapping, float]]:
    with open(file, "rb") as opened:
        for number, line in enumerate(opened, 1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                values = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not JSON: {error}") from error
            if not isinstance(values, dict):
                raise ValueError(f"{where}: an object is needed, got {type(values).__name__}")
            yield where, values, len(line)


def _parquet(file: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ValueError(f"{file}: Parquet needs pyarrow: pip install 'dsv41-jax[parquet]'") from error
    try:
        return pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not a Parquet file: {error}") from error


def _parquet_rows(file: Path, settings: InputSettings) -> Iterator[tuple[str, Mapping, float]]:
    opened = _parquet(file)
    size = file.stat().st_size / max(opened.metadata.num_rows, 1)
    number = 0
    for batch in opened.iter_batches(batch_size=1024, columns=list(settings.fields)):
        for values in batch.to_pylist():
            number += 1
            yield f"{file} row {number}", values, size


def _images(value: Any, folder: Path, where: str) -> tuple[bytes, ...]:
    if value is None:
        return ()
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(_image(each, folder, where) for each in values)


def _image(value: Any, folder: Path, where: str) -> bytes:
    """An encoded image from bytes, a path, a data URL, or the {bytes, path} of Parquet data sets."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{where}: an image is a path, bytes or a data URL, got {type(value).__name__}")
    try:
        if value.startswith("data:"):
            return base64.b64decode(value.partition(",")[2], validate=True)
        return (folder / value).read_bytes()
    except (OSError, binascii.Error) as error:
        raise ValueError(f"{where}: image {value[:80]!r} cannot be read: {error}") from error
