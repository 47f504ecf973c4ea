"""The loop over steps: progress, log, evaluation, checkpoints, and the end, which may come by a signal."""

import logging
import signal
import time
from types import FrameType
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from dsv41_jax.chips import chip_of
from dsv41_jax.model_flops import exact_prefill
from dsv41_jax.training.checkpoint import Checkpoints
from dsv41_jax.training.evaluation import Evaluation
from dsv41_jax.training.log import Log
from dsv41_jax.training.pipeline import Pipeline
from dsv41_jax.training.shards import batch_on_mesh
from dsv41_jax.training.state import TrainState
from dsv41_jax.training.step import Step, Trainer
from dsv41_jax.training.train_settings import TrainSettings

_log = logging.getLogger(__name__)

STOPPED = 143  # exit code after SIGTERM, as a shell reports it


class Loop:
    """Runs a trainer from a state to the last step of the settings.

    Args:
        log: of process 0, None elsewhere. evaluation: None without held-out text.
    """

    def __init__(
        self,
        settings: TrainSettings,
        trainer: Trainer,
        pipeline: Pipeline,
        checkpoints: Checkpoints,
        log: Log | None,
        evaluation: Evaluation | None,
    ):
        self.settings, self.trainer, self.pipeline = settings, trainer, pipeline
        self.checkpoints, self.log, self.evaluation = checkpoints, log, evaluation
        self._steps: dict[Any, Step] = {}
        self._asked_to_stop = False
        self._stopping = False
        self._pending: tuple[int, dict] | None = None
        self._saved_at = self._logged_at = time.monotonic()
        self._logged_step = 0

    def run(self, state: TrainState, done: int) -> TrainState:
        """The state after the last step.

        Raises:
            FloatingPointError: a step's loss or gradient norm is not finite (and spikes are not left out), or so often
                in a row that nothing would follow. No checkpoint has such a step.
            SystemExit: after SIGTERM or SIGINT, once the state is saved.
        """
        settings = self.settings
        # Committed to where it is, as a step returns it: otherwise the second step would be compiled anew.
        state = jax.tree.map(lambda x: jax.device_put(x, x.sharding), state)
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        self._saved_at = self._logged_at = time.monotonic()
        self._logged_step = done
        hidden = self.log is None
        try:
            with tqdm(total=settings.steps, initial=done, desc=settings.stage, disable=hidden, mininterval=5) as bar:
                for step in range(done, settings.steps):
                    batch = self._batch()
                    if batch is None:
                        self._end_of_data(state, step, bar, new=step > done)
                        break
                    state, metrics = self._step_at(step)(state, batch)
                    self._settle(bar)
                    self._pending = (step + 1, metrics)
                    bar.update()
                    self._after_step(state, step + 1, bar)
                self._settle(bar)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self.checkpoints.wait()
        return state

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_stop = True

    def _batch(self) -> dict | None:
        """The next one; None where the last epoch is over, which is after the same step on all processes."""
        batch = next(self.pipeline, None)
        if batch is None or self.trainer.mesh is None:
            return batch
        if jax.process_count() > 1:  # all processes must stop at the same step: the step adds up who was asked to
            batch["stop"] = np.full(len(batch["token_ids"]), self._asked_to_stop, np.int32)
        return batch_on_mesh(batch, self.trainer.mesh)

    def _step_at(self, step: int) -> Step:
        numerics = self.settings.numerics_at(step)
        if numerics not in self._steps:
            self._steps[numerics] = self.trainer.with_numerics(numerics).step()
        return self._steps[numerics]

    def _after_step(self, state: TrainState, done: int, bar: tqdm) -> None:
        kept, evaluated = self.settings.checkpoint, self.settings.evaluation
        last = done == self.settings.steps
        if jax.process_count() == 1 and self._asked_to_stop:
            self._stopping = True
        if self.evaluation is not None and (last or done % evaluated.every_steps == 0):
            self._settle(bar, check=True)
            self._evaluate(state, done)
        due = kept.every_steps > 0 and done % kept.every_steps == 0
        if jax.process_count() == 1 and kept.every_minutes > 0:
            due |= time.monotonic() - self._saved_at > 60 * kept.every_minutes
        if last or due or self._stopping:
            self._save(state, done, bar)
        self.checkpoints.poll()
        if self._stopping and not last:
            self.checkpoints.wait()
            bar.write(f"stopped after step {done}; everything is saved, run the same command to go on")
            raise SystemExit(STOPPED)

    def _save(self, state: TrainState, done: int, bar: tqdm) -> None:
        self._settle(bar, check=True)
        jax.block_until_ready(state)
        self.checkpoints.save(state, self.pipeline.get_state(), done)
        self._saved_at = time.monotonic()

    def _end_of_data(self, state: TrainState, done: int, bar: tqdm, new: bool) -> None:
        """What follows the last step of the settings, sooner. new: this process did steps."""
        settings = self.settings
        _log.warning("the data end after step %d of %d: data.epochs=%d", done, settings.steps, settings.data.epochs)
        self._settle(bar, check=True)
        if self.evaluation is not None and new and done % settings.evaluation.every_steps:
            self._evaluate(state, done)
        self._save(state, done, bar)

    def _settle(self, bar: tqdm, check: bool = False) -> None:
        """Read the numbers of the step before, once: by now the devices have the next one to do. Of a step without a
        line in the log only where they decide something, or to `check` the state before it is saved.
        """
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        logged = step % self.settings.log_every == 0 or step == self.settings.steps
        if check or logged or jax.process_count() > 1:
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
            self._stopping |= values.pop("stop", 0.0) > 0
            self._check_finite(step, values)
            if logged:
                self._report(step, values, bar)

    def _check_finite(self, step: int, values: dict[str, float]) -> None:
        in_a_row, optimizer = values.pop("skipped_in_a_row"), self.trainer.settings
        wrong = [name for name in ("loss", "grad_norm") if not np.isfinite(values[name])]
        if not wrong or (optimizer.skip_spikes and in_a_row <= optimizer.spike_limit):
            return
        again = f", and so in {in_a_row:.0f} steps left out in a row" if optimizer.skip_spikes else ""
        raise FloatingPointError(f"step {step}: the {wrong[0]} is not finite{again}: {values}")

    def _report(self, step: int, values: dict[str, float], bar: tqdm) -> None:
        now = time.monotonic()
        data = self.settings.data
        seconds = max(now - self._logged_at, 1e-9)
        speed = (step - self._logged_step) * data.batch * data.length / seconds
        self._logged_at, self._logged_step = now, step
        values["tokens_per_s"] = speed
        if (used := self._model_flops_utilisation(speed)) is not None:
            values["mfu"] = used
        values["padding_share"] = self.pipeline.statistics()["padding_share"]
        bar.set_postfix(loss=f"{values['loss']:.3f}", tok_s=round(speed), refresh=False)
        if self.log is not None:
            self.log("train", step, **values)

    def _model_flops_utilisation(self, tokens_per_second: float) -> float | None:
        """Share of the devices' bf16 peak that forward and backward pass take (three forwards; nothing recomputed
        counts); None for devices whose peak is not in `chips`.
        """
        devices = [jax.devices()[0]] if self.trainer.mesh is None else list(self.trainer.mesh.devices.flat)
        chip = chip_of(devices[0].device_kind)
        if chip is None:
            return None
        forward = exact_prefill(self.trainer.config, self.settings.data.length)
        return 3 * forward.flops / forward.tokens * tokens_per_second / (chip.bf16 * len(devices))

    def _evaluate(self, state: TrainState, done: int) -> None:
        numbers = self.evaluation(state.params, self.settings.numerics_at(done - 1))
        if self.log is not None:
            self.log("evaluation", done, **numbers)
        self._logged_at, self._logged_step = time.monotonic(), done
