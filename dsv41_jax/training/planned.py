"""The training step with abstract arguments, to be compiled for machines that are not there."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dsv41_jax import sharded_step, sharding
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import FLOAT32, QUANTIZED_TRAINING
from dsv41_jax.training.demo_optimizer import learning_rate, make_optimizer
from dsv41_jax.training.step import backbone_step, new_state, state_shardings
from dsv41_jax.vision import SPAN_PARAMS


def abstract_training_step(config: ModelConfig, mesh: Mesh, batch: int, tokens: int) -> sharded_step.AbstractStep:
    """The backbone's step on `batch` samples of `tokens` tokens: float32 master weights, the optimizer of the small
    trainer, the quantisation points of the release. Engram tables are on the devices; drafts and images are no part.
    """
    layout = sharding.layout_of(mesh)
    everything = sharding.abstract(config, FLOAT32, mesh)
    params = {name: leaf for name, leaf in everything.items() if name not in ("mtp", *SPAN_PARAMS)}
    optimizer = make_optimizer(learning_rate(1e-3, 1000, 100, 900))
    state = jax.eval_shape(lambda tree: new_state(tree, optimizer, 0), params)
    where = state_shardings(params, optimizer, mesh)
    state = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, where)
    rows = sharding.padded_rows(batch, layout)

    def spec(dtype: jnp.dtype, *more: int) -> jax.ShapeDtypeStruct:
        place = sharding.shardings(mesh, sharded_step.ROWS)
        return jax.ShapeDtypeStruct((rows, tokens, *more), dtype, sharding=place)

    inputs = {name: spec(jnp.int32) for name in ("token_ids", "segment_ids", "targets")}
    inputs["weights"] = spec(jnp.float32)
    inputs["memory"] = {
        f"l{layer}": spec(jnp.int32, sharded_step.engram_columns(config)) for layer in config.engram_layer_ids
    }
    step = backbone_step(config, QUANTIZED_TRAINING, optimizer, mesh=mesh)
    return sharded_step.AbstractStep(step, (state, inputs), ("state", "batch"), (0,), QUANTIZED_TRAINING, rows * tokens)
