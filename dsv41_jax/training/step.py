"""Training steps: one of the backbone, one of the drafter on the frozen backbone; and the router-bias rule."""

import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from dsv41_jax import model, sharded_step, sharding
from dsv41_jax.config import ModelConfig
from dsv41_jax.forward_options import ForwardOptions
from dsv41_jax.numerics import Numerics
from dsv41_jax.parallel import ROW_AXES
from dsv41_jax.training.draft_rounds import DraftRounds
from dsv41_jax.training.loss import draft_loss, token_nats

BIAS_SPEED = 0.001  # of the report, for a long run; a short one must balance sooner
OPTIONS = ForwardOptions(index_loss="dense")


@flax.struct.dataclass
class TrainState:
    """params: what is trained. opt_state: optax. step: int32, steps done. key: PRNG key data, uint32."""

    params: dict
    opt_state: optax.OptState
    step: Array
    key: Array


def new_state(params: dict, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh | None = None) -> TrainState:
    """State before the first step; on a mesh, with what the optimizer keeps of a parameter where the parameter is."""

    def make(params: dict) -> TrainState:
        key = jax.random.key_data(jax.random.key(seed))
        return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32), key)

    if mesh is None:
        return make(params)
    return jax.jit(make, out_shardings=state_shardings(params, optimizer, mesh))(params)


def state_shardings(params: dict, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The NamedSharding of every array of a state, from the parameters (or their shapes)."""
    layout = sharding.layout_of(mesh)
    own = sharding.param_specs(params, layout), sharding.optimizer_specs(optimizer, params, layout)
    return sharding.shardings(mesh, TrainState(*own, Spec(), Spec()))


def spread_batch(batch: dict, mesh: Mesh) -> dict:
    """A batch on the devices of a mesh, split by rows. Every process gives the whole of it, and sends its part."""
    where = sharding.shardings(mesh, sharded_step.ROWS)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, where, x.__getitem__), batch)


def _norm(tree: dict) -> Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def expert_loads(experts: dict[int, Array], n_experts: int) -> Array:
    """Tokens of each expert, float32 [layers, E], from the chosen experts {layer: int32 [B, T, k]}."""
    return jnp.stack([jnp.bincount(experts[layer].reshape(-1), length=n_experts) for layer in sorted(experts)]) * 1.0


def balanced_bias(bias: Array, loads: Array, speed: float = BIAS_SPEED) -> Array:
    """The text bias [layers, E] after a step: up where an expert had less than the mean load, down where more."""
    return bias + speed * jnp.sign(jnp.mean(loads, axis=-1, keepdims=True) - loads)


def backbone_loss(
    config: ModelConfig,
    numerics: Numerics,
    params: dict,
    batch: dict,
    total: Callable[[Array], Array] = lambda x: x,
) -> tuple[Array, dict]:
    """Next-token loss plus the indexer's, and notes {nats, index, loads}.

    Of a batch whose rows are split over devices, `total` adds up what the devices have.
    """
    hidden, notes = model.forward(
        config, numerics, params, batch["token_ids"], batch["memory"], batch["segment_ids"], options=OPTIONS
    )
    nats = token_nats(model.head(config, numerics, params, hidden), batch["targets"])
    weights = batch["weights"]
    language = total(jnp.sum(nats * weights)) / jnp.maximum(total(jnp.sum(weights)), 1e-9)
    kl, queries = map(total, notes["index"])
    index = jnp.sum(kl / jnp.maximum(queries, 1))
    loads = total(expert_loads(notes["experts"], config.n_routed_experts))
    return language + index, {"nats": language, "index": index, "loads": loads}


def spread_loss(mesh: Mesh, config: ModelConfig, numerics: Numerics, params: dict, batch: dict) -> tuple[Array, dict]:
    """`backbone_loss` on a mesh, its rows split over the devices that share rows.

    Differentiate this, not what a device does: then the gradients of what is on several devices are added up.
    """
    layout = sharding.layout_of(mesh)
    # Experts are reached by all-gather: the rounds of the all-to-all have no gradient.
    numerics = numerics.spread(sharded_step.parallel_of(mesh, dispatch="gather"))

    def local(params: dict, batch: dict) -> tuple[Array, dict]:
        return backbone_loss(config, numerics, params, batch, lambda x: jax.lax.psum(x, ROW_AXES))

    specs = (sharding.param_specs(params, layout), sharded_step.ROWS)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=Spec(), check_vma=False)(params, batch)


def backbone_step(
    config: ModelConfig,
    numerics: Numerics,
    optimizer: optax.GradientTransformation,
    bias_speed: float = BIAS_SPEED,
    mesh: Mesh | None = None,
) -> Callable[[TrainState, dict], tuple[TrainState, dict]]:
    """A jitted step (state, batch) -> (state, metrics); the state is donated. `mtp` is no part of the parameters.

    On a mesh the state is as `new_state` makes it and the batch as `spread_batch` does; its rows must be a multiple of
    the devices that share rows. The numbers are those of one device, but for the order of sums.
    """
    loss = backbone_loss if mesh is None else functools.partial(spread_loss, mesh)

    def step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        value_and_grad = jax.value_and_grad(lambda p: loss(config, numerics, p, batch), has_aux=True)
        (_, notes), grads = value_and_grad(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        loads = notes.pop("loads")
        gate = params["layers"]["ffn"]["gate"]
        gate["bias"] = balanced_bias(gate["bias"], loads, bias_speed)
        peaks = jnp.max(loads, axis=-1) / jnp.mean(loads, axis=-1)  # [layers], 1 when the load is even
        metrics = {**notes, "grad_norm": _norm(grads)}
        metrics |= {"load_max": jnp.max(peaks), "load_mean": jnp.mean(peaks)}
        state = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
        if mesh is not None:
            state = jax.lax.with_sharding_constraint(state, state_shardings(params, optimizer, mesh))
        return state, metrics

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
