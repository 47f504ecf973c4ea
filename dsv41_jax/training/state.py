"""What a training run carries from step to step, and where it lies on a mesh."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from dsv41_jax import sharding
from dsv41_jax.training.spikes import SpikeState, new_spike_state
from dsv41_jax.vision import SPAN_PARAMS

STAGES = ("backbone", "drafter", "joint")


@flax.struct.dataclass
class TrainState:
    """Everything that decides the steps to come, besides the data.

    Attributes:
        params: float32 master weights of the whole model, also of what this stage leaves alone.
        opt_state: of optax, for the trained parameters but the Engram tables.
        momentum: {"l<L>": float32 [rows, width]} of the trained Engram tables.
        spikes: statistics of the losses, see `spikes`.
        step: int32, steps done. key: PRNG key data, uint32.
    """

    params: dict
    opt_state: optax.OptState
    momentum: dict[str, Array]
    spikes: SpikeState
    step: Array
    key: Array


def trained_parts(params: dict, stage: str, images: bool) -> tuple[str, ...]:
    """The top-level parts of a parameter tree that a stage trains.

    Args:
        stage: "backbone" (all but the drafter), "drafter" (only it, on the frozen rest) or "joint" (both; the drafter
            reads the backbone through stopped gradients).
        images: whether the data has images: without them the tower gets no gradient, and decay would only shrink it.

    Raises:
        ValueError: the model has no drafter.
    """
    if stage not in STAGES:
        raise ValueError(f"stage={stage!r} is unknown; choose one of {', '.join(STAGES)}")
    if stage != "backbone" and "mtp" not in params:
        raise ValueError(f"stage={stage!r}: this model has no draft blocks (num_nextn_predict_layers is 0)")
    if stage == "drafter":
        return ("mtp",)
    left_out = set() if stage == "joint" else {"mtp"}
    if not images:
        left_out |= set(SPAN_PARAMS)
    return tuple(name for name in params if name not in left_out)


def split(params: dict, parts: tuple[str, ...]) -> tuple[dict, dict, dict]:
    """A parameter tree as what the dense optimizer trains, Engram tables that are trained, and the rest.

    Tables are {"l<L>": [rows, width]}.
    """
    trained = {name: params[name] for name in parts}
    rest = {name: part for name, part in params.items() if name not in trained}
    tables = {}
    if "engram" in trained:
        tables = {name: layer["embed"]["weight"] for name, layer in trained["engram"].items()}
        trained["engram"] = {
            name: {key: leaf for key, leaf in layer.items() if key != "embed"}
            for name, layer in trained["engram"].items()
        }
    return trained, tables, rest


def merge(trained: dict, tables: dict[str, Array], rest: dict) -> dict:
    """The tree that `split` took apart."""
    params = {**rest, **trained}
    if tables:
        params["engram"] = {
            name: {**params["engram"][name], "embed": {"weight": table}} for name, table in tables.items()
        }
    return params


def new_state(
    params: dict, parts: tuple[str, ...], optimizer: optax.GradientTransformation, seed: int, mesh: Mesh | None = None
) -> TrainState:
    """State before the first step; on a mesh, with what is kept of a parameter where the parameter is."""

    def make(params: dict) -> TrainState:
        trained, tables, _ = split(params, parts)
        return TrainState(
            params=params,
            opt_state=optimizer.init(trained),
            momentum=jax.tree.map(jnp.zeros_like, tables),
            spikes=jax.tree.map(jnp.copy, new_spike_state()),  # buffers of its own, to be donated
            step=jnp.zeros((), jnp.int32),
            key=jax.random.key_data(jax.random.key(seed)),
        )

    if mesh is None:
        return make(params)
    return jax.jit(make, out_shardings=state_shardings(params, parts, optimizer, mesh))(params)


def state_specs(params: dict, parts: tuple[str, ...], optimizer: optax.GradientTransformation, mesh: Mesh) -> Any:
    """PartitionSpecs of a state, from the parameters (or their shapes)."""
    layout = sharding.layout_of(mesh)
    specs = sharding.param_specs(params, layout)
    trained, _, _ = split(params, parts)
    _, tables, _ = split(specs, parts)
    return TrainState(
        params=specs,
        opt_state=sharding.optimizer_specs(optimizer, trained, layout),
        momentum=tables,
        spikes=jax.tree.map(lambda _: Spec(), new_spike_state()),
        step=Spec(),
        key=Spec(),
    )


def state_shardings(params: dict, parts: tuple[str, ...], optimizer: optax.GradientTransformation, mesh: Mesh) -> Any:
    """The NamedSharding of every array of a state."""
    return sharding.shardings(mesh, state_specs(params, parts, optimizer, mesh))
