"""A folder that appears under its name only when it is complete."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dsv41_jax.checkpoint.safetensors_file import CheckpointError


def check_free(folder: Path) -> None:
    """Raise CheckpointError unless `folder` does not exist or is an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder}: already exists; give a new folder")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, renamed to it if the block ends without an error and removed if not.

    Raises CheckpointError if `folder` exists and is not empty.
    """
    check_free(folder)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
