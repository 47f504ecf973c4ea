"""The demo tokenizer: its file is in the released style, knows the markers, covers every byte and is remade exactly."""

from __future__ import annotations

import json
import random

import pytest

from dsv41_jax.tokenizer import Tokenizer
from dsv41_jax.training import demo_tokenizer


@pytest.fixture(scope="module")
def texts():
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(1, 7))) for _ in range(400)]
    return [" ".join(draw.choices(words, k=4000)) for _ in range(4)]


@pytest.fixture(scope="module")
def folder(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    demo_tokenizer.save_tokenizer(demo_tokenizer.train_tokenizer(texts, 600), folder)
    return folder


def test_released_style(folder):
    described = json.loads((folder / "tokenizer.json").read_text())
    added = described["added_tokens"]
    assert [t["content"] for t in added] == [*demo_tokenizer.SPECIAL, *demo_tokenizer.MARKUP]
    assert [t["id"] for t in added] == list(range(17))
    assert [t["content"] for t in added if t["special"]] == list(demo_tokenizer.SPECIAL)
    assert described["model"]["type"] == "BPE" and len(described["model"]["vocab"]) == 600
    assert described["pre_tokenizer"]["pretokenizers"][-1]["type"] == described["decoder"]["type"] == "ByteLevel"
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 600)


def test_round_trip_of_any_text(folder):
    tokenizer = Tokenizer.from_folder(folder)
    text = "Isn't it 12345?\r\n\n  \u6f22\u5b57 \U0001f642 caf\u00e9 <think>\x00" + "".join(map(chr, range(256)))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert {tokenizer.token_bytes(i) for i in range(17, 17 + 256)} == {bytes([b]) for b in range(256)}


def test_digits_in_threes_and_no_merge_across_words(folder):
    tokenizer = Tokenizer.from_folder(folder)
    pieces = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("1234567 abc, def")]
    assert not any(" " in piece.strip() for piece in pieces)
    split = tokenizer.backend.pre_tokenizer.pre_tokenize_str("1234567 abc, it's")
    assert [piece for piece, _ in split] == ["123", "456", "7", "\u0120abc", ",", "\u0120it", "'s"]


def test_same_texts_same_file(texts, folder, tmp_path):
    demo_tokenizer.save_tokenizer(demo_tokenizer.train_tokenizer(texts, 600), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_too_little_text_is_an_error():
    with pytest.raises(ValueError, match="give only 2.. of 4096"):
        demo_tokenizer.train_tokenizer(["a b a b"])
