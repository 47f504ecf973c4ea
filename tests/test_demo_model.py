"""The demo model in the package: what it is, that it speaks, also in commands and notebooks, and (slow) how well."""

from __future__ import annotations

import importlib.resources
import json
import re
from pathlib import Path

import pytest

import dsv41_jax as ds
from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_map import Mode, layer_map
from launch import generate
from launch.eval_demo import accepted_drafts, held_out_bits, held_out_contexts

FOLDER = Path(str(importlib.resources.files("dsv41_jax"))) / "demo_model"
NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
COMMON = set("the of and to in that he is his for it with as not be they him this unto shall god lord we a i".split())


@pytest.fixture(scope="module")
def demo() -> ds.Model:
    return ds.load("demo")


@pytest.fixture(scope="module")
def held_out(golden: Path) -> Path:
    return golden / "demo_heldout"


def test_files_fit_into_twelve_megabytes():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 12_000_000
    assert (FOLDER / "tokenizer.json").is_file() and (FOLDER / "train_log.jsonl").is_file()


def test_every_mechanism_is_on():
    config = ModelConfig.from_json(FOLDER)
    shares = layer_map(config)
    for side in ("encoder", "decoder"):
        assert {Mode.FULL, Mode.REINDEX, Mode.REUSE} <= {share.mode for share in shares if share.side == side}
    assert {share.pool for share in shares} >= {"builds", "searches"}
    assert config.candidate_topk_blocks * config.candidate_block_size < 256  # so the pool restricts a prompt of 256
    assert len(config.engram_layer_ids) == 2 and config.hc_mult == 4 and config.n_draft == 1
    assert config.n_routed_experts == 8 and config.num_experts_per_tok == 2


def test_it_writes_english(demo: ds.Model):
    text = demo.generate("The Lord is", max_new_tokens=40, temperature=0)
    words = re.findall(r"[a-z]+", text.lower())
    assert len(words) >= 15
    assert sum(word in COMMON for word in words) > len(words) / 4


def test_the_readme_command_prints_the_continuation(demo: ds.Model, capsys, monkeypatch):
    def load(*arguments, **options):
        assert arguments == ("demo", None)
        assert options == {"numerics": "released", "engram": "device", "implementation": "auto"}
        return demo

    monkeypatch.setattr(ds, "load", load)
    generate.main(["--prompt", "The Lord is", "--max_new_tokens", "8", "--temperature", "0"])
    assert (
        capsys.readouterr().out == "The Lord is" + demo.generate("The Lord is", max_new_tokens=8, temperature=0) + "\n"
    )


def test_the_command_answers_a_chat(demo: ds.Model, capsys, monkeypatch):
    """No chat is in the demo's training text, so it answers with a sermon; the way there and back is the same."""
    monkeypatch.setattr(ds, "load", lambda name, mesh, **_: demo)
    options = {"max_new_tokens": 9, "temperature": 0.7, "min_p": 0.1, "seed": 3, "stop": ["."]}
    flags = ["--max_new_tokens=9", "--temperature=0.7", "--min_p=0.1", "--seed=3", "--stop=."]
    for thinking in ("none", "7"):
        generate.main(["--chat", "--prompt", "Who is the Lord?", "--thinking", thinking, *flags])
        printed, reasoning = capsys.readouterr()
        effort = thinking if thinking == "none" else int(thinking)
        message = demo.chat([{"role": "user", "content": "Who is the Lord?"}], effort, **options)
        assert message.content + message.reasoning and "<" not in message.content + message.reasoning
        assert printed == message.content + "\n" and reasoning.endswith("\n" + message.reasoning)
        assert message.usage["reasoning_tokens"] == (0 if thinking == "none" else 9)
    with pytest.raises(SystemExit, match="generate: temperature=-1.0: a number from 0"):
        generate.main(["--prompt", "x", "--temperature=-1"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, capsys):
    """From top to bottom, as it stands."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells), "commit it without outputs"
    scope: dict = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), str(path), "exec"), scope)
    printed = capsys.readouterr().out
    assert "tokens in the cache" in printed and "�" not in printed
    assert len(printed.split()) > 40  # text came out, not only tables


@pytest.mark.slow
def test_held_out_bits_per_byte(held_out: Path):
    exact = held_out_bits(ds.load("demo", numerics="float32"), held_out)
    released = held_out_bits(ds.load("demo"), held_out)
    assert exact < 2.0
    assert released == pytest.approx(exact, rel=0.03)


@pytest.mark.slow
def test_drafts_are_accepted(demo: ds.Model, held_out: Path):
    mean, shares = accepted_drafts(demo, held_out_contexts(held_out, rows=8, length=96), new_tokens=48)
    assert mean >= 1.5, shares
