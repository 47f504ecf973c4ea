"""`bench.py train`: a training step beside a plain `optax.adamw` loop over the same model without quantisation, and the
parts that make the difference."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from tqdm import tqdm

from dsv41_jax import compile_cache, model
from dsv41_jax.benchmarks.machine import machine
from dsv41_jax.checkpoint.open_folder import open_folder
from dsv41_jax.checkpoint.released import load_params
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_hash import EngramHasher
from dsv41_jax.forward_options import ForwardOptions
from dsv41_jax.load import token_map_of
from dsv41_jax.model_folder import find_folder
from dsv41_jax.numerics import FLOAT32, QUANTIZED_TRAINING, Numerics
from dsv41_jax.training.objective import Losses, Objective
from dsv41_jax.training.optimizer import make_optimizer
from dsv41_jax.training.optimizer_settings import OptimizerSettings
from dsv41_jax.training.schedule import Schedule
from dsv41_jax.training.state import split, trained_parts
from dsv41_jax.training.step import Trainer
from dsv41_jax.training.token_loss import summed_nats


@dataclasses.dataclass
class Case:
    """One thing measured: `run` does it once and waits for the result."""

    name: str
    run: Callable[[], None]
    seconds: list[float] = dataclasses.field(default_factory=list)


def random_batch(config: ModelConfig, token_map: np.ndarray, rows: int, length: int) -> dict:
    """Rows of random tokens, one sample each."""
    ids = np.random.default_rng(0).integers(8, config.vocab_size, (rows, length + 1)).astype(np.int32)
    found, _ = EngramHasher(config, token_map)(ids[:, :-1])
    return {
        "token_ids": ids[:, :-1],
        "targets": ids[:, 1:],
        "segment_ids": np.zeros((rows, length), np.int32),
        "weights": np.ones((rows, length), np.float32),
        "memory": {f"l{layer}": found[i] for i, layer in enumerate(config.engram_layer_ids)},
    }


def plain_loss(config: ModelConfig, params: dict, batch: dict) -> Array:
    """Mean next-token loss in float32; tables are parameters like all others."""
    hidden, _ = model.forward(
        config, FLOAT32, params, batch["token_ids"], batch["memory"], batch["segment_ids"], options=ForwardOptions()
    )
    nats = summed_nats(config, FLOAT32, params, hidden, batch["targets"], batch["weights"])
    return nats / jnp.sum(batch["weights"])


class Stepping:
    """A step function with its state, which it is given back each time."""

    def __init__(self, step: Callable[..., tuple[Any, Any]], state: Any, batch: dict):
        self.step, self.state, self.batch = step, state, batch

    def __call__(self) -> None:
        self.state, found = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, found))


def plain_case(config: ModelConfig, params: dict, batch: dict, rows_at_once: int) -> Case:
    """The loop that anyone would write: value_and_grad in parts of the batch, `optax.adamw`."""
    optimizer = optax.adamw(1e-3)
    params = {name: part for name, part in params.items() if name != "mtp"}

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: tuple, batch: dict) -> tuple[tuple, Array]:
        params, moments = state
        parts = jax.tree.map(lambda x: x.reshape(-1, rows_at_once, *x.shape[1:]), batch)

        def add(total: dict, part: dict) -> tuple[dict, Array]:
            loss, gradients = jax.value_and_grad(functools.partial(plain_loss, config))(params, part)
            return jax.tree.map(jnp.add, total, gradients), loss

        gradients, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), jnp.mean(losses)

    params = jax.tree.map(jnp.copy, params)
    return Case("plain float32 loop, optax.adamw", Stepping(step, (params, optimizer.init(params)), batch))


def trainer_of(config: ModelConfig, params: dict, parts: int, numerics: Numerics, index_loss: str) -> Trainer:
    losses = Losses(config, numerics, ForwardOptions(index_loss=index_loss), Objective(), "backbone", parts)
    settings = OptimizerSettings(schedule_unit="steps", decay_start=10_000, decay_end=20_000, clip_norm=1.0)
    names = trained_parts(params, "backbone", images=False)
    return Trainer(losses, settings, Schedule.of(settings, 1), names)


def step_case(name: str, trainer: Trainer, params: dict, batch: dict) -> Case:
    state = trainer.new_state(jax.tree.map(jnp.copy, params), 0)
    return Case(name, Stepping(trainer.step(), state, batch))


def optimizer_case(trainer: Trainer, params: dict) -> Case:
    """Muon, dense Sinkhorn and AdamW on gradients that are there."""
    trained, _, _ = split(params, trainer.parts)
    optimizer = make_optimizer(trainer.settings, trainer.config, trainer.schedule)
    gradients = jax.tree.map(lambda x: 1e-3 * jnp.ones_like(x) + x, trained)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: tuple, gradients: dict) -> tuple[tuple, None]:
        trained, moments = state
        updates, moments = optimizer.update(gradients, moments, trained, step=jnp.int32(5))
        return (optax.apply_updates(trained, updates), moments), None

    state = (jax.tree.map(jnp.copy, trained), optimizer.init(trained))
    return Case("of it the dense optimizer (Muon, Sinkhorn, AdamW)", Stepping(step, state, gradients))


def train(flags: argparse.Namespace) -> None:
    """The measurement that the flags ask for, printed."""
    compile_cache.enable()
    facts = machine()
    folder = find_folder(flags.model, None)
    source = open_folder(folder)
    config, params = source.config, load_params(source, FLOAT32)
    batch = random_batch(config, token_map_of(folder), flags.rows, flags.length)
    at_once = flags.rows // flags.parts
    ours = functools.partial(trainer_of, config, params, flags.parts)
    cases = [
        plain_case(config, params, batch, at_once),
        step_case("step: float32, no index loss", ours(FLOAT32, "none"), params, batch),
        step_case("step: quantised, no index loss", ours(QUANTIZED_TRAINING, "none"), params, batch),
        step_case("step: quantised, index loss", ours(QUANTIZED_TRAINING, "selected"), params, batch),
        optimizer_case(ours(FLOAT32, "none"), params),
    ]
    with tqdm(total=len(cases) * (flags.repeats + 1), desc="compiling") as bar:
        for repeat in range(flags.repeats + 1):
            for case in cases:
                start = time.perf_counter()
                case.run()
                if repeat:
                    case.seconds.append(time.perf_counter() - start)
                bar.update()
            bar.set_description("measuring")
    facts["load_after"] = round(os.getloadavg()[0], 2)
    tokens, base = flags.rows * flags.length, statistics.median(cases[0].seconds)
    rows = [
        {
            "what": case.name,
            "seconds": statistics.median(case.seconds),
            "fastest": min(case.seconds),
            "tokens_per_second": tokens / statistics.median(case.seconds),
            "times_plain": statistics.median(case.seconds) / base,
        }
        for case in cases
    ]
    if flags.json:
        print(json.dumps({"machine": facts, "tokens": tokens, "results": rows}, indent=1))
        return
    print(", ".join(f"{name}: {value}" for name, value in facts.items()))
    print(f"{flags.model}: {tokens} tokens a step in {flags.parts} parts, median of {flags.repeats}")
    print("| | seconds (fastest) | tokens/s | times the plain loop |\n|---|---|---|---|")
    for row in rows:
        line = "| {what} | {seconds:.2f} ({fastest:.2f}) | {tokens_per_second:.0f} | {times_plain:.2f} |"
        print(line.format(**row))


def add_command(commands: argparse._SubParsersAction) -> None:
    """The subcommand and its flags."""
    one = commands.add_parser("train", help="a training step by parts, beside a plain optax.adamw loop")
    one.set_defaults(run=train)
    one.add_argument("--model", default="demo", help='"demo" or a folder that ds.load takes (default: demo)')
    one.add_argument("--rows", type=int, default=64, help="rows of a step (default: 64)")
    one.add_argument("--length", type=int, default=256, help="tokens of a row (default: 256)")
    one.add_argument("--parts", type=int, default=4, help="parts of a step whose gradients are summed (default: 4)")
    one.add_argument("--repeats", type=int, default=3, help="times each thing is measured (default: 3)")
    one.add_argument("--json", action="store_true", help="print JSON instead of a table")
