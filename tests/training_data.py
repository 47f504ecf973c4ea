"""Documents, shards and pipelines for the tests of training data."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image

from dsv41_jax.config import ModelConfig
from dsv41_jax.training.batches import BatchMaker
from dsv41_jax.training.data_settings import DataSettings
from dsv41_jax.training.mixture import Drawn, Mixture
from dsv41_jax.training.packing import Piece, Row
from dsv41_jax.training.pipeline import Pipeline, open_pipeline
from dsv41_jax.training.records import Document, encode_document
from tiny_training import VOCAB, tiny_training_config

BOS, EOS = 0, 1


class Listed:
    """A source in memory."""

    complete = True

    def __init__(self, documents: Sequence[Document], name: str = "listed"):
        self.documents, self.name, self.fingerprint = list(documents), name, f"{len(documents)}"

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, number: int) -> Document:
        return self.documents[number]


def random_documents(count: int, mean: float, seed: int = 0) -> list[Document]:
    """Documents of exponentially distributed lengths, without BOS, EOS and image tokens."""
    rng = np.random.default_rng(seed)
    return [Document(rng.integers(4, VOCAB - 4, int(rng.exponential(mean)) + 1)) for _ in range(count)]


def of_lengths(*lengths: int) -> list[Document]:
    return [Document(np.full(length, 4 + i, np.int32)) for i, length in enumerate(lengths)]


def mixture(sources: Sequence, weights: Sequence[float] = (1.0,), **options) -> Mixture:
    options = {"bos": None, "eos": None, "vocab_size": VOCAB, "seed": 0, "shuffle": False, "epochs": 1} | options
    return Mixture(sources, weights, **options)


def write_shard(file: Path, records: Sequence[bytes]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = ArrayRecordWriter(str(file), "group_size:1,uncompressed")  # so that a test finds a record's bytes
    for record in records:
        writer.write(record)
    writer.close()
    return file


def write_documents(folder: Path, documents: Sequence[Document], shards: int = 2) -> Path:
    """Shards of a folder; returns the folder."""
    size = -(-len(documents) // shards)
    for i in range(shards):
        part = documents[i * size : (i + 1) * size]
        write_shard(folder / f"{i:05d}.array_record", [encode_document(document) for document in part])
    return folder


def pipeline(*paths: Path, shard: int = 0, shards: int = 1, **values) -> Pipeline:
    """A pipeline of the tiny training model."""
    sources = [{"path": str(path), "name": path.name} for path in paths]
    values = {"sources": sources, "batch": 4, "length": 32, "open_rows": 6, "mixed_rows": 5, "prefetch": 0} | values
    return open_pipeline(DataSettings.of(values), tiny_training_config(), np.arange(VOCAB), shard=shard, shards=shards)


def row_of(*pieces: tuple[Document, int, int]) -> Row:
    row = Row()
    for document, start, stop in pieces:
        row.add(Piece(Drawn(0, 0, document), start, stop))
    return row


def maker(config: ModelConfig | None = None, token_map: np.ndarray | None = None, **values) -> BatchMaker:
    settings = DataSettings.of({"sources": [{"path": "-"}], "batch": 1, "length": 16, **values})
    config = config or tiny_training_config()
    return BatchMaker(settings, config, np.arange(VOCAB) if token_map is None else token_map)


def png(rgb: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(rgb).save(stream, "PNG")
    return stream.getvalue()
