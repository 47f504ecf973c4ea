"""Text to ids and back: a thin adapter over `tokenizers` for a folder with a tokenizer.json.

Plain text never becomes a control token. Only the BPE's own tokens are reachable from text; `<think>`, `<｜User｜>`
and the rest are reachable by name (`token_id`) alone, as in `deepseek-recipe`'s prompt encoding. "Control" means every
added token: most chat markup is stored as special=false, so that flag does not tell markup from text.
"""

from __future__ import annotations

import codecs
import functools
import json
import os
from collections.abc import Iterable, Sequence

import tokenizers

from dsv41_jax.arguments import check_text
from dsv41_jax.checkpoint.safetensors_file import CheckpointError


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, every other byte for a character from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()


def _token_bytes(token: str) -> bytes:
    """The bytes a token string stands for: byte-level characters, or plain UTF-8 (`<｜User｜>`)."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


class Tokenizer:
    """A byte-level BPE tokenizer whose control tokens are reachable by name only.

    `backend` is the raw `tokenizers.Tokenizer` (the Engram token map is made from it). `bos_token_id` and
    `eos_token_id` are None where the folder does not say. Raises ValueError for a tokenizer that is not byte-level, or
    one whose plain vocabulary can spell a control token.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, bos_token_id: int | None = None, eos_token_id: int | None = None
    ) -> None:
        if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
            raise ValueError("only byte-level tokenizers are supported: the tokenizer's decoder is not ByteLevel")
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.control_ids = frozenset(backend.get_added_tokens_decoder())
        # The same model and splitting rules without the added vocabulary: what plain text is encoded with.
        self._plain = tokenizers.Tokenizer(backend.model)
        for stage in ("normalizer", "pre_tokenizer"):
            if getattr(backend, stage) is not None:
                setattr(self._plain, stage, getattr(backend, stage))
        self._check_plain()

    def _check_plain(self) -> None:
        names = [str(token) for token in self.backend.get_added_tokens_decoder().values()]
        for name, encoding in zip(names, self._plain.encode_batch(names, add_special_tokens=False), strict=True):
            if not self.control_ids.isdisjoint(encoding.ids):
                raise ValueError(f"plain text can spell the control token {name!r}: its merges must not be in the BPE")

    @classmethod
    def from_folder(cls, folder: str | os.PathLike) -> Tokenizer:
        """Read `tokenizer.json`; BOS and EOS from `config.json`, which alone is authoritative, where there is one.

        Raises FileNotFoundError without a tokenizer.json, CheckpointError for a damaged one, KeyError where
        tokenizer_config.json names an unknown token.
        """
        folder = os.fspath(folder)
        file = os.path.join(folder, "tokenizer.json")
        if not os.path.isfile(file):
            raise FileNotFoundError(f"{file}: this folder has no tokenizer")
        try:
            backend = tokenizers.Tokenizer.from_file(file)
        except Exception as error:  # the library raises nothing more special
            raise CheckpointError(f"{file}: not a tokenizer ({error})") from error
        tokenizer = cls(backend)
        config = _read_json(os.path.join(folder, "config.json"))
        names = _read_json(os.path.join(folder, "tokenizer_config.json"))
        for which in ("bos", "eos"):
            token_id = config.get(f"{which}_token_id")
            name = names.get(f"{which}_token")
            if token_id is None and name is not None:
                token_id = tokenizer.token_id(name["content"] if isinstance(name, dict) else name)
            setattr(tokenizer, f"{which}_token_id", token_id)
        return tokenizer

    def __len__(self) -> int:
        """Number of tokens, added ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        """Ids of plain text; control tokens spelled in it stay text.

        Raises TypeError for anything but a string, ValueError for lone surrogates, and for add_bos without a BOS id.
        """
        check_text("text", text, empty=True)
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if not add_bos:
            return ids
        if self.bos_token_id is None:
            raise ValueError("add_bos: neither config.json nor tokenizer_config.json names a BOS token")
        return [self.bos_token_id, *ids]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of several texts, on all cores."""
        for text in texts:
            check_text("text", text, empty=True)
        return [encoding.ids for encoding in self._plain.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int], keep_control: bool = False) -> str:
        """Text of ids. Control tokens are removed by id unless `keep_control`; ids without a token give nothing."""
        decoder = StreamDecoder(self, keep=self.control_ids if keep_control else ())
        return "".join(map(decoder.push, ids)) + decoder.flush()

    def token_id(self, name: str) -> int:
        """Id of a token by its exact spelling, e.g. `token_id("<｜User｜>")`. Raises KeyError for an unknown one."""
        token_id = self.backend.token_to_id(name)
        if token_id is None:
            raise KeyError(f"this tokenizer has no token {name!r}")
        return token_id

    def name(self, token_id: int) -> str:
        """Spelling of a token by its id, the inverse of `token_id`; "" for an id that has none."""
        return self.backend.id_to_token(token_id) or ""

    def is_control(self, name: str) -> bool:
        """Whether there is a control token of this exact spelling."""
        return self.backend.token_to_id(name) in self.control_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; none for an id that has no token (rows of the embedding can outnumber tokens)."""
        table = self._bytes
        return table[token_id] if 0 <= token_id < len(table) else b""

    @functools.cached_property
    def _bytes(self) -> list[bytes]:
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            table[token_id] = _token_bytes(token)
        return table


class StreamDecoder:
    """Ids in one at a time, text out as soon as it is certain; one per stream.

    Bytes of a character that is not complete yet are held back, so a split character is never shown as U+FFFD. Control
    tokens outside `keep` are removed by id, never by their looks. The pieces and `flush()` joined are
    `Tokenizer.decode` of the same ids.
    """

    def __init__(self, tokenizer: Tokenizer, keep: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._dropped = tokenizer.control_ids - frozenset(keep)
        # "replace" only ever acts on bytes that no continuation can make valid.
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this id makes certain; often empty inside a multi-byte character."""
        token_id = int(token_id)
        return "" if token_id in self._dropped else self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """End of the stream: one U+FFFD if it ended inside a character, else nothing. The decoder can be used again."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def _read_json(path: str) -> dict:
    if not os.path.isfile(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return json.load(file)
