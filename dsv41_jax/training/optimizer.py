"""The optimizer of a run: the report's rule for each group of parameters, one schedule for all.

Of the parameters without the Engram tables, whose gradient is a few rows: those are `sinkhorn.update_rows`'s.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from dsv41_jax.checkpoint.names import flatten, nest
from dsv41_jax.config import ModelConfig
from dsv41_jax.training.muon import scale_by_muon
from dsv41_jax.training.optimizer_settings import OptimizerSettings
from dsv41_jax.training.rules import TITLES, Rule, check_patterns, labels, rule_of, slices_of
from dsv41_jax.training.schedule import Schedule
from dsv41_jax.training.sinkhorn import scale_by_sinkhorn, sum_duplicates


def make_optimizer(
    settings: OptimizerSettings, config: ModelConfig, schedule: Schedule
) -> optax.GradientTransformationExtraArgs:
    """`update(gradients, state, params, step=...)` gives what to add to the parameters and the new state.

    `step` (int32, steps done before) sets the rate and whether the vision encoder trains. Gradients are taken as they
    are: see `clip_factor`. What is kept of a parameter has its path and its shape, so that it lies where it lies.

    Raises:
        ValueError: a pattern of `settings.adamw` matches nothing. From `init` and `update`: no rule, or an Engram table
            among the parameters.
    """
    check_patterns(config, settings)

    def group(rule: Rule) -> optax.GradientTransformationExtraArgs:
        parts = [_direction(rule.kind, settings, config)]
        if decay := rule.decay(settings):
            parts.append(optax.add_decayed_weights(decay))
        parts.append(_times_rate(rule.rate(settings), schedule))
        whole = optax.chain(*parts)
        return _from_decay_on(whole, schedule) if rule.waits else whole

    rules = [Rule(kind, waits) for kind in TITLES if kind not in ("table", "frozen") for waits in (False, True)]
    groups = {rule.label: group(rule) for rule in rules} | {"frozen": optax.set_to_zero()}

    def dense_labels(params: dict) -> dict:
        tables = [".".join(path) for path, label in flatten(labels(params, settings)) if label == "table"]
        if tables:
            raise ValueError(f"params.{tables[0]}: leave Engram tables out, sinkhorn.update_rows trains them")
        return labels(params, settings)

    return optax.partition(groups, dense_labels)


def _direction(kind: str, settings: OptimizerSettings, config: ModelConfig) -> optax.GradientTransformation:
    """The rule of a kind without rate and decay."""
    if kind == "muon":
        return scale_by_muon(settings, lambda name: slices_of(name, config, settings))
    if kind == "sinkhorn":
        return scale_by_sinkhorn(settings)
    return optax.scale_by_adam(settings.adam_momentum, settings.adam_second_momentum, settings.epsilon)


def _times_rate(factor: float, schedule: Schedule) -> optax.GradientTransformationExtraArgs:
    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, *, step: Array, **_):
        rate = -factor * schedule(step)
        return jax.tree.map(lambda u: rate * u, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _from_decay_on(
    inner: optax.GradientTransformationExtraArgs, schedule: Schedule
) -> optax.GradientTransformationExtraArgs:
    """Nothing changes, and nothing is computed, before the rate begins to decay."""

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, *, step: Array, **_):
        if not jax.tree.leaves(updates):
            return updates, state
        return lax.cond(
            schedule.decays(step),
            lambda: inner.update(updates, state, params, step=step),
            lambda: (jax.tree.map(jnp.zeros_like, updates), state),
        )

    return optax.GradientTransformationExtraArgs(inner.init, update)


def trained_gradients(gradients: dict, settings: OptimizerSettings, schedule: Schedule, step: Array) -> dict:
    """Gradients with zeros for what does not train at this step, which then does not count in the norm."""

    def kept(path: tuple[str, ...], gradient: Array) -> Array:
        rule = rule_of(".".join(path), settings)
        if rule.kind == "frozen":
            return jnp.zeros_like(gradient)
        return jnp.where(schedule.decays(step), gradient, 0) if rule.waits else gradient

    return nest({path: kept(path, gradient) for path, gradient in flatten(gradients)})


def global_norm(gradients: dict, sparse: Sequence[tuple[Array, Array, int]] = ()) -> Array:
    """The norm of all gradients together, float32.

    Args:
        gradients: a tree.
        sparse: of each Engram table (row ids int32 [n], their gradients [n, width], rows of the table). Gradients of
            the same row are summed first, as the table's dense gradient would have them.
    """
    leaves = jax.tree.leaves(gradients) + [sum_duplicates(*table)[1] for table in sparse]
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in leaves))


def clip_factor(norm: Array, settings: OptimizerSettings) -> Array | float:
    """What to multiply all gradients by so that their norm is at most `settings.clip_norm`; 1 where it is None."""
    if settings.clip_norm is None:
        return 1.0
    return jnp.minimum(1.0, settings.clip_norm / jnp.maximum(norm, settings.epsilon))
