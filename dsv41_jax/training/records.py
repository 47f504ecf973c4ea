"""One training document, and the bytes it is stored as in an ArrayRecord file.

A record, little endian:

    4 bytes   "DSR1"
    uint32    CRC-32 of everything after it
    uint32    tokens n
    uint8     bytes of a token: 2 or 4
    int32     tokens of the prompt, -1 where there is none
    uint16    images m
    n tokens  unsigned
    m times   uint32 first token of the span, uint16 ViT rows, uint16 ViT columns, uint32 bytes, the encoded image

Image spans are already expanded: all their tokens are image_token_id. Neither BOS nor EOS is stored.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib

import numpy as np

_MAGIC = b"DSR1"
_SUM = struct.Struct("<I")
_HEAD = struct.Struct("<IBiH")
_IMAGE = struct.Struct("<IHHI")


class CorruptRecordError(ValueError):
    """A record whose bytes are not what was written."""


@dataclasses.dataclass(frozen=True)
class StoredImage:
    """An encoded image (PNG, JPEG ...) of a document: first token of its span, and its ViT patches (rows, columns)."""

    start: int
    grid: tuple[int, int]
    encoded: bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Document:
    """token_ids: integers [n]; prompt_length: tokens of the prompt, None without one; images in order of position."""

    token_ids: np.ndarray
    prompt_length: int | None = None
    images: tuple[StoredImage, ...] = ()

    def framed(self, bos: int | None, eos: int | None) -> Document:
        """With BOS before and EOS behind, where they are wanted and not there yet."""
        ids, shift = np.asarray(self.token_ids, np.int32), 0
        if bos is not None and (not len(ids) or ids[0] != bos):
            ids, shift = np.concatenate([[np.int32(bos)], ids]), 1
        if eos is not None and ids[-1:] != eos:
            ids = np.concatenate([ids, [np.int32(eos)]])
        prompt = None if self.prompt_length is None else self.prompt_length + shift
        images = tuple(dataclasses.replace(image, start=image.start + shift) for image in self.images)
        return Document(ids, prompt, images)


def encode_document(document: Document) -> bytes:
    """The record of a document; ValueError for token ids that are not from 0 to 2^32 - 1."""
    ids = np.asarray(document.token_ids)
    if ids.size and not (ids.min() >= 0 and ids.max() < 2**32):
        raise ValueError(f"token ids {ids.min()}..{ids.max()}: numbers from 0 to 2^32 - 1 are needed")
    width = 2 if not ids.size or ids.max() < 2**16 else 4
    prompt = -1 if document.prompt_length is None else document.prompt_length
    parts = [_HEAD.pack(len(ids), width, prompt, len(document.images)), ids.astype(f"<u{width}").tobytes()]
    for image in document.images:
        parts += [_IMAGE.pack(image.start, *image.grid, len(image.encoded)), image.encoded]
    body = b"".join(parts)
    return _MAGIC + _SUM.pack(zlib.crc32(body)) + body


def decode_document(record: bytes) -> Document:
    """The document of a record, token ids int32 [n]; CorruptRecordError where the bytes are not what was written."""
    head = len(_MAGIC) + _SUM.size
    if len(record) < head + _HEAD.size or record[: len(_MAGIC)] != _MAGIC:
        raise CorruptRecordError(f"{len(record)} bytes that do not begin as a record of launch/tokenize.py does")
    body = memoryview(record)[head:]
    if zlib.crc32(body) != _SUM.unpack_from(record, len(_MAGIC))[0]:
        raise CorruptRecordError(f"the checksum of its {len(record)} bytes does not fit")
    count, width, prompt, images = _HEAD.unpack_from(body)
    at = _HEAD.size + count * width
    ids = np.frombuffer(body[_HEAD.size : at], f"<u{width}").astype(np.int32)
    stored = []
    for _ in range(images):
        start, rows, columns, size = _IMAGE.unpack_from(body, at)
        at += _IMAGE.size
        stored.append(StoredImage(start, (rows, columns), bytes(body[at : at + size])))
        at += size
    return Document(ids, None if prompt < 0 else prompt, tuple(stored))
