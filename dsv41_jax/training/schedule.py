"""The learning rate over a run: warm-up, constant, cosine, constant (report, training settings)."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from dsv41_jax.training.optimizer_settings import OptimizerSettings


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A rate for every step; the bounds are numbers of steps done, not always whole when they were given in tokens."""

    peak: float
    final: float
    warmup: int
    decay_start: float
    decay_end: float

    @classmethod
    def of(cls, settings: OptimizerSettings, tokens_per_step: int) -> "Schedule":
        """Of settings and the tokens of a batch.

        Raises:
            ValueError: the decay begins before the warm-up is over.
        """
        unit = tokens_per_step if settings.schedule_unit == "tokens" else 1
        start, end = settings.decay_start / unit, settings.decay_end / unit
        if start < settings.warmup_steps:
            raise ValueError(
                f"decay_start={settings.decay_start!r} {settings.schedule_unit}: that is step {start:.0f}, before the "
                f"end of the warm-up, warmup_steps={settings.warmup_steps}"
            )
        return cls(settings.peak_rate, settings.final_rate, settings.warmup_steps, start, end)

    def __call__(self, step: Array | int) -> Array:
        """The rate of the step that follows `step` finished ones, float32. The first step of a warm-up has one part of
        the peak, not 0, and the last has the peak.
        """
        step = jnp.asarray(step, jnp.float32)
        rising = jnp.minimum((step + 1) / max(self.warmup, 1), 1.0)
        fallen = jnp.clip((step - self.decay_start) / max(self.decay_end - self.decay_start, 1e-9), 0.0, 1.0)
        cosine = (1 + jnp.cos(jnp.pi * fallen)) / 2
        return jnp.where(step < self.decay_start, self.peak * rising, self.final + (self.peak - self.final) * cosine)

    def decays(self, step: Array | int) -> Array:
        """Whether the decay has begun, which is when the vision encoder begins to train. bool."""
        return jnp.asarray(step, jnp.float32) >= self.decay_start
