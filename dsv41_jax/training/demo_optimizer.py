"""The optimizer of launch/train_demo.py: Muon for matrices, Adam for the rest, one learning-rate schedule for all."""

import re

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from dsv41_jax.checkpoint.names import flatten, nest

# First match of the dotted path wins. "frozen" leaves get no update from here: the router bias has its own rule.
LABELS = (
    (r"(^|\.)bias(_vl)?$", "frozen"),
    (r"engram\.\w+\.embed\.weight$", "table"),
    (r"^embed\.weight$|^head\.weight$|markov_head\.", "embedding"),
    (r"hc_\w+\.|attn_sink$|[qk]_weight$|(norm|\w+_norm)\.weight$|gate\.weight$|confidence_head|weights_proj", "other"),
    (r"weight$", "matrix"),
)
RATES = {"matrix": 1.0, "embedding": 1.0, "table": 2.0, "other": 1.0}  # times the schedule
MATRIX_DECAY = 0.1
UPDATE_RMS = 0.18


def labels(params: dict) -> dict:
    """The tree of params with a label for each leaf. ValueError for a path that no rule knows."""
    result = {}
    for path, _ in flatten(params):
        name = ".".join(path)
        label = next((label for pattern, label in LABELS if re.search(pattern, name)), None)
        if label is None:
            raise ValueError(f"params.{name}: no optimizer rule matches")
        result[path] = label
    return nest(result)


def _last_two_axes(params: dict) -> dict:
    """Leading axes are stacks of layers and experts: each [out, in] matrix is orthogonalised by itself."""
    return jax.tree.map(lambda w: MuonDimensionNumbers(reduction_axis=w.ndim - 1, output_axis=w.ndim - 2), params)


def _scale_to_rms() -> optax.GradientTransformation:
    """An orthogonal matrix times sqrt(larger side) has RMS 1 at most; see the report's Muon."""

    def update(updates, params=None):
        return jax.tree.map(lambda u: u * (UPDATE_RMS * jnp.sqrt(jnp.float32(max(u.shape[-2:])))), updates)

    return optax.stateless(update)


def learning_rate(peak: float, steps: int, warmup: int, decay_from: int) -> optax.Schedule:
    """Warm-up, constant, then linearly down to a hundredth at the end."""
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.01 * peak, steps - decay_from),
        ],
        [warmup, decay_from],
    )


def make_optimizer(schedule: optax.Schedule) -> optax.GradientTransformation:
    """Gradient clipping at norm 1, then Muon or Adam by `labels`; decay on matrices only."""

    def rate(label: str) -> optax.GradientTransformation:
        return optax.scale_by_learning_rate(lambda step: RATES[label] * schedule(step))

    def adam(label: str) -> optax.GradientTransformation:
        return optax.chain(optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-10), rate(label))

    muon = optax.chain(
        scale_by_muon(weight_dimension_numbers=_last_two_axes),
        _scale_to_rms(),
        optax.add_decayed_weights(MATRIX_DECAY),
        rate("matrix"),
    )
    groups = {"matrix": muon, "frozen": optax.set_to_zero(), **{k: adam(k) for k in ("embedding", "table", "other")}}
    return optax.chain(optax.clip_by_global_norm(1.0), optax.partition(groups, labels))
