"""One training step: losses, gradients, the optimizer, Engram tables, router biases; on one device or on a mesh."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from dsv41_jax import sharded_step, sharding
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram import gather_rows
from dsv41_jax.engram_layout import engram_layout
from dsv41_jax.numerics import FLOAT32, Numerics
from dsv41_jax.parallel import ROW_AXES
from dsv41_jax.training.balance import balanced_bias, load_peaks
from dsv41_jax.training.objective import Losses
from dsv41_jax.training.optimizer import clip_factor, global_norm, make_optimizer, trained_gradients
from dsv41_jax.training.optimizer_settings import OptimizerSettings
from dsv41_jax.training.schedule import Schedule
from dsv41_jax.training.spikes import judge, keep
from dsv41_jax.training.state import TrainState, merge, new_state, split, state_shardings, trained_parts
from dsv41_jax.training.table_rounds import fetch_rows
from dsv41_jax.training.table_step import gathers, sparse_norm, table_gradients, table_spec, update_table
from dsv41_jax.training.train_settings import TrainSettings

Step = Callable[[TrainState, dict], tuple[TrainState, dict]]


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The step of a run and what it is made of.

    Attributes:
        losses: what is minimised; its numerics are those of one device.
        settings, schedule: of the optimizer.
        parts: of the parameter tree that are trained, see `state.trained_parts`.
        mesh: None for one device.
    """

    losses: Losses
    settings: OptimizerSettings
    schedule: Schedule
    parts: tuple[str, ...]
    mesh: Mesh | None = None

    @property
    def config(self) -> ModelConfig:
        return self.losses.config

    @property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        return make_optimizer(self.settings, self.config, self.schedule)

    def new_state(self, params: dict, seed: int) -> TrainState:
        """The state before the first step, from float32 parameters (on a mesh: where `sharding` places them)."""
        return new_state(params, self.parts, self.optimizer, seed, self.mesh)

    def abstract_state(self, shapes: dict) -> TrainState:
        """The state as ShapeDtypeStructs, from those of the parameters; on a mesh with shardings."""
        state = jax.eval_shape(lambda params: new_state(params, self.parts, self.optimizer, 0), shapes)
        if self.mesh is None:
            return state
        where = state_shardings(shapes, self.parts, self.optimizer, self.mesh)
        return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, where)

    def with_numerics(self, numerics: Numerics) -> "Trainer":
        """The same, computed in other numerics."""
        return dataclasses.replace(self, losses=dataclasses.replace(self.losses, numerics=numerics))

    def step(self) -> Step:
        """A jitted step (state, batch) -> (state, metrics); the state is donated.

        The batch is as `batches` makes it, its rows on a mesh split by `shards.batch_on_mesh`. Metrics are numbers.
        """
        return jax.jit(self._step, donate_argnums=0)

    def _step(self, state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        batch = dict(batch)
        stop = batch.pop("stop", None)
        trained, tables, rest = split(state.params, self.parts)
        gradients, by_row, report = self._gradients(state, batch)
        gradients = trained_gradients(gradients, self.settings, self.schedule, state.step)
        dense = jnp.square(global_norm(gradients))
        norm = jnp.sqrt(dense + sum(sparse_norm(self, name, *rows) for name, rows in by_row.items()))
        taken, spikes = judge(state.spikes, report["loss"], norm, self.settings)
        factor = clip_factor(norm, self.settings)
        scaled = jax.tree.map(lambda g: factor * g, gradients) if self.settings.clip_norm is not None else gradients
        updates, opt_state = self.optimizer.update(scaled, state.opt_state, trained, step=state.step)
        moved = optax.apply_updates(trained, updates)
        loads, draft_loads = report.pop("loads", None), report.pop("draft_loads", None)
        speed = self.losses.objective.bias_speed
        if loads is not None:
            moved["layers"]["ffn"]["gate"] = balanced_bias(moved["layers"]["ffn"]["gate"], loads, speed)
        if draft_loads is not None:
            drafter = moved["mtp"]["layers"]["ffn"]
            drafter["gate"] = balanced_bias(drafter["gate"], draft_loads, speed)
        if self.settings.skip_spikes:
            moved, opt_state = keep(taken, (moved, opt_state), (trained, state.opt_state))
        momentum = dict(state.momentum)
        rate = self.schedule(state.step)
        for name, (ids, rows) in by_row.items():
            tables[name], momentum[name] = update_table(
                self, name, tables[name], momentum[name], ids, factor * rows, rate, taken
            )
        new = TrainState(
            params=merge(moved, tables, rest),
            opt_state=opt_state,
            momentum=momentum,
            spikes=spikes,
            step=state.step + 1,
            key=state.key,
        )
        if self.mesh is not None:
            where = state_shardings(state.params, self.parts, self.optimizer, self.mesh)
            new = jax.lax.with_sharding_constraint(new, where)
        metrics = {**report, "grad_norm": norm, "rate": rate}
        metrics |= {"skipped": spikes.skipped, "skipped_in_a_row": spikes.in_a_row}
        if stop is not None:
            metrics["stop"] = jnp.sum(stop)
        if draft_loads is not None:
            metrics["draft_load_max"] = jnp.max(load_peaks(draft_loads))
        if loads is not None:
            metrics |= _balance_report(loads, new.params["layers"]["ffn"]["gate"])
        return new, metrics

    def _gradients(
        self, state: TrainState, batch: dict
    ) -> tuple[dict, dict[str, tuple[Array, Array]], dict[str, Array]]:
        """Gradients of what the dense optimizer trains; of each trained table row ids [n] and gradients [n, width]; the
        report of the losses. Parts of the rows one after another, if so set.
        """
        trained, _, rest = split(state.params, self.parts)
        rest = without_tables(rest)
        weight = jnp.maximum(jnp.sum(batch["weights"]), 1e-9)
        batch = {**batch, "anchors": self._anchors(state, batch)}

        def part(batch: dict) -> tuple[dict, dict[str, Array], dict[str, Array]]:
            anchors = batch.pop("anchors")
            rows = self.look_up(state.params, batch["memory"])

            def loss(trained: dict, rows: dict[str, Array]) -> tuple[Array, dict]:
                return self._spread_losses(trained, rest, rows, batch, anchors, weight)

            if "engram" not in self.parts:
                (_, report), gradients = jax.value_and_grad(loss, has_aux=True)(trained, rows)
                return gradients, {}, report
            (_, report), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(trained, rows)
            return *gradients, report

        if self.losses.parts == 1:
            gradients, by_row, report = part(dict(batch))
        else:
            gradients, by_row, report = self._in_parts(part, trained, batch)
        return gradients, table_gradients(batch["memory"], by_row, self.losses.parts), report

    def _in_parts(self, part: Callable, trained: dict, batch: dict) -> tuple[dict, dict[str, Array], dict[str, Array]]:
        """`part` on every n-th row in turn; gradients are summed, losses too where they are shares of the whole."""
        split_rows = jax.tree.map(lambda x: rows_in_parts(x, self.losses.parts), batch)

        def body(total: dict, batch: dict) -> tuple[dict, tuple]:
            gradients, by_row, report = part(dict(batch))
            return jax.tree.map(jnp.add, total, gradients), (by_row, report)

        gradients, (by_row, reports) = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, trained), split_rows)
        return gradients, by_row, jax.tree.map(lambda x: jnp.sum(x, axis=0), reports)

    def _anchors(self, state: TrainState, batch: dict) -> Array:
        """Random places where drafts begin, int32 [B, A]: the same on any mesh."""
        b, t = batch["token_ids"].shape
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        last = max(2, t - self.config.dspark_block_size + 1) if self.config.n_draft else 2
        return jax.random.randint(key, (b, self.losses.objective.anchors), 1, last)

    def _spread_losses(
        self, trained: dict, rest: dict, rows: dict, batch: dict, anchors: Array, weight: Array
    ) -> tuple[Array, dict]:
        """The losses, on a mesh inside `shard_map` with the rows split over the devices that share rows.

        Differentiate this, not what a device does: then the gradients of what is on several devices are added up.
        """
        if self.mesh is None:
            return self.losses({**rest, **trained}, rows, batch, anchors, weight)
        mesh, layout = self.mesh, sharding.layout_of(self.mesh)
        numerics = self.losses.numerics.spread(self.parallel)
        losses = dataclasses.replace(self.losses, numerics=numerics, total=lambda x: jax.lax.psum(x, ROW_AXES))

        def local(trained: dict, rest: dict, rows: dict, batch: dict, anchors: Array, weight: Array):
            return losses({**rest, **trained}, rows, batch, anchors, weight)

        params = (sharding.param_specs(trained, layout), sharding.param_specs(rest, layout))
        by_rows = (sharded_step.ROWS,) * 3
        spread = jax.shard_map(
            local, mesh=mesh, in_specs=(*params, *by_rows, Spec()), out_specs=Spec(), check_vma=False
        )
        return spread(trained, rest, rows, batch, anchors, weight)

    @property
    def parallel(self) -> sharded_step.Parallel:
        """How the losses run on the mesh."""
        return sharded_step.parallel_of(self.mesh, dispatch=DISPATCH)

    def look_up(self, params: dict, memory: dict[str, Array]) -> dict[str, Array]:
        """Engram rows {"l<L>": float32 [B, T, columns, width]} as the tables hold them, by number [B, T, columns]."""
        return {name: self._rows(params["engram"][name]["embed"]["weight"], ids) for name, ids in memory.items()}

    def _rows(self, table: Array, ids: Array) -> Array:
        if self.mesh is None:
            return gather_rows({"weight": table}, ids, FLOAT32)
        together = gathers(ids.size, table.shape[1])

        def local(table: Array, ids: Array) -> Array:
            if not together:
                return fetch_rows(self.parallel, table, ids)
            return gather_rows({"weight": table}, ids, FLOAT32.spread(self.parallel))

        rows = sharded_step.ROWS
        specs = (table_spec(self.mesh, table), rows)
        return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=rows, check_vma=False)(table, ids)

    def table_rows(self, name: str) -> int:
        """Rows of the Engram table of a layer, without padding."""
        layout = engram_layout(self.config)
        return layout.table_rows[layout.layer_ids.index(int(name.removeprefix("l")))]


def make_trainer(settings: TrainSettings, config: ModelConfig, params: dict, mesh: Mesh | None) -> Trainer:
    """The trainer of a run, in the numerics of its last step.

    Args:
        params: the parameters or their shapes. mesh: one that suits the model.

    Raises:
        ValueError: settings that do not suit the model or each other.
    """
    data = settings.data
    losses = Losses(
        config,
        settings.numerics_at(settings.steps),
        settings.options,
        settings.objective,
        settings.stage,
        settings.accumulate,
    )
    parts = trained_parts(params, settings.stage, images=data.images_per_row > 0)
    schedule = Schedule.of(settings.optimizer, data.batch * data.length)
    return Trainer(losses, settings.optimizer, schedule, parts, mesh)


DISPATCH = "all_to_all"  # how tokens reach experts of other devices


def without_tables(params: dict) -> dict:
    """The tree without Engram tables: rows are an input of the forward."""
    if "engram" not in params:
        return params
    layers = {name: {k: v for k, v in layer.items() if k != "embed"} for name, layer in params["engram"].items()}
    return {**params, "engram": layers}


def rows_in_parts(x: Array, parts: int) -> Array:
    """[B, ...] -> [parts, B / parts, ...]: every `parts`-th row, so that each device's rows stay its own."""
    return jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)


def _balance_report(loads: Array, gate: dict[str, Array]) -> dict[str, Array]:
    peaks = load_peaks(loads)
    bias = gate["bias"]
    return {
        "load_max": jnp.max(peaks),
        "load_mean": jnp.mean(peaks),
        "bias_spread": jnp.max(jnp.max(bias, axis=-1) - jnp.min(bias, axis=-1)),
    }
