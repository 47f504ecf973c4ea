"""Where documents come from: ArrayRecord shards that `launch/tokenize.py` wrote, or one array of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import grain
import numpy as np

from dsv41_jax.training.records import CorruptRecordError, Document, decode_document

RECORDS_SUFFIX = ".array_record"


class Source(Protocol):
    """Documents by number.

    Attributes:
        name: for messages and statistics. complete: documents have the BOS and EOS they should have.
        fingerprint: changes with the files, so that a saved position is not used on others.
    """

    name: str
    complete: bool
    fingerprint: str

    def __len__(self) -> int:
        """How many documents."""

    def __getitem__(self, number: int) -> Document:
        """Raises CorruptRecordError for one that cannot be read."""


class RecordSource:
    """The documents of ArrayRecord shards, in the order of the shards' names.

    Args:
        shards: the files. name: for messages.

    Raises:
        ValueError: a shard that is no ArrayRecord file.
    """

    complete = False

    def __init__(self, shards: Sequence[Path], name: str) -> None:
        self.name = name
        self._shards = sorted(shards)
        self._readers, counts = [], []
        for shard in self._shards:
            try:
                self._readers.append(grain.sources.ArrayRecordDataSource([str(shard)]))
                counts.append(len(self._readers[-1]))
            except (RuntimeError, ValueError, OSError) as error:
                raise ValueError(f"{shard}: not a whole ArrayRecord file, tokenise it again ({error})") from error
        self._ends = np.cumsum(counts)
        facts = [(s.name, s.stat().st_size, int(n)) for s, n in zip(self._shards, counts, strict=True)]
        self.fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> Document:
        shard = int(np.searchsorted(self._ends, number, side="right"))
        within = number - (int(self._ends[shard - 1]) if shard else 0)
        try:
            return decode_document(self._readers[shard][within])
        except (CorruptRecordError, RuntimeError) as error:  # ArrayRecord's own checksums raise RuntimeError
            raise CorruptRecordError(f"{self._shards[shard]}: record {within} is corrupt: {error}") from error


class TokenArraySource:
    """The documents of one .npy array of tokens, each from a BOS to the next; EOS is where the array has it.

    Args:
        file: integers [n] that begin with BOS. bos: its id. name: for messages.

    Raises:
        ValueError: another kind of array.
    """

    complete = True

    def __init__(self, file: Path, bos: int, name: str) -> None:
        self.name = name
        self._tokens = np.load(file, mmap_mode="r", allow_pickle=False)
        tokens = self._tokens
        if tokens.ndim != 1 or tokens.dtype.kind not in "ui" or not len(tokens) or tokens[0] != bos:
            raise ValueError(
                f"{file}: integers [n] that begin with BOS ({bos}) are needed, got {tokens.dtype} {tokens.shape}"
            )
        self._starts = np.append(np.flatnonzero(tokens == bos), len(tokens))
        self.fingerprint = hashlib.sha256(f"{tokens.dtype}{len(tokens)}".encode() + self._starts.tobytes()).hexdigest()[
            :16
        ]

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Document:
        return Document(self._tokens[self._starts[number] : self._starts[number + 1]].astype(np.int32))


def open_source(path: str, bos: int, name: str) -> Source:
    """The source at a path: a .npy file, an ArrayRecord file, or a folder or pattern (`data/train-*`) of such files.

    Raises:
        FileNotFoundError: nothing there. ValueError: something else there.
    """
    place = Path(path)
    if place.suffix == ".npy":
        if not place.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        return TokenArraySource(place, bos, name)
    if place.is_dir():
        shards = list(place.glob(f"*{RECORDS_SUFFIX}"))
    elif place.is_file():
        shards = [place]
    else:
        shards = [file for file in place.parent.glob(place.name) if file.name.endswith(RECORDS_SUFFIX)]
    if not shards:
        raise FileNotFoundError(f"{path}: no {RECORDS_SUFFIX} files there; launch/tokenize.py writes them")
    source = RecordSource(shards, name)
    if not len(source):
        raise ValueError(f"{path}: {len(shards)} shards without a document")
    return source
