"""Checkpoints of a training run: parameters, optimizer, step and PRNG key, saved atomically by Orbax."""

from pathlib import Path

import jax
import orbax.checkpoint as ocp

from dsv41_jax.training.step import TrainState


class Checkpoints:
    """The two newest checkpoints of one stage, in a folder of their own. A save that was cut short is ignored."""

    def __init__(self, folder: str | Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(Path(folder).absolute(), options=options)

    def save(self, state: TrainState) -> None:
        """Save under the state's step; a step that is there already is left alone."""
        step = int(state.step)
        if step != self._manager.latest_step():
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, state: TrainState) -> TrainState:
        """The newest saved state, or `state` (which gives shapes and dtypes) if there is none."""
        step = self._manager.latest_step()
        if step is None:
            return state
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        return self._manager.restore(step, args=ocp.args.StandardRestore(shapes))
