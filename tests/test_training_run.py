"""Whole runs of the tiny model: resume bit for bit after any end, damaged checkpoints, logs, evaluation, export."""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax import distributed
from dsv41_jax.checkpoint.names import flatten
from dsv41_jax.numerics import FLOAT32
from dsv41_jax.sharding import ShardingError
from dsv41_jax.training import run as training
from dsv41_jax.training.checkpoint import Checkpoints
from dsv41_jax.training.evaluation import Evaluation
from dsv41_jax.training.log import Log, read_log
from dsv41_jax.training.loop import Loop
from dsv41_jax.training.pipeline import open_pipeline
from dsv41_jax.training.shards import own_shard
from dsv41_jax.training.train_settings import TrainSettings
from processes import Run, free_coordinator
from tiny_training import tiny_training_config
from training_run import values, write_inputs

CONFIG = tiny_training_config()
CHILD = Path(__file__).with_name("training_run.py")
STEPS = 8
PLAIN = {"numerics": "float32", "index_loss": "none"}


def train(folder: Path, **changes) -> None:
    training.train(TrainSettings.of(values(folder, **changes)), distributed.here())


def final(folder: Path, run: str = "run", **changes):
    """State, data position and step of a run's newest checkpoint."""
    settings = TrainSettings.of(values(folder, run=str(folder / run), **changes))
    start = training.find_start(settings)
    trainer = training.trainer_of(settings, start, None)
    checkpoints = Checkpoints(folder / run / "checkpoints")
    found = checkpoints.restore(trainer.abstract_state(start.shapes(None)))
    checkpoints.close()
    return found


def assert_same(got, want) -> None:
    jax.tree.map(np.testing.assert_array_equal, got[0], want[0])
    assert got[1:] == want[1:]


def losses(folder: Path, run: str = "run") -> dict[int, tuple[float, float]]:
    lines = [line for line in read_log(folder / run / "train_log.jsonl") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})  # each step once
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder with inputs and `whole`, a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("training")
    write_inputs(folder)
    train(folder, run=str(folder / "whole"), evaluation={"sources": [{"path": str(folder / "heldout.npy")}]})
    return folder


def child(folder: Path, run: str, **changes) -> subprocess.Popen:
    settings = json.dumps(values(folder, run=str(folder / run), **changes))
    return subprocess.Popen(
        [sys.executable, str(CHILD), settings], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def kill_when(process: subprocess.Popen, ready, number: int) -> str:
    """Send a signal once `ready()`; returns what it printed."""
    while process.poll() is None and not ready():
        time.sleep(0.002)
    if process.poll() is None:
        process.send_signal(number)
    return process.communicate(timeout=120)[0]


def logged(folder: Path, run: str) -> int:
    """The last step in a run's log."""
    path = folder / run / "train_log.jsonl"
    return max((line["step"] for line in read_log(path)), default=0) if path.is_file() else 0


def test_a_killed_run_goes_on_bit_for_bit(whole):
    """SIGKILL after the third step, whatever it does then; then SIGTERM, which saves; then to the end."""
    kill_when(child(whole, "killed"), lambda: logged(whole, "killed") >= 3, signal.SIGKILL)
    assert 3 <= logged(whole, "killed") < STEPS
    output = kill_when(child(whole, "killed"), lambda: logged(whole, "killed") >= 5, signal.SIGTERM)
    if "stopped after step" not in output:  # it may have come too late
        assert logged(whole, "killed") == STEPS, output
    train(whole, run=str(whole / "killed"))
    assert_same(final(whole, "killed"), final(whole, "whole"))
    assert losses(whole, "killed") == losses(whole, "whole")


@pytest.mark.slow
def test_twenty_kills_at_random(whole):
    """At random moments of a longer run, which writes a checkpoint every step in the background; every third time while
    one is being written.
    """
    changes = {"steps": 60, "checkpoint": {"every_steps": 1}, "log_every": 1}
    train(whole, run=str(whole / "long"), **changes)
    generator, checkpoints, begun = random.Random(0), whole / "random" / "checkpoints", 0

    def unfinished() -> list[Path]:
        return list(checkpoints.glob("*.orbax-checkpoint-tmp*"))

    for number in range(20):
        wanted, delay = logged(whole, "random") + generator.randrange(1, 4), generator.random() * 0.1

        def ready(wanted=wanted, delay=delay, writing=number % 3 == 0) -> bool:
            if logged(whole, "random") < wanted:
                return False
            if writing:
                return bool(unfinished())
            time.sleep(delay)  # in the middle of whatever follows a step
            return True

        kill_when(child(whole, "random", **changes), ready, signal.SIGKILL)
        begun += bool(unfinished())
        assert logged(whole, "random") < 60
    assert begun >= 3
    train(whole, run=str(whole / "random"), **changes)
    assert not unfinished()
    assert_same(final(whole, "random", **changes), final(whole, "long", **changes))
    assert losses(whole, "random") == losses(whole, "long")


@pytest.mark.parametrize("how", ["flipped bit", "short file", "missing file"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(whole, caplog, how):
    name = how.replace(" ", "_")
    if not (whole / name).exists():
        subprocess.run(["cp", "-r", str(whole / "whole"), str(whole / name)], check=True)
    newest = whole / name / "checkpoints" / str(STEPS)
    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    if how == "flipped bit":
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    elif how == "short file":
        largest.write_bytes(content[: len(content) // 2])
    else:
        largest.unlink()
    with caplog.at_level("WARNING"):
        train(whole, run=str(whole / name))
    assert f"checkpoint of step {STEPS} is not whole" in caplog.text and largest.name in caplog.text
    assert (whole / name / "checkpoints" / f"damaged-{STEPS}").is_dir()
    assert_same(final(whole, name), final(whole, "whole"))
    assert losses(whole, name) == losses(whole, "whole")


def test_what_cannot_be_read_for_another_reason_stays(whole, monkeypatch):
    subprocess.run(["cp", "-r", str(whole / "whole"), str(whole / "unread")], check=True)

    def out_of_memory(*arguments, **more):
        raise MemoryError("out of memory")

    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.restore", out_of_memory)
    with pytest.raises(ValueError, match=f"/{STEPS}: its files are as they were written, .* out of memory"):
        train(whole, run=str(whole / "unread"))
    assert not list((whole / "unread" / "checkpoints").glob("damaged-*"))


def test_what_a_killed_run_began_to_write_is_removed(whole):
    subprocess.run(["cp", "-r", str(whole / "whole"), str(whole / "begun")], check=True)
    checkpoints = whole / "begun" / "checkpoints"
    (checkpoints / "9.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    train(whole, run=str(whole / "begun"))
    assert sorted(int(path.name) for path in checkpoints.iterdir()) == [4, 6, 8]


def test_an_export_changes_nothing_in_the_run(whole):
    def files() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}

    run = whole / "exported"
    subprocess.run(["cp", "-r", str(whole / "whole"), str(run)], check=True)
    newest = max((run / "checkpoints" / str(STEPS)).rglob("*"), key=lambda path: path.stat().st_size)
    newest.write_bytes(newest.read_bytes()[:-1])
    (run / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()
    before = files()
    settings = TrainSettings.of(values(whole, run=str(run), export=str(whole / "exported model")))
    training.export_newest(settings, distributed.here())
    assert files() == before and (run / "checkpoints" / "9.orbax-checkpoint-tmp").is_dir()
    assert ds.load(whole / "exported model", numerics="float32").config == CONFIG
    nowhere = TrainSettings.of(values(whole, run=str(whole / "typo"), export=str(whole / "none")))
    with pytest.raises(ValueError, match="no checkpoint to export"):
        training.export_newest(nowhere, distributed.here())
    assert not (whole / "typo").exists()


def test_no_whole_checkpoint_is_an_error(whole):
    subprocess.run(["cp", "-r", str(whole / "whole"), str(whole / "all damaged")], check=True)
    for sums in (whole / "all damaged").rglob("sums.0.json"):
        sums.write_text(sums.read_text().replace('"files": {', '"files": {"state/gone": "1 00000000", '))
    with pytest.raises(ValueError, match="no checkpoint is whole .step 8: state/gone is missing; step 6"):
        train(whole, run=str(whole / "all damaged"))


def test_a_run_of_other_settings_is_refused(whole):
    with pytest.raises(ValueError, match="holds another model, stage or optimizer .* differing: momentum.l0|opt_state"):
        train(whole, run=str(whole / "whole"), stage="drafter")
    with pytest.raises(ValueError, match="length"):
        train(whole, run=str(whole / "whole"), data={"length": 16})
    assert json.loads((whole / "whole" / "settings.json").read_text())["stage"] == "backbone"


def test_settings_cut_short_do_not_stop_a_run(whole, caplog):
    subprocess.run(["cp", "-r", str(whole / "whole"), str(whole / "cut")], check=True)
    path = whole / "cut" / "settings.json"
    text = path.read_text()
    path.write_text(text[:100])
    with caplog.at_level("WARNING"):
        train(whole, run=str(whole / "cut"))
    assert "settings.json cannot be read" in caplog.text
    written, was = json.loads(path.read_text()), json.loads(text)
    assert written.keys() == was.keys() and written["run"] == str(path.parent)


def test_two_runs_do_not_share_a_folder(whole):
    from dsv41_jax.checkpoint.process_lock import hold

    with hold(whole / "whole" / ".lock"), pytest.raises(ValueError, match="another run is at work"):
        train(whole, run=str(whole / "whole"))


def test_the_log_tells_the_run(whole):
    lines = read_log(whole / "whole" / "train_log.jsonl")
    steps = [line for line in lines if line["kind"] == "train"]
    assert len(steps) == STEPS and all(line["dropped"] == 0 for line in steps)
    assert {"nats", "balance", "index", "load_max", "bias_spread", "tokens_per_s", "padding_share"} <= steps[0].keys()
    evaluation = next(line for line in lines if line["kind"] == "evaluation")
    assert evaluation["step"] == STEPS and evaluation["perplexity"] == pytest.approx(
        np.exp(evaluation["nats"]), rel=1e-5
    )


def test_an_evaluation_gives_the_loss_of_the_step_that_follows(whole):
    """Of the same rows, with and without the candidate restriction."""
    params, found = final(whole, "whole")[0].params, []
    held_out = {"sources": [{"path": str(whole / "train.npy")}], "rows": 4, "ced_rows": 0}
    for candidates in (True, False):
        changes = {"candidates": candidates, "data": {"shuffle": False}, "evaluation": held_out, **PLAIN}
        settings = TrainSettings.of(values(whole, **changes))
        start = training.find_start(settings)
        trainer = training.trainer_of(settings, start, None)
        evaluation = Evaluation(settings.evaluation, settings.data, trainer, start.token_map)
        found.append(evaluation(params, FLOAT32)["nats"])
        batch = next(open_pipeline(settings.data, start.config, start.token_map))
        _, metrics = trainer.step()(jax.tree.map(jnp.copy, trainer.new_state(params, 0)), batch)
        assert float(metrics["nats"]) == pytest.approx(found[-1], rel=1e-6)
    assert abs(found[0] - found[1]) > 1e-5


def test_a_log_is_cut_where_a_run_goes_on(tmp_path):
    log = Log(tmp_path, 0)
    for step in (1, 2, 3):
        log("train", step, loss=float(step))
    with log.path.open("a") as file:
        file.write('{"kind": "tra')
    Log(tmp_path, 2)("train", 3, loss=9.0)
    assert [(line["step"], line["loss"]) for line in read_log(log.path)] == [(1, 1.0), (2, 2.0), (3, 9.0)]


def test_the_first_loss_is_the_models_own_and_the_export_is_served(whole):
    """Released format in, its exact loss, some steps, released format out: loads, generates, has the trained loss."""
    folder = whole / "round"
    changes = {"model": "demo", "tokenizer": None}
    data = {"sources": [{"path": str(whole / "train.npy")}], "batch": 2, "length": 32}
    first = {"model": f"fresh:{whole / 'model.json'}", "export": str(folder / "first"), "run": str(folder / "a")}
    train(whole, **first, steps=2)
    del changes
    loaded = ds.load(folder / "first", numerics="float32")
    again = {"model": str(folder / "first"), "tokenizer": None, "run": str(folder / "b"), "data": data}
    train(whole, **again, steps=3, numerics="float32", export=str(folder / "second"), index_loss="none")
    settings = TrainSettings.of(values(whole, **again))
    start = training.find_start(settings)
    batch = next(open_pipeline(settings.data, start.config, start.token_map))
    line = read_log(folder / "b" / "train_log.jsonl")[0]
    inside = _mean_loss(loaded, batch)
    assert line["nats"] == pytest.approx(inside, abs=2e-5)  # the log has seven digits
    trained = ds.load(folder / "second", numerics="float32")
    assert _mean_loss(trained, batch) < inside
    del again["run"]
    state = final(whole, "round/b", **again, steps=3, numerics="float32", index_loss="none")[0]
    _assert_stored(trained.params, state.params)
    logits, cache = trained.prefill(batch["token_ids"][:, :12])
    assert np.isfinite(logits).all() and np.isfinite(trained.decode(cache, np.asarray([5, 6]))[0]).all()


def _mean_loss(model: ds.Model, batch: dict) -> float:
    """By the public `Model.loss`, sample by sample, of what the batch weighs."""
    total = count = 0.0
    for ids, targets, segments, weights in zip(
        *(batch[name] for name in ("token_ids", "targets", "segment_ids", "weights")), strict=True
    ):
        for segment in np.unique(segments[weights > 0]):
            own = np.flatnonzero((segments == segment) & (weights > 0))
            whole = np.append(ids[own], targets[own[-1]])[None]
            total, count = total + float(model.loss(whole)) * len(own), count + len(own)
    return total / count


def _assert_stored(stored: dict, masters: dict) -> None:
    """The exported weights are the masters, as near as their formats come."""
    exact = dict(flatten(masters))
    for path, leaf in flatten(stored):
        wanted = np.asarray(exact[path])
        error = np.abs(np.asarray(leaf) - wanted).max() / max(np.abs(wanted).max(), 1e-9)
        assert error <= 0.2001, path  # FP4 has 4 and 6 and nothing between: a largest value of 5 is off by a fifth


@pytest.mark.slow
def test_two_processes_resume_bit_for_bit(whole, tmp_path):
    """Both are killed; rerun they end as a run of two that nothing disturbed."""

    def commands(run: str) -> list[list[str]]:
        folders = {"run": str(whole / run), "export": str(whole / f"{run} exported")}
        settings = json.dumps(values(whole, **folders, mesh="2x1x1"))
        where = free_coordinator()
        return [[str(CHILD), settings, where, "2", str(i)] for i in range(2)]

    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    with Run(commands("two"), tmp_path / "a", 1) as run:
        run.all_well(300)
    with Run(commands("two killed"), tmp_path / "b", 1) as run:
        deadline = time.monotonic() + 240
        while logged(whole, "two killed") < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        for number in range(2):
            run.kill(number)
    assert 5 <= logged(whole, "two killed") < STEPS
    with Run(commands("two killed"), tmp_path / "c", 1) as run:
        run.all_well(300)
    assert_same(final(whole, "two killed"), final(whole, "two"))
    assert losses(whole, "two killed") == losses(whole, "two")
    one = TrainSettings.of(values(whole, run=str(whole / "two"), export=str(whole / "two by one")))
    training.export_newest(one, distributed.here())
    for file in (whole / "two by one").glob("*.safetensors"):
        assert file.read_bytes() == (whole / "two exported" / file.name).read_bytes()


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_after_the_same_step(whole, tmp_path):
    settings = json.dumps(values(whole, run=str(whole / "stopped"), steps=10_000, mesh="2x1x1", **PLAIN))
    where = free_coordinator()
    with Run([[str(CHILD), settings, where, "2", str(i)] for i in range(2)], tmp_path, 1) as run:
        deadline = time.monotonic() + 240
        while logged(whole, "stopped") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        run.kill(1, signal.SIGTERM)
        ended = [run.wait(i, 120) for i in range(2)]
    assert [each.code for each in ended] == [143, 143], ended
    _, position, step = final(whole, "stopped", **PLAIN)
    assert step == logged(whole, "stopped") == position["batches"]


def test_settings_are_checked_before_anything_heavy(whole, tmp_path):
    def refused(message: str, **changes) -> None:
        with pytest.raises((ValueError, TypeError, OSError), match=message):
            train(whole, **{"run": str(tmp_path / "none"), **changes})

    refused("unknown settings .'stepz'", stepz=3)
    refused("steps=0: a number from 1", steps=0)
    refused("stage='all' is unknown", stage="all")
    refused("numerics='fp8' is unknown", numerics="fp8")
    refused("no quantisation point is called nothing", unquantized=["nothing"])
    refused("no quantisation point is called nothing", unquantized=["nothing"], quantize_from=100)
    refused("accumulate=3: data.batch=4", accumulate=3)
    refused("tokenizer='nowhere': no such folder", tokenizer="nowhere")
    refused("there is no file", model="fresh:nowhere.json")
    refused("data: unknown settings", data={"lenght": 3})
    refused("optimizer: .*decay_end", optimizer={"decay_end": 1})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    refused("already exists", export=str(tmp_path / "full"))
    assert not (tmp_path / "none").exists()


def test_each_part_of_a_batch_must_be_shared_out():
    mesh = jax.sharding.AbstractMesh((2, 1, 2), ("data", "context", "tensor"))
    with pytest.raises(ShardingError, match="data.batch=8: a multiple of the 4 devices .* times accumulate=4, is"):
        own_shard(mesh, 8, 4)


def test_parts_of_a_batch_add_up(whole):
    train(whole, run=str(whole / "parts"), accumulate=2, numerics="float32", index_loss="none", steps=1)
    train(whole, run=str(whole / "one"), numerics="float32", index_loss="none", steps=1)
    one, parts = losses(whole, "one")[1], losses(whole, "parts")[1]
    np.testing.assert_allclose(parts, one, rtol=2e-5)


@pytest.mark.parametrize("stage", ["drafter", "joint"])
def test_other_stages_train_their_part(whole, stage):
    start = {"numerics": "float32", "steps": 1, "index_loss": "none"}
    train(whole, run=str(whole / stage), stage=stage, **start)
    settings = TrainSettings.of(values(whole, stage=stage, **start))
    before = dict(flatten(training.find_start(settings).params(settings.seed, None)))
    after = dict(flatten(final(whole, stage, stage=stage, **start)[0].params))
    moved = {path[0] for path, leaf in after.items() if np.any(np.asarray(leaf) != np.asarray(before[path]))}
    assert "mtp" in moved and ({"layers", "embed", "engram"} <= moved) == (stage == "joint")
    if stage == "drafter":
        assert moved == {"mtp"}


def test_a_loss_that_is_not_finite_stops_the_run(whole, monkeypatch):
    def broken(config, key):
        params = init(config, key)
        params["norm"]["weight"] = jnp.full_like(params["norm"]["weight"], jnp.nan)
        return params

    from dsv41_jax.training import start

    init = start.init_params
    monkeypatch.setattr(start, "init_params", broken)
    with pytest.raises(FloatingPointError, match="step 1: the loss is not finite"):
        train(whole, run=str(whole / "broken"), numerics="float32", steps=2, index_loss="none")


def _break_from(monkeypatch, step: int) -> None:
    """The loss of steps after so many is not finite: a batch comes with a weight that is none."""
    batch_of, count = Loop._batch, itertools.count()

    def broken(self):
        batch = batch_of(self)
        if next(count) >= step:
            batch["weights"] = np.full_like(batch["weights"], np.nan)
        return batch

    monkeypatch.setattr(Loop, "_batch", broken)


def test_no_checkpoint_has_a_step_that_is_not_finite(whole, monkeypatch):
    """The broken step has no line in the log, but a checkpoint is due after it."""
    _break_from(monkeypatch, 3)
    with pytest.raises(FloatingPointError, match="step 4: the loss is not finite"):
        train(whole, run=str(whole / "not saved"), log_every=10, **PLAIN)
    assert sorted(path.name for path in (whole / "not saved" / "checkpoints").iterdir()) == ["2"]


def test_a_run_that_only_leaves_steps_out_ends(whole, monkeypatch):
    _break_from(monkeypatch, 0)
    optimizer = {"skip_spikes": True, "spike_limit": 2}
    with pytest.raises(FloatingPointError, match="step 3: the loss is not finite, and so in 3 steps left out in a row"):
        train(whole, run=str(whole / "left out"), optimizer=optimizer, **PLAIN)


def test_a_run_ends_with_its_data(whole, caplog):
    """As after the last step: evaluated, saved, exported; run again it is the same."""
    run, heldout = whole / "ended", {"sources": [{"path": str(whole / "heldout.npy")}], "every_steps": 1000}
    short = {"steps": 1000, "data": {"epochs": 1}, "checkpoint": {"every_steps": 1000}, "evaluation": heldout, **PLAIN}
    for number in (1, 2):
        with caplog.at_level("WARNING"):
            train(whole, run=str(run), export=str(whole / f"ended {number}"), **short)
        assert "the data end after step" in caplog.text
        lines = read_log(run / "train_log.jsonl")
        done = max(line["step"] for line in lines)
        assert 10 < done < 40 and [line["step"] for line in lines if line["kind"] == "evaluation"] == [done]
        assert [path.name for path in (run / "checkpoints").iterdir()] == [str(done)]
        assert (whole / f"ended {number}" / "config.json").is_file()
