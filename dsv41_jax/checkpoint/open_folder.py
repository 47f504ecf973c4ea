"""Opens a model's folder in whichever of the two formats it is."""

from pathlib import Path

from dsv41_jax.checkpoint.released_folder import INDEX_FILE, SINGLE_FILE, ReleasedFolder
from dsv41_jax.checkpoint.tensor_source import TensorSource

PARAMS_FOLDER = "params"  # of an Orbax folder


def is_orbax_folder(folder: Path) -> bool:
    """Whether `folder` is laid out as an Orbax folder, complete or not, and not as a released-format one."""
    if (folder / INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file():
        return False
    return (folder / PARAMS_FOLDER).is_dir() or (folder / "_CHECKPOINT_METADATA").is_file()


def open_folder(path: str | Path) -> TensorSource:
    """The checked folder. CheckpointError: anything wrong with it."""
    folder = Path(path)
    if not is_orbax_folder(folder):
        return ReleasedFolder.open(folder)
    from dsv41_jax.checkpoint.orbax import OrbaxFolder  # a heavy import, not needed for released-format folders

    return OrbaxFolder.open(folder)
