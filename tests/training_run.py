"""A training run of the tiny model in a folder of its own: data, settings, and a child process that can be killed.

As a program, `python training_run.py FOLDER JSON` trains with the settings in JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from dsv41_jax.forward_options import ForwardOptions
from dsv41_jax.numerics import FLOAT32, Numerics
from dsv41_jax.training.objective import Losses, Objective
from dsv41_jax.training.optimizer_settings import OptimizerSettings
from dsv41_jax.training.schedule import Schedule
from dsv41_jax.training.state import trained_parts
from dsv41_jax.training.step import Trainer
from dsv41_jax.training.train_settings import TrainSettings
from tiny_training import VOCAB, tiny_params, tiny_training_config

OPTIMIZER = {
    "peak_rate": 3e-3,
    "final_rate": 3e-4,
    "warmup_steps": 2,
    "schedule_unit": "steps",
    "decay_start": 6,
    "decay_end": 12,
}


def write_inputs(folder: Path) -> None:
    """model.json, the token map, and BOS-separated documents to train on and to hold out."""
    config = tiny_training_config()
    (folder / "text").mkdir(parents=True)
    (folder / "model.json").write_text(json.dumps(config.to_json()), encoding="utf-8")
    np.save(folder / "text" / "token_map.npy", np.arange(VOCAB))
    generator = np.random.default_rng(0)

    def documents(count: int) -> np.ndarray:
        parts = []
        for _ in range(count):
            length = int(generator.integers(12, 60))
            first = int(generator.integers(4, VOCAB - 2))
            steps = generator.integers(1, 3, length)
            ids = 4 + (first - 4 + np.cumsum(steps)) % (VOCAB - 6)
            parts.append(np.concatenate([[config.bos_token_id], ids, [config.eos_token_id]]))
        return np.concatenate(parts).astype(np.uint16)

    np.save(folder / "train.npy", documents(80))
    np.save(folder / "heldout.npy", documents(12))


def values(folder: Path, **changes) -> dict:
    """Settings as a mapping; `changes` of the top level, `data` and others merged."""
    base = {
        "model": f"fresh:{folder / 'model.json'}",
        "tokenizer": str(folder / "text"),
        "run": str(folder / "run"),
        "steps": 8,
        "numerics": "quantized",
        "objective": {"anchors": 3},
        "optimizer": OPTIMIZER,
        "data": {"sources": [{"path": str(folder / "train.npy")}], "batch": 4, "length": 32},
        "checkpoint": {"every_steps": 2, "keep": 3},
        "log_every": 1,
        "tensorboard": False,
    }
    for name, value in changes.items():
        base[name] = {**base[name], **value} if isinstance(base.get(name), dict) else value
    return base


def tiny_trainer(mesh=None, numerics: Numerics = FLOAT32, stage: str = "backbone", **optimizer) -> Trainer:
    """A trainer of the tiny model without a run around it."""
    config = tiny_training_config()
    settings = OptimizerSettings(**{**OPTIMIZER, **optimizer})
    losses = Losses(config, numerics, ForwardOptions(index_loss="selected"), Objective(anchors=3), stage)
    parts = trained_parts(tiny_params(config), stage, images=False)
    return Trainer(losses, settings, Schedule.of(settings, 1), parts, mesh)


if __name__ == "__main__":
    from dsv41_jax import compile_cache, distributed
    from dsv41_jax.training.run import train

    compile_cache.enable()
    where = sys.argv[2:]  # coordinator, processes, process
    with distributed.initialize(*where[:1], *map(int, where[1:])) if where else distributed.initialize(None, 1) as here:
        train(TrainSettings.of(json.loads(sys.argv[1])), here)
