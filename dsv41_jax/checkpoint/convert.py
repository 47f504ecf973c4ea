"""Conversion of a model's folder between the released format and an Orbax folder: what may be converted, and where to.

Tensors pass through in pieces, a few at a time, from the source straight to where they will lie (`pieces`, `transfer`),
so host memory does not depend on the model's size. What is done is kept in a partial folder (`partial_folder`): after a
kill the same call goes on. Several processes convert a share of the pieces each into the same folder (`conversion`);
process 0 waits for the others and completes it. Every tensor gets a checksum (`checksum`).
"""

import errno
from collections.abc import Callable
from pathlib import Path

from dsv41_jax.checkpoint.checksum import CHECKSUM_FILE, read_checksums
from dsv41_jax.checkpoint.conversion import Conversion, Processes, compare
from dsv41_jax.checkpoint.new_folder import check_free
from dsv41_jax.checkpoint.open_folder import is_orbax_folder, open_folder
from dsv41_jax.checkpoint.released_folder import complain
from dsv41_jax.checkpoint.safetensors_file import CheckpointError
from dsv41_jax.checkpoint.save_released import SHARD_BYTES
from dsv41_jax.model_folder import find_folder

FORMATS = ("orbax", "released")
_ALONE = Processes()


def convert(
    source: str | Path,
    target: str | Path,
    to: str,
    *,
    revision: str | None = None,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    processes: Processes = _ALONE,
    finish: bool = False,
    verify: bool = False,
    write: Callable[[str], None] = print,
) -> None:
    """Write the model `source` to a new folder `target`; every tensor keeps its bytes. Shows progress.

    Configuration, tokenizer files and token map come along; other files of the source do not. `target` appears under
    its name only when complete; until then what is done is in `.NAME.partial` beside it, and calling again goes on.

    Args:
        source: a folder in the other format, or a hub id "owner/name".
        target: must not exist or be empty, unless `force` is given. If it is the complete result of this very
            conversion, nothing is done.
        to: "orbax" or "released".
        revision: of a hub id: a branch, tag or commit.
        force: replace `target` if it holds a model; the old one is kept until the new one is complete.
        shard_bytes: see `save_released`.
        processes: who takes part, and which of them this is.
        finish: convert nothing, only complete a folder whose shares are all done.
        verify: before the folder gets its name, read all of it again and compare the checksums.
        write: takes a line of report.

    Raises:
        ValueError: an unknown format, or choices that exclude each other. FileNotFoundError, ConnectionError: no such
            source. CheckpointError, before anything is written: the source is not whole, has the wanted format already,
            or is not the one that the partial folder was begun with; the target is occupied or being written; the disk
            is too small. CheckpointError, later: a process is missing, the source or the copy is damaged, the disk is
            full.
    """
    if to not in FORMATS:
        raise ValueError(f"to={to!r} is unknown; choose one of {', '.join(FORMATS)}")
    if force and processes.count > 1:
        raise ValueError("force is for a single process; with several, move the old folder away first")
    if finish and processes.index:
        raise ValueError(f"finish is for process 0, not process {processes.index}")
    target = Path(target).resolve()
    if not force and not (target / CHECKSUM_FILE).is_file():
        check_free(target)  # before anything is downloaded
    folder = find_folder(source, revision).resolve()
    _check_target(folder, target)
    if is_orbax_folder(folder) == (to == "orbax"):
        raise CheckpointError(f"{folder}: is in the format {to!r} already")
    conversion = Conversion(open_folder(folder), target, to, shard_bytes, processes, write)
    if not force and conversion.is_complete_in(target):
        write(f"{target}: complete already, as this conversion leaves it")
        conversion.partial.clean()
        if verify:
            problems = compare(target, read_checksums(target))
            complain(target, list(problems.values()), "Convert again with force.")
        return
    if not force:
        check_free(target)
    conversion.check_partial()
    if finish and not conversion.partial.path.is_dir():
        raise CheckpointError(f"{conversion.partial.path}: not there, so there is nothing to finish")
    if not finish:
        conversion.check_disk()
    try:
        with conversion.partial.locked():
            conversion.run(finish, verify)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise CheckpointError(
            f"{conversion.partial.path}: the disk is full; what is done is kept: make room and run the same command"
        ) from error


def _check_target(source: Path, target: Path) -> None:
    """CheckpointError if `target` overlaps the source, or is there and may not be replaced."""
    if target == source or target in source.parents or source in target.parents:
        raise CheckpointError(f"{target}: source and target folder must not contain each other")
    occupied = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if occupied and not (target / "config.json").is_file():
        raise CheckpointError(f"{target}: holds something else than a model, so it is not replaced; remove it yourself")
