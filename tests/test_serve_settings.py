"""What a server refuses before it loads anything, and what it says of its memory."""

from __future__ import annotations

import dataclasses
import re
import socket
import subprocess
import sys

import jax
import pytest

import dsv41_jax as ds
from dsv41_jax.serving import memory
from dsv41_jax.serving.executor import Executor
from dsv41_jax.serving.server import planned
from dsv41_jax.serving.settings import ServeSettings
from launch import serve
from processes import ROOT


def test_flags_change_the_config():
    flags = serve.parse(
        ["--config", str(ROOT / "configs/serve_demo.py"), "--rows=8", "--cors_origins=http://a,http://b"]
    )
    settings = serve.settings_of(flags)
    assert (settings.rows, settings.decode_rows, settings.model) == (8, 8, "demo")
    assert settings.cors_origins == ("http://a", "http://b")
    assert serve.settings_of(serve.parse(["--image_urls=true"])).image_urls is True


def test_every_flag_has_a_help_line():
    said = subprocess.run(
        [sys.executable, str(ROOT / "launch/serve.py"), "--help"], capture_output=True, text=True, check=True
    ).stdout
    flat = " ".join(said.split())
    for field in dataclasses.fields(ServeSettings):
        assert f"--{field.name} " in flat and field.metadata["help"] in flat, field.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows=0"], r"rows=0: a number from 1"),
        (["--max_stall_ms=nan"], r"max_stall_ms=nan"),
        (["--port=70000"], r"port=70000"),
        (["--config=nowhere.py"], r"nowhere.py: no such file"),
        ([f"--config={ROOT / 'launch/serve.py'}"], r"has no get_config"),
    ],
)
def test_wrong_flags_end_it_with_a_message(arguments, message):
    with pytest.raises(SystemExit, match=message):
        serve.main(arguments)


def test_a_config_with_a_misspelled_setting(tmp_path):
    file = tmp_path / "config.py"
    file.write_text("def get_config():\n    return {'rosw': 4}\n")
    with pytest.raises(SystemExit, match=r"unknown settings \['rosw'\]; known are"):
        serve.main([f"--config={file}"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_len": 9000}, "positions for 8192 tokens"),
        ({"model": "no/such/folder"}, "no such folder"),
        ({"numerics": "float16"}, "float16"),
        ({"implementation": "tpu"}, "tpu"),
        ({"rows": 4096, "max_len": 8192, "pages": 10**9}, r"does not fit its devices:\n.*page pools"),
    ],
)
def test_what_does_not_suit_the_model_or_the_machine(settings, message):
    with pytest.raises((ValueError, OSError), match=re.compile(message, re.DOTALL)):
        planned(ServeSettings(**settings), None)


def test_the_plan_counts_every_buffer():
    """Against the arrays themselves."""
    settings = ServeSettings(rows=4, max_len=1024, pages=10)
    size, plan = planned(settings, None)
    model = ds.load("demo")
    executor = Executor(model._runner, size)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((model.params, executor.arrays)))
    names = ("weights", "page pools", "windows and compressor tails", "page tables")
    assert sum(plan.parts[name] for name in names) == held
    assert plan.total > held and "together, a device" in str(plan)
    memory.check_memory(dataclasses.replace(plan, limit=plan.total))
    with pytest.raises(ValueError, match="does not fit"):
        memory.check_memory(dataclasses.replace(plan, limit=plan.total - 1))


def test_a_port_in_use_is_said_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, str(ROOT / "launch/serve.py"), f"--port={port}", "--rows=2", "--max_len=256"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 1
    assert f"serve: cannot listen at 127.0.0.1 port {port}" in done.stderr and "Traceback" not in done.stderr
    assert "compiling" not in done.stderr and "weights" in done.stderr
