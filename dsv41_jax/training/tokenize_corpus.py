"""Files of text -> ArrayRecord shards of tokenised documents, some of them held out.

    OUT/train/00000.array_record ...     records.py says what a record is
    OUT/heldout/00000.array_record ...   with --held_out
    OUT/manifest.json                    what was made, from what

OUT appears under its name only when complete. Whether a document is held out depends on its text alone, so equal
documents are on the same side, whatever the order of the files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from tqdm import tqdm

from dsv41_jax.config import ModelConfig, load_config
from dsv41_jax.image_plan import preprocess_image, span_length, vision_config
from dsv41_jax.settings import setting
from dsv41_jax.tokenizer import Tokenizer
from dsv41_jax.training.corpus_inputs import InputSettings, RawDocument, find_files, read_documents
from dsv41_jax.training.records import Document, StoredImage, encode_document
from dsv41_jax.training.sources import RECORDS_SUFFIX

MANIFEST = "manifest.json"
_CHUNK = 256  # documents that are encoded at once


@dataclasses.dataclass(frozen=True)
class TokenizeSettings(InputSettings):
    """How files become shards."""

    tokenizer: str = setting("", "folder with tokenizer.json (a model's folder, for example)")
    config: str | None = setting(None, "for images, the model's config (default: of the tokenizer's folder)")
    image_marker: str = setting("<image>", "text that stands for an image; without it images come before the text")
    held_out: float = setting(0.0, "share of the documents that is held out", least=0, most=0.5)
    shard_tokens: int = setting(64_000_000, "tokens after which a new shard begins")
    overwrite: bool = setting(False, "replace what an earlier run wrote")


def tokenize_corpus(inputs: Sequence[str], out: str | Path, settings: TokenizeSettings, progress: bool = True) -> dict:
    """Write the shards and the manifest, whose contents are returned.

    Raises:
        FileNotFoundError: an input or the tokenizer is missing. FileExistsError: OUT exists.
        ValueError: files of an unknown kind, a document that cannot be read, or an image without a model that takes it.
    """
    out = Path(out)
    _check_target(out, settings.overwrite)
    tokenizer = Tokenizer.from_folder(settings.tokenizer)
    config = _image_config(settings) if settings.image_field is not None else None
    files = find_files(inputs, settings)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        parts = _write_parts(partial, files, settings, tokenizer, config, progress)
        if "train" not in parts:
            raise ValueError(f"no document for training in {len(files)} files: {parts}")
        manifest = {
            "format": 1,
            "tokenizer_sha256": hashlib.sha256((Path(settings.tokenizer) / "tokenizer.json").read_bytes()).hexdigest(),
            "vocab_size": len(tokenizer),
            "settings": dataclasses.asdict(settings),
            "inputs": [{"file": str(file), "kind": kind, "bytes": file.stat().st_size} for file, kind in files],
            "parts": parts,
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _write_parts(
    folder: Path,
    files: list[tuple[Path, str]],
    settings: TokenizeSettings,
    tokenizer: Tokenizer,
    config: ModelConfig | None,
    progress: bool,
) -> dict[str, dict]:
    """Write the shards of both parts; returns the facts of those that have a document."""
    writers = {name: ShardWriter(folder / name, settings.shard_tokens) for name in ("train", "heldout")}
    size = sum(file.stat().st_size for file, _ in files)
    try:
        with tqdm(total=size, unit="B", unit_scale=True, disable=not progress) as bar:
            for document, raw in _documents(files, settings, tokenizer, config):
                text = "\0".join(raw.texts).encode()
                part = "heldout" if _held_out(text, settings.held_out) else "train"
                writers[part].write(document, sum(len(t.encode()) for t in raw.texts))
                bar.update(raw.size)
                bar.set_postfix(documents=sum(w.documents for w in writers.values()), refresh=False)
    finally:
        for writer in writers.values():
            writer.close()
    return {name: writer.facts() for name, writer in writers.items() if writer.documents}


def _check_target(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{out} exists; choose another folder, or --overwrite to replace it")
    if not (out / MANIFEST).is_file():
        raise FileExistsError(f"{out} is not what this command wrote (no {MANIFEST}); it is not replaced")


def _image_config(settings: TokenizeSettings) -> ModelConfig:
    config = load_config(settings.config or settings.tokenizer)
    vision_config(config)
    return config


def _held_out(text: bytes, share: float) -> bool:
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") < share * 2**64


def _documents(
    files: list[tuple[Path, str]], settings: TokenizeSettings, tokenizer: Tokenizer, config: ModelConfig | None
) -> Iterator[tuple[Document, RawDocument]]:
    """All documents with tokens, in the order of the files."""
    raws = (raw for file, kind in files for raw in read_documents(file, kind, settings))
    while chunk := list(itertools.islice(raws, _CHUNK)):
        parts = [[text.split(settings.image_marker) if raw.images else [text] for text in raw.texts] for raw in chunk]
        try:
            encoded = iter(tokenizer.encode_batch([part for texts in parts for text in texts for part in text]))
        except ValueError as error:
            raise ValueError(f"a document from {chunk[0].where} to {chunk[-1].where}: {error}") from error
        for raw, texts in zip(chunk, parts, strict=True):
            document = _document(raw, [[next(encoded) for _ in text] for text in texts], config)
            if len(document.token_ids):
                yield document, raw


def _document(raw: RawDocument, texts: list[list[list[int]]], config: ModelConfig | None) -> Document:
    """A document of encoded texts, each cut where an image stands."""
    ids: list[int] = []
    images: list[StoredImage] = []
    waiting = list(raw.images)
    places = sum(len(parts) - 1 for parts in texts)
    if places not in (0, len(waiting)):
        raise ValueError(f"{raw.where}: {places} image markers for {len(waiting)} images")

    def place() -> None:
        encoded = waiting.pop(0)
        try:
            _, grid, _ = preprocess_image(encoded, config)
        except ValueError as error:
            raise ValueError(f"{raw.where}: {error}") from error
        images.append(StoredImage(len(ids), grid, encoded))
        ids.extend([config.image_token_id] * span_length(grid, config.vision))

    prompt_length = None
    while waiting and not places:
        place()
    for number, parts in enumerate(texts):
        for i, part in enumerate(parts):
            if i:
                place()
            ids.extend(part)
        if number == 0 and len(texts) > 1:
            prompt_length = len(ids)
    return Document(np.array(ids, np.int64), prompt_length, tuple(images))


class ShardWriter:
    """Writes documents into numbered shards of one folder.

    Args:
        folder: made with the first document. shard_tokens: tokens after which a new shard begins.
    """

    def __init__(self, folder: Path, shard_tokens: int) -> None:
        self._folder, self._shard_tokens = folder, shard_tokens
        self._writer: ArrayRecordWriter | None = None
        self._shards: list[dict] = []
        self._sum = hashlib.sha256()
        self.documents = self._tokens = self._bytes = 0

    def write(self, document: Document, text_bytes: int) -> None:
        """Add a document; `text_bytes` is what its text takes in UTF-8."""
        if self._writer is None or self._shards[-1]["tokens"] >= self._shard_tokens:
            self.close()
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"{len(self._shards):05d}{RECORDS_SUFFIX}"
            # One record a group: a damaged one takes no others with it, and records are read in any order.
            self._writer = ArrayRecordWriter(str(self._folder / name), "group_size:1")
            self._shards.append({"file": name, "documents": 0, "tokens": 0})
        record = encode_document(document)
        self._writer.write(record)
        self._sum.update(record)
        count = len(document.token_ids)
        self._shards[-1]["documents"] += 1
        self._shards[-1]["tokens"] += count
        self.documents += 1
        self._tokens += count
        self._bytes += text_bytes

    def close(self) -> None:
        """Finish the last shard."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def facts(self) -> dict:
        """Documents, tokens, bytes of text, sha256 of all records in order, and the shards."""
        return {
            "documents": self.documents,
            "tokens": self._tokens,
            "bytes": self._bytes,
            "sha256": self._sum.hexdigest(),
            "shards": self._shards,
        }
