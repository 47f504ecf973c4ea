"""Compressed token ids: the alphabet that Engram n-grams are hashed over.

Raw ids whose texts differ only in case, accents, width or whitespace share one compressed id. The map is a pure
function of the tokenizer file, and its size scales every hash multiplier: one id more or fewer moves every address.
Source: report, Engram; spec section 10.
"""

from __future__ import annotations

import os

import numpy as np
import tokenizers
from tokenizers import Regex, normalizers

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_PROTECTED_SPACE = "\ue000"  # a private-use character: it keeps a text that is one space from being stripped to nothing


def _normalizer() -> normalizers.Normalizer:
    """The fold that makes texts equal. The Rust normalizers are used because their Unicode tables define the map."""
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _PROTECTED_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_PROTECTED_SPACE, " "),
        ]
    )


def compressed_token_map(backend: tokenizers.Tokenizer) -> np.ndarray:
    """Raw id -> compressed id, int32 [number of tokens, added ones included].

    Each id is decoded alone. A text with U+FFFD (a fragment of a character) is its own key, by token string; any other
    is keyed by its normalised text, or by itself where nothing is left of it. Keys are numbered in order of first
    appearance, so the map is deterministic. About one second for 129,280 tokens.
    """
    fold = _normalizer().normalize_str
    texts = backend.decode_batch(
        [[i] for i in range(backend.get_vocab_size(with_added_tokens=True))], skip_special_tokens=False
    )
    numbers: dict[str, int] = {}
    token_map = np.empty(len(texts), np.int32)
    for raw_id, text in enumerate(texts):
        key = backend.id_to_token(raw_id) if REPLACEMENT_CHARACTER in text else (fold(text) or text)
        token_map[raw_id] = numbers.setdefault(key, len(numbers))
    return token_map


def load_token_map(path: str | os.PathLike) -> np.ndarray:
    """`compressed_token_map` of a tokenizer.json, or of the one in a folder. Raises FileNotFoundError without one."""
    path = os.fspath(path)
    file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
    if not os.path.isfile(file):
        raise FileNotFoundError(f"{file}: Engram needs a tokenizer.json, or an explicit token_map")
    return compressed_token_map(tokenizers.Tokenizer.from_file(file))


def check_token_map(token_map: np.ndarray, vocab_size: int, compressed_vocab_size: int) -> np.ndarray:
    """The map as a contiguous int64 [vocab_size] array.

    Raises ValueError where it does not cover the vocabulary, or does not have exactly `compressed_vocab_size` ids: the
    table would then be addressed by other multipliers than it was trained with.
    """
    token_map = np.asarray(token_map)
    if token_map.ndim != 1 or not np.issubdtype(token_map.dtype, np.integer):
        raise ValueError(f"token_map must be a vector of integers, not {token_map.dtype} {token_map.shape}")
    if token_map.shape[0] != vocab_size:
        raise ValueError(f"token_map has {token_map.shape[0]} entries for a vocabulary of {vocab_size}")
    counts = np.unique(token_map)
    if counts[0] != 0 or counts[-1] != compressed_vocab_size - 1 or len(counts) != compressed_vocab_size:
        raise ValueError(
            f"token_map has {len(counts)} compressed ids ({counts[0]}..{counts[-1]}); "
            f"the config says engram_compressed_vocab_size = {compressed_vocab_size}"
        )
    return np.ascontiguousarray(token_map, np.int64)
