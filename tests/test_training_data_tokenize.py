"""launch/tokenize.py: text, JSON lines and Parquet become shards that decode to the same text; errors come first."""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from dsv41_jax.config import ModelConfig
from dsv41_jax.image_plan import preprocess_image
from dsv41_jax.tokenizer import Tokenizer
from dsv41_jax.training import corpus_inputs
from dsv41_jax.training.data_settings import DataSettings
from dsv41_jax.training.pipeline import open_pipeline
from dsv41_jax.training.records import Document
from dsv41_jax.training.sources import open_source
from launch import tokenize
from processes import ROOT
from text_model import byte_tokenizer

GOLDEN_CONFIG = Path(__file__).parent / "golden/tinyA_config.json"
TEXTS = ["Hello world.\nA line.", "Überall <eos> 漢字", "the end", "Hello world.\nA line."]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder to work in, with a tokenizer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    byte_tokenizer().save("model/tokenizer.json")
    return tmp_path


def run(*arguments: str, tokenizer: str = "model") -> int:
    return tokenize.main([*arguments, "--out=out", f"--tokenizer={tokenizer}"])


def documents(part: str = "train") -> list[Document]:
    source = open_source(f"out/{part}", 0, part)
    return [source[i] for i in range(len(source))]


def texts(part: str = "train") -> list[str]:
    decode = Tokenizer.from_folder("model").decode
    return [decode(document.token_ids, keep_control=True) for document in documents(part)]


def write_jsonl(file: str, rows: list) -> None:
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_text_files_are_documents_or_split_at_blank_lines(folder):
    Path("in").mkdir()
    for i, text in enumerate(TEXTS[:3]):
        Path(f"in/{i}.txt").write_text(text, encoding="utf-8")
    Path("in/image.png").write_bytes(b"")  # of no known suffix: not taken from a folder
    assert run("in") == 0
    assert texts() == TEXTS[:3]
    Path("one.txt").write_text("\n" + "\n\n \n".join(TEXTS[:3]) + "\n", encoding="utf-8")
    assert run("one.txt", "--split=blank", "--overwrite") == 0
    assert texts() == TEXTS[:3]


def test_jsonl_and_parquet_hold_the_same_documents(folder, capsys):
    rows = [{"body": text, "other": 1} for text in TEXTS]
    write_jsonl("a.jsonl", rows)
    assert run("a.jsonl", "--text_field=body", "--shard_tokens=20") == 0
    assert "out/train: 4 documents" in capsys.readouterr().out
    from_jsonl, manifest = texts(), json.loads(Path("out/manifest.json").read_text())
    pyarrow.parquet.write_table(pyarrow.table({"body": TEXTS}), "a.parquet")
    assert run("a.parquet", "--text_field=body", "--overwrite") == 0
    assert from_jsonl == texts() == TEXTS
    parquet = json.loads(Path("out/manifest.json").read_text())["parts"]["train"]
    train = manifest["parts"]["train"]
    assert train["sha256"] == parquet["sha256"]  # however it is sharded
    assert train["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert train["tokens"] == sum(len(document.token_ids) for document in documents())
    assert len(train["shards"]) == 3 and sum(shard["tokens"] for shard in train["shards"]) == train["tokens"]
    assert manifest["vocab_size"] == byte_tokenizer().get_vocab_size()


def test_prompts_and_responses(folder):
    write_jsonl("a.jsonl", [{"ask": "the", "answer": "end"}, {"ask": "", "answer": "x"}])
    assert run("a.jsonl", "--prompt_field=ask", "--response_field=answer") == 0
    assert texts() == ["theend", "x"]
    assert [document.prompt_length for document in documents()] == [1, 0]


def test_a_share_is_held_out_and_equal_documents_stay_together(folder):
    rows = [{"text": f"document {i % 300}"} for i in range(600)]
    write_jsonl("a.jsonl", rows)
    assert run("a.jsonl", "--held_out=0.2") == 0
    train, held_out = texts(), texts("heldout")
    assert sorted(train + held_out) == sorted(row["text"] for row in rows)
    assert not set(train) & set(held_out)
    assert abs(len(set(held_out)) / 300 - 0.2) < 0.1  # four standard deviations
    write_jsonl("b.jsonl", rows[::-1])
    assert run("b.jsonl", "--held_out=0.2", "--overwrite") == 0
    assert set(texts("heldout")) == set(held_out)


def test_images_become_spans_at_their_markers(folder):
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 90, 3), np.uint8)).save(stream, "PNG")
    image = stream.getvalue()
    Path("a.png").write_bytes(image)
    shutil.copy(GOLDEN_CONFIG, "model/config.json")
    config = ModelConfig.from_json(GOLDEN_CONFIG)
    url = "data:image/png;base64," + base64.b64encode(image).decode()
    rows = [
        {"text": "a<image>b<image>", "image": ["a.png", url]},
        {"text": "the", "image": "a.png"},
        {"text": "an <image>", "image": None},  # no image: the marker is text
    ]
    write_jsonl("a.jsonl", rows)
    assert run("a.jsonl", "--image_field=image") == 0
    _, grid, types = preprocess_image(image, config)
    encode, span = Tokenizer.from_folder("model").encode, [config.image_token_id] * len(types)
    marked, before, without = documents()
    assert marked.token_ids.tolist() == [*encode("a"), *span, *encode("b"), *span]
    assert [(i.start, i.grid, i.encoded) for i in marked.images] == [(1, grid, image), (2 + len(span), grid, image)]
    assert before.token_ids.tolist() == [*span, *encode("the")]
    assert (without.token_ids.tolist(), without.images) == (encode("an <image>"), ())

    token_map = np.arange(config.vocab_size) % config.engram_compressed_vocab_size
    for most, counts in ((2, [2, 1, 0]), (1, [1, 0])):  # where a row takes one image, the first document is left out
        values = {"sources": [{"path": "out/train"}], "batch": 3, "length": 64, "shuffle": False, "epochs": 1}
        made = open_pipeline(DataSettings.of({**values, "images_per_row": most, "open_rows": 3}), config, token_map)
        batch = next(made)
        assert sum((batch["images"]["patch_count"] > 0).sum(axis=1).tolist()) == sum(counts)
        np.testing.assert_array_equal(batch["image_mask"], batch["token_ids"] == config.image_token_id)
        assert made.statistics()["skipped_images"] == 3 - len(counts)
        made.close()

    write_jsonl("a.jsonl", [{"text": "<image><image>", "image": "a.png"}])
    assert run("a.jsonl", "--image_field=image", "--overwrite") == 1
    assert len(documents()) == 3  # what was there stays until the new data are complete


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.txt"], "none.txt: no such file or folder"),
        (["a.bin"], "a.bin: unknown suffix '.bin'; give --kind=text|jsonl|parquet"),
        (["a.bin", "--kind=parquet"], "a.bin: not a Parquet file"),
        (["a.parquet"], r"a.parquet: no column ['text']; it has ['body']"),
        (["empty"], "empty: no file in this folder"),
        (["a.txt", "--tokenizer=empty"], "empty/tokenizer.json: this folder has no tokenizer"),
        (["a.txt", "--text_field=body"], "a text file has no fields"),
        (["a.txt", "--prompt_field=a"], "prompt_field and response_field are needed together"),
        (["a.txt", "--held_out=0.7"], "held_out=0.7: a number from 0 to 0.5"),
        (["bad.txt"], "bad.txt: not UTF-8 text"),
        (["bad.jsonl"], "bad.jsonl:2: not JSON"),
        (["field.jsonl"], "field.jsonl:1: field 'text' must be a string; the fields are ['body']"),
        (["list.jsonl"], "list.jsonl:1: an object is needed, got list"),
        (["a.jsonl", "--image_field=image"], "config.json"),
        (["blank.txt"], "no document for training in 1 files"),
    ],
)
def test_errors_say_what_is_wrong_and_leave_nothing(folder, capsys, arguments, message):
    Path("empty").mkdir()
    for name, content in {
        "a.bin": b"x",
        "a.txt": b"the",
        "bad.txt": b"\xff\xfe",
        "blank.txt": b"",
        "a.jsonl": b"{}",
    }.items():
        Path(name).write_bytes(content)
    Path("bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    Path("field.jsonl").write_text('{"body": "a"}\n')
    Path("list.jsonl").write_text("[1]\n")
    pyarrow.parquet.write_table(pyarrow.table({"body": TEXTS}), "a.parquet")
    assert tokenize.main(["--out=out", "--tokenizer=model", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not Path("out").exists() and not Path(".out.partial").exists()


def test_an_existing_folder_is_kept(folder, capsys):
    Path("a.txt").write_text("the")
    Path("out").mkdir()
    assert run("a.txt") == 1
    assert "out exists; choose another folder, or --overwrite" in capsys.readouterr().err
    assert run("a.txt", "--overwrite") == 1
    assert "is not what this command wrote" in capsys.readouterr().err
    assert list(Path("out").iterdir()) == []


def test_parquet_without_pyarrow_is_explained(folder, monkeypatch):
    Path("a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'dsv41-jax\[parquet\]'"):
        corpus_inputs.find_files(["a.parquet"], corpus_inputs.InputSettings())


def test_the_standard_library_still_finds_its_own_tokenize():
    code = "import sys; sys.path.insert(0, 'launch'); import inspect, tokenize; tokenize.generate_tokens; tokenize.open"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True)
