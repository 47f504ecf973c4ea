"""The finished model in the released format, quantised: what `ds.load` and the server read."""

import shutil
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec as Spec
from tqdm import tqdm

from dsv41_jax import sharding
from dsv41_jax.checkpoint.names import flatten, nest
from dsv41_jax.checkpoint.released import abstract_params, save_released
from dsv41_jax.numerics import FLOAT32
from dsv41_jax.training.log import LOG_FILE
from dsv41_jax.training.start import Start


def export(params: dict, start: Start, folder: str | Path, run: str | Path | None = None) -> None:
    """Write float32 parameters as a released-format folder, with the tokenizer, and the run's log if there is one.

    On a mesh, padding of experts and tables is left away. In a run of several processes each leaf in turn is whole on
    every device, and all of them in the memory of process 0's host, which writes; a model too large for that is
    exported by one process alone, see `run.export_newest`.

    Raises:
        CheckpointError: the folder is occupied, or a leaf is not finite.
    """
    shapes = dict(flatten(abstract_params(start.config, FLOAT32)))
    leaves = {path: _whole(leaf, shapes[path].shape) for path, leaf in flatten(params)}  # by all processes
    if jax.process_index() != 0:
        return
    folder = Path(folder)
    with tqdm(total=1, unit="B", unit_scale=True, desc=f"writing {folder.name}") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        save_released(
            nest(leaves),
            start.config,
            folder,
            tokenizer=start.text,
            token_map=start.token_map,
            progress=progress,
        )
    if run is not None and (Path(run) / LOG_FILE).is_file():
        shutil.copyfile(Path(run) / LOG_FILE, folder / LOG_FILE)


def _whole(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array | np.ndarray | None:
    """The leaf without padding; of several processes in the memory of the first's host, None for the others."""
    cut = tuple(slice(0, n) for n in shape)
    if leaf.is_fully_addressable:
        return leaf if leaf.shape == shape else leaf[cut]
    where = sharding.shardings(leaf.sharding.mesh, Spec())
    whole = jax.jit(lambda x: x[cut], out_shardings=where)(leaf)
    return np.array(whole) if jax.process_index() == 0 else None
