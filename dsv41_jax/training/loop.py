"""The training loop of one stage: progress, log, evaluation, checkpoints; a rerun goes on where it stopped."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from dsv41_jax.training.checkpoint import Checkpoints
from dsv41_jax.training.step import TrainState

StepFunction = Callable[[TrainState, dict], tuple[TrainState, dict]]


class Log:
    """Appends one JSON object a line to a file."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __call__(self, **values: object) -> None:
        rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rounded) + "\n")


def run_stage(
    name: str,
    state: TrainState,
    steps: int,
    step_at: Callable[[int], StepFunction],
    batch_at: Callable[[int], dict],
    checkpoints: Checkpoints,
    log: Log,
    rate_at: Callable[[int], float],
    evaluate: Callable[[TrainState, int], dict] | None = None,
    log_every: int = 20,
    save_seconds: float = 300.0,
) -> TrainState:
    """Run a stage up to `steps`, from its newest checkpoint on.

    Args:
        name: of the stage, for the log.
        state: state at step 0.
        step_at: the step function to use at a step. batch_at: the batch of a step.
        rate_at: learning rate of a step, for the log.
        evaluate: (state, step) -> values to log, called before each timed save and at the end.

    Raises:
        SystemExit(143): after a save, when the process got SIGTERM.
    """
    state = checkpoints.restore(state)
    # Committed to where it is, as a step returns it: otherwise the second step would be compiled anew.
    state = jax.tree.map(lambda x: jax.device_put(x, x.sharding), state)
    stopped: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    saved = logged = time.monotonic()
    start = int(state.step)
    since = start

    def save() -> None:
        if evaluate is not None:
            log(stage=name, step=int(state.step), **evaluate(state, int(state.step)))
        checkpoints.save(state)

    try:
        with tqdm(total=steps, initial=start, desc=name, mininterval=5.0) as bar:
            for step in range(start, steps):
                batch = batch_at(step)
                state, metrics = step_at(step)(state, batch)
                bar.update()
                if (step + 1) % log_every == 0 or step + 1 == steps:
                    values = {k: float(v) for k, v in jax.device_get(metrics).items()}
                    if not all(np.isfinite(v) for v in values.values()):
                        raise FloatingPointError(f"{name}: step {step + 1} is not finite: {values}")
                    now = time.monotonic()
                    speed = (step + 1 - since) * batch["token_ids"].size / (now - logged)
                    logged, since = now, step + 1
                    log(stage=name, step=step + 1, **values, rate=float(rate_at(step)), tokens_per_s=round(speed))
                    bar.set_postfix(loss=round(values.get("nats", values.get("loss", 0.0)), 3), tok_s=round(speed))
                if stopped:
                    jax.block_until_ready(state)
                    checkpoints.save(state)
                    raise SystemExit(143)
                if time.monotonic() - saved > save_seconds:
                    save()
                    saved = logged = time.monotonic()
                    since = step + 1
        if start < steps:
            save()
    finally:
        signal.signal(signal.SIGTERM, before)
    return state
