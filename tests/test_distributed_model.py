"""Two processes, and four, compute what one does: text, and a training step."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax.checkpoint.names import flatten
from processes import ROOT, Run, free_coordinator, start
from spread_training import make_params, numbers, windows
from text_model import write_text_model
from training_run import tiny_trainer


def text_of(tmp_path: Path, model: str, prompt: str, processes: int, devices: int, *flags: str) -> str:
    """launch/generate.py in several processes prints, once, the text of one. Returns what the first one notes."""
    where = free_coordinator()
    common = [f"--model={model}", "--numerics=float32", "--temperature=0", "--max_new_tokens=6", f"--prompt={prompt}"]
    command = [str(ROOT / "launch/generate.py"), f"--coordinator={where}", f"--processes={processes}"]
    commands = [[*command, f"--process={i}", *common, *flags] for i in range(processes)]
    with Run(commands, tmp_path, devices) as run:
        ended = run.all_well(240)
    expected = ds.load(model, numerics="float32").generate(prompt, max_new_tokens=6, temperature=0)
    assert ended[0].out.endswith(prompt + expected + "\n")  # before it stands what the library that connects CPUs says
    assert not any(prompt in each.out or expected in each.out for each in ended[1:])
    assert f"on {processes * devices} x cpu" in ended[0].err
    assert f"loading {model}" in ended[0].err and f"loading {model}" not in ended[1].err
    return ended[0].err


def small_models_text(tmp_path: Path, processes: int, devices: int, mesh: str, place: str) -> None:
    write_text_model(tmp_path / "model", o_groups=2)
    prompt = "The harbour lay still; seven boats, two buoys, gulls, a jetty. " + string.ascii_uppercase
    notes = text_of(
        tmp_path, str(tmp_path / "model"), prompt, processes, devices, f"--mesh={mesh}", f"--engram={place}"
    )
    # A prompt of two blocks: rows of the second were read while the first was computed.
    ahead = re.findall(r"Engram layer \d: [\d,]+ lookups at [\d,]+/s, (\d+) of \d+ rows read ahead", notes)
    assert len(ahead) == (0 if place == "device" else 3) and "0" not in ahead


def test_two_processes_write_the_text_of_one(tmp_path):
    """The tensor group lies across the processes; each owns half of the rows of the Engram tables."""
    small_models_text(tmp_path, 2, 1, "1x1x2", "mmap")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["device", "host"])
def test_four_processes_write_the_text_of_one(tmp_path, place):
    small_models_text(tmp_path, 4, 2, "2x2x2", place)


@pytest.mark.slow
def test_two_processes_write_the_demo_models_text(tmp_path):
    text_of(tmp_path, "demo", "The harbour", 2, 1, "--mesh=2x1x1", "--engram=mmap")


SCRIPT = """
import sys
from dsv41_jax import compile_cache, distributed, sharding
compile_cache.enable()
from spread_training import train
with distributed.initialize(*sys.argv[1:2], *map(int, sys.argv[2:4])) as here:
    train(sharding.Layout.parse(sys.argv[4]).mesh(), sys.argv[5] if here.index == 0 else None)
"""


def trained_like_one(tmp_path: Path, processes: int, devices: int, mesh: str) -> None:
    """Two training steps: the losses and the norms of the gradients, and the parameters after them."""
    result = tmp_path / "result.npz"
    with start(SCRIPT, processes, tmp_path, devices, [mesh, str(result)]) as run:
        run.all_well(240)
    found = dict(np.load(result))
    metrics = json.loads(str(found.pop("metrics")))

    trainer = tiny_trainer()
    state = trainer.new_state(jax.tree.map(jnp.asarray, make_params()), 0)
    step, expected = trainer.step(), []
    for i in range(2):
        state, own = step(state, windows(i).arrays())
        expected.append(numbers(own))
    for got, want in zip(metrics, expected, strict=True):
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert got[name] == pytest.approx(value, rel=1e-4), name
    assert len(found) == len(list(flatten(state.params)))
    for path, value in flatten(state.params):
        got = found[".".join(path)][tuple(slice(0, n) for n in value.shape)]  # experts and tables may be padded
        np.testing.assert_allclose(got, value, atol=2e-5, rtol=0, err_msg=".".join(path))


def test_two_processes_train_like_one(tmp_path):
    trained_like_one(tmp_path, 2, 2, "2x1x2")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["4x1x1", "1x2x2"])
def test_four_processes_train_like_one(tmp_path, mesh):
    trained_like_one(tmp_path, 4, 1, mesh)
