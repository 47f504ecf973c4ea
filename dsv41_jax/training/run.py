"""A training run: from settings to a finished model. Rerun with the same settings it goes on where it stopped."""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from dsv41_jax import distributed, sharding
from dsv41_jax.checkpoint.new_folder import check_free
from dsv41_jax.checkpoint.process_lock import LockedError, hold
from dsv41_jax.mesh_layout import Layout
from dsv41_jax.training.checkpoint import Checkpoints, remove_unfinished
from dsv41_jax.training.evaluation import Evaluation
from dsv41_jax.training.export import export
from dsv41_jax.training.log import Log
from dsv41_jax.training.loop import Loop
from dsv41_jax.training.pipeline import Pipeline, open_pipeline
from dsv41_jax.training.rules import format_rules, rules_table
from dsv41_jax.training.shards import own_shard
from dsv41_jax.training.start import Start, find_start
from dsv41_jax.training.state import TrainState
from dsv41_jax.training.step import Trainer, make_trainer
from dsv41_jax.training.train_settings import TrainSettings

_log = logging.getLogger(__name__)

SETTINGS_FILE = "settings.json"
CHECKPOINTS = "checkpoints"


def train(settings: TrainSettings, processes: distributed.Processes) -> None:
    """Train, and export if so set. Every process of the run calls it with the same settings.

    Raises:
        ValueError, OSError: before anything heavy: settings that do not fit the model, the mesh, the data or what the
            run's folder holds. FloatingPointError: a loss that is not finite. SystemExit(143): after SIGTERM, with
            everything saved.
    """
    run = Path(settings.run)
    if settings.export is not None:
        complete = (run / CHECKPOINTS / str(settings.steps)).is_dir()
        if complete and (Path(settings.export) / "config.json").is_file():
            print(f"{run}: all {settings.steps} steps are done, and the model is in {settings.export}", flush=True)
            return
        check_free(Path(settings.export))
    start = find_start(settings)
    processes.check_same({"training settings": str(settings), "model": str(start.config)})
    mesh = mesh_of(settings, processes)
    trainer = trainer_of(settings, start, mesh)
    shard, shards = own_shard(mesh, settings.data.batch, settings.accumulate)
    if processes.count > 1 and settings.checkpoint.every_minutes:
        raise ValueError(
            f"checkpoint.every_minutes={settings.checkpoint.every_minutes}: the clocks of several processes differ; "
            "use every_steps"
        )
    first = processes.index == 0
    with _own_folder(run, first), contextlib.ExitStack() as open_things:
        pipeline = open_pipeline(settings.data, start.config, start.token_map, shard=shard, shards=shards)
        open_things.callback(pipeline.close)
        evaluation = None
        if settings.evaluation.sources:
            evaluation = Evaluation(settings.evaluation, settings.data, trainer, start.token_map)
        processes.check_same({"data": pipeline.get_state()})
        if first:
            shapes = start.shapes(mesh)
            trained = {name: shapes[name] for name in trainer.parts}
            print(format_rules(rules_table(trained, start.config, settings.optimizer)), flush=True)
        kept = settings.checkpoint
        if first:
            remove_unfinished(run / CHECKPOINTS)
        checkpoints = Checkpoints(run / CHECKPOINTS, kept.keep, kept.keep_every, kept.background)
        open_things.callback(checkpoints.close)
        state, done = first_state(trainer, start, settings, checkpoints, pipeline)
        if first:  # not before: settings that do not fit the checkpoints are not those of the run
            _write_settings(run, settings)
        log = Log(run, done, settings.tensorboard) if first else None
        if log is not None:
            open_things.callback(log.close)
        state = Loop(settings, trainer, pipeline, checkpoints, log, evaluation).run(state, done)
        if settings.export is not None:
            export(state.params, start, settings.export, run)


def export_newest(settings: TrainSettings, processes: distributed.Processes) -> None:
    """Export the newest whole checkpoint of a run, which may still be going on: nothing in its folder changes.

    Raises:
        ValueError: no export folder is set, or the run has no checkpoint.
    """
    if settings.export is None:
        raise ValueError("export=None: name the folder to write, as --set export=FOLDER")
    check_free(Path(settings.export))
    folder, found = Path(settings.run) / CHECKPOINTS, None
    start = find_start(settings)
    trainer = trainer_of(settings, start, mesh_of(settings, processes))
    if folder.is_dir():
        checkpoints = Checkpoints(folder, background=False, read_only=True)
        found = checkpoints.restore(trainer.abstract_state(start.shapes(trainer.mesh)))
        checkpoints.close()
    if found is None:
        raise ValueError(f"run={settings.run!r}: there is no checkpoint to export")
    export(found[0].params, start, settings.export, settings.run)


def mesh_of(settings: TrainSettings, processes: distributed.Processes) -> Mesh | None:
    """The mesh of all devices that the settings name.

    Raises:
        ValueError: several processes and no mesh, or a mesh that is not of all devices.
    """
    if settings.mesh is None:
        if processes.count > 1:
            raise ValueError("mesh=None: a run of several processes needs a mesh of all devices, DATAxCONTEXTxTENSOR")
        return None
    mesh = Layout.parse(settings.mesh).mesh()
    distributed.connect(mesh)
    return mesh


def trainer_of(settings: TrainSettings, start: Start, mesh: Mesh | None) -> Trainer:
    """What computes the steps of a run; ValueError or ShardingError where settings, model and mesh do not fit."""
    if mesh is not None:
        sharding.check_layout(start.config, sharding.layout_of(mesh))
    return make_trainer(settings, start.config, start.shapes(None), mesh)


def first_state(
    trainer: Trainer, start: Start, settings: TrainSettings, checkpoints: Checkpoints, pipeline: Pipeline
) -> tuple[TrainState, int]:
    """The newest whole checkpoint, to which the pipeline is set; without one, the start. And the steps done."""
    shapes = trainer.abstract_state(start.shapes(trainer.mesh))
    found = checkpoints.restore(shapes)
    if found is None:
        return trainer.new_state(start.params(settings.seed, trainer.mesh), settings.seed), 0
    state, position, done = found
    pipeline.set_state(position)
    _log.info("going on from the checkpoint of step %d", done)
    return state, done


@contextlib.contextmanager
def _own_folder(run: Path, first: bool) -> Iterator[None]:
    """The run's folder, locked by process 0; ValueError: another run is at work in it."""
    run.mkdir(parents=True, exist_ok=True)
    if not first:
        yield
        return
    try:
        with hold(run / ".lock"):
            yield
    except LockedError as error:
        raise ValueError(f"run={str(run)!r}: another run is at work in this folder ({error})") from None


def _write_settings(run: Path, settings: TrainSettings) -> None:
    """Keep the settings beside the checkpoints; what differs from the last time is said."""
    path, now = run / SETTINGS_FILE, json.loads(json.dumps(dataclasses.asdict(settings)))
    if path.is_file():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            _log.warning("%s cannot be read (%s): whether the settings are the same is not known", path, error)
            before = now
        for name, was, value in _differences("", before, now):
            _log.warning("the run goes on with %s=%r; it was %r before", name, value, was)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _differences(prefix: str, before: dict, now: dict) -> Iterator[tuple[str, Any, Any]]:
    for name in now:
        was, value = before.get(name), now[name]
        if isinstance(was, dict) and isinstance(value, dict):
            yield from _differences(f"{prefix}{name}.", was, value)
        elif was != value:
            yield f"{prefix}{name}", was, value
