"""Training steps: one of the backbone, one of the drafter on the frozen backbone; and the router-bias rule."""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from dsv41_jax import model
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import Numerics
from dsv41_jax.training.draft_rounds import DraftRounds
from dsv41_jax.training.index_loss import index_loss
from dsv41_jax.training.loss import draft_loss, token_nats, weighted_mean

BIAS_SPEED = 0.001  # of the report, for a long run; a short one must balance sooner
INDEX_ROWS = 2  # rows of a batch that train the indexers, which are few parameters


@flax.struct.dataclass
class TrainState:
    """params: what is trained. opt_state: optax. step: int32, steps done. key: PRNG key data, uint32."""

    params: dict
    opt_state: optax.OptState
    step: Array
    key: Array


def new_state(params: dict, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """State before the first step."""
    key = jax.random.key_data(jax.random.key(seed))
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32), key)


def _norm(tree: dict) -> Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def expert_loads(experts: dict[int, Array], n_experts: int) -> Array:
    """Tokens of each expert, float32 [layers, E], from the chosen experts {layer: int32 [B, T, k]}."""
    return jnp.stack([jnp.bincount(experts[layer].reshape(-1), length=n_experts) for layer in sorted(experts)]) * 1.0


def balanced_bias(bias: Array, loads: Array, speed: float = BIAS_SPEED) -> Array:
    """The text bias [layers, E] after a step: up where an expert had less than the mean load, down where more."""
    return bias + speed * jnp.sign(jnp.mean(loads, axis=-1, keepdims=True) - loads)


def backbone_loss(config: ModelConfig, numerics: Numerics, params: dict, batch: dict) -> tuple[Array, dict]:
    """Next-token loss plus the indexer's, and notes {nats, index, loads}."""
    hidden, notes = model.forward(config, numerics, params, batch["token_ids"], batch["memory"], batch["segment_ids"])
    nats = token_nats(model.head(config, numerics, params, hidden), batch["targets"])
    language = weighted_mean(nats, batch["weights"])
    inputs = {layer: y[:INDEX_ROWS] for layer, y in notes["attn_in"].items()}
    index = index_loss(config, numerics, params, inputs, batch["segment_ids"][:INDEX_ROWS])
    loads = expert_loads(notes["experts"], config.n_routed_experts)
    return language + index, {"nats": language, "index": index, "loads": loads}


def backbone_step(
    config: ModelConfig, numerics: Numerics, optimizer: optax.GradientTransformation, bias_speed: float = BIAS_SPEED
) -> Callable[[TrainState, dict], tuple[TrainState, dict]]:
    """A jitted step (state, batch) -> (state, metrics); the state is donated. `mtp` is no part of the parameters."""

    def step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        value_and_grad = jax.value_and_grad(lambda p: backbone_loss(config, numerics, p, batch), has_aux=True)
        (_, notes), grads = value_and_grad(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        loads = notes.pop("loads")
        gate = params["layers"]["ffn"]["gate"]
        gate["bias"] = balanced_bias(gate["bias"], loads, bias_speed)
        peaks = jnp.max(loads, axis=-1) / jnp.mean(loads, axis=-1)  # [layers], 1 when the load is even
        metrics = {**notes, "grad_norm": _norm(grads)}
        metrics |= {"load_max": jnp.max(peaks), "load_mean": jnp.mean(peaks)}
        return state.replace(params=params, opt_state=opt_state, step=state.step + 1), metrics

    return jax.jit(step, donate_argnums=0)


def drafter_loss(
    config: ModelConfig, numerics: Numerics, trained: dict, backbone: dict, batch: dict, anchors: Array
) -> tuple[Array, dict]:
    """DSpark's loss at anchors int32 [B, A]; `trained` is {"mtp": ...}, the backbone is frozen."""
    params = {**backbone, **trained}
    hidden, notes = model.forward(config, numerics, backbone, batch["token_ids"], batch["memory"], batch["segment_ids"])
    hidden, taps = jax.lax.stop_gradient((hidden, notes["taps"]))
    rounds = DraftRounds(config, batch, anchors)
    logits, confidence = rounds.draft(numerics, params, taps)
    target_logits = model.head(config, numerics, backbone, rounds.take(hidden, rounds.places))
    return draft_loss(logits, target_logits, rounds.targets, confidence, rounds.weights)


def drafter_step(
    config: ModelConfig, numerics: Numerics, optimizer: optax.GradientTransformation, anchors_per_row: int
) -> Callable[[TrainState, dict, dict], tuple[TrainState, dict]]:
    """A jitted step (state, backbone, batch) -> (state, metrics) on random anchors; the state is donated."""

    def step(state: TrainState, backbone: dict, batch: dict) -> tuple[TrainState, dict]:
        b, t = batch["token_ids"].shape
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        anchors = jax.random.randint(key, (b, anchors_per_row), 1, t - config.dspark_block_size + 1)
        value_and_grad = jax.value_and_grad(
            lambda p: drafter_loss(config, numerics, p, backbone, batch, anchors), has_aux=True
        )
        (loss, parts), grads = value_and_grad(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, **parts, "grad_norm": _norm(grads)}
        return state.replace(params=params, opt_state=opt_state, step=state.step + 1), metrics

    return jax.jit(step, donate_argnums=0)
