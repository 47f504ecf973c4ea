"""The training step with abstract arguments, to be compiled for machines that are not there."""

import dataclasses

import jax
from jax.sharding import Mesh

from dsv41_jax import sharded_step, sharding
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import FLOAT32
from dsv41_jax.training.batches import batch_shapes
from dsv41_jax.training.data_settings import DataSettings, SourceSettings
from dsv41_jax.training.optimizer_settings import OptimizerSettings
from dsv41_jax.training.step import make_trainer
from dsv41_jax.training.train_settings import TrainSettings


def planned_settings(batch: int, tokens: int) -> TrainSettings:
    """The settings of a step that is planned from a model's configuration alone: the report's optimizer, bf16 compute
    with the quantisation points of the release, each layer computed again in the backward pass.
    """
    return TrainSettings(
        model="fresh:planned",
        run="planned",
        numerics="quantized_bf16",
        remat="layer",
        rolled=True,
        optimizer=OptimizerSettings(schedule_unit="steps", decay_start=10_000, decay_end=20_000),
        data=DataSettings(sources=(SourceSettings(path="planned"),), batch=batch, length=tokens),
    )


def abstract_training_step(config: ModelConfig, mesh: Mesh, settings: TrainSettings) -> sharded_step.AbstractStep:
    """The step of a run on a mesh: rows are padded to a multiple of the devices that share rows."""
    layout = sharding.layout_of(mesh)
    rows = sharding.padded_rows(settings.data.batch, layout)
    data = dataclasses.replace(settings.data, batch=rows)
    shapes = sharding.abstract(config, FLOAT32, mesh)
    trainer = make_trainer(dataclasses.replace(settings, data=data), config, shapes, mesh)
    where = sharding.shardings(mesh, sharded_step.ROWS)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), batch_shapes(data, config, rows)
    )
    state = trainer.abstract_state(shapes)
    return sharded_step.AbstractStep(
        trainer.step(), (state, batch), ("state", "batch"), (0,), trainer.losses.numerics, rows * data.length
    )
