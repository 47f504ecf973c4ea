"""Checkpoints of a training run: state and data position, written by Orbax beside the steps, read back bit for bit.

    RUN/checkpoints/<step>/state/         the TrainState
    RUN/checkpoints/<step>/data/metadata  where the data stands, JSON
    RUN/checkpoints/<step>/sums.<p>.json  checksums, see `file_sums`

A checkpoint appears under its step only when it is complete, so a run that is killed while it writes has the one
before. A damaged one is set aside under another name, with a warning.
"""

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from dsv41_jax.checkpoint.orbax_writer import first_line
from dsv41_jax.training.file_sums import damage, summed, write_sums
from dsv41_jax.training.state import TrainState

_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: theirs; made when it is not there.
        keep: how many of the newest are kept. keep_every: also every one whose step is a multiple of it; None: no more.
        background: write while training goes on.
        read_only: nothing in the folder changes, a damaged checkpoint stays where it is.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int = 2,
        keep_every: int | None = None,
        background: bool = True,
        read_only: bool = False,
    ):
        self.folder, self._read_only = Path(folder).absolute(), read_only
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep,
            keep_period=None if read_only else keep_every,
            enable_async_checkpointing=background,
            read_only=read_only,
            save_interval_steps=0 if read_only else 1,
            create=not read_only,
        )
        self._manager = self._open()
        self._unsummed: int | None = None
        self._sums: threading.Thread | None = None

    def save(self, state: TrainState, data: dict, step: int) -> None:
        """Begin to write a checkpoint; the state may be donated to the next step at once. One that is there already is
        left alone. Waits for the one before.
        """
        if step == self._manager.latest_step():
            return
        self.wait()
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data))
        self._manager.save(step, args=args)
        self._unsummed = step

    def poll(self) -> None:
        """Between steps: sum the files of a checkpoint that has been written, in a thread."""
        if self._unsummed is not None and not self._manager.is_saving_in_progress():
            self._start_sums()

    def wait(self) -> None:
        """Until everything is written and summed; raises what went wrong in the background."""
        self._manager.wait_until_finished()
        self.poll()
        if self._sums is not None:
            self._sums.join()
            self._sums = None

    def close(self) -> None:
        """Wait, and let go of the folder."""
        self.wait()
        self._manager.close()

    def restore(self, like: TrainState) -> tuple[TrainState, dict, int] | None:
        """State, data position and step of the newest checkpoint that is whole; None if there is none at all.

        Args:
            like: a state, or its ShapeDtypeStructs with shardings: where to put the arrays.

        Raises:
            ValueError: there are checkpoints and none is whole, the newest is of another model or optimizer, or it is
                whole and could not be read, which has another reason: memory, or the disk.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        wrong = {}
        for step in steps:
            own = damage(self.folder / str(step), jax.process_index(), jax.process_count())
            found = _first_of_all_processes(own)
            if found is None:
                found, restored = self._read(step, like)
                if found is None:
                    return *restored, step
            wrong[step] = found
            _log.warning("checkpoint of step %d is not whole (%s): the one before it is used", step, found)
            if not self._read_only:
                self._set_aside(step)
        if wrong:
            listed = "; ".join(f"step {step}: {why}" for step, why in wrong.items())
            raise ValueError(f"{self.folder}: no checkpoint is whole ({listed}); start a run in another folder")
        return None

    def _read(self, step: int, like: TrainState) -> tuple[str | None, tuple[TrainState, dict] | None]:
        self._check_shapes(step, like)
        shapes = jax.tree.map(_described, like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes), data=ocp.args.JsonRestore())
        try:
            found = self._manager.restore(step, args=args)
        except Exception as error:  # whatever the libraries below make of damaged files
            if summed(self.folder / str(step)):
                raise ValueError(
                    f"{self.folder}/{step}: its files are as they were written, but cannot be read: {first_line(error)}"
                ) from error
            if jax.process_count() > 1:
                raise ValueError(
                    f"{self.folder}/{step} cannot be read ({first_line(error)}): remove that folder and start again"
                ) from error
            return first_line(error), None
        return None, (found.state, found.data)

    def _check_shapes(self, step: int, like: TrainState) -> None:
        """ValueError naming what differs between a readable checkpoint and the state this run needs."""
        try:
            tree = self._manager.item_metadata(step)["state"]
            stored = {
                _path(p): (tuple(x.shape), np.dtype(x.dtype)) for p, x in jax.tree_util.tree_leaves_with_path(tree)
            }
        except Exception:  # damaged metadata: reading will say so
            return
        wanted = {_path(p): (tuple(x.shape), np.dtype(x.dtype)) for p, x in jax.tree_util.tree_leaves_with_path(like)}
        if not stored or stored == wanted:
            return
        names = sorted(stored.keys() ^ wanted.keys()) or sorted(n for n in wanted if wanted[n] != stored[n])
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise ValueError(
            f"{self.folder}/{step} holds another model, stage or optimizer than this run's (differing: {shown}); "
            "give the settings it was made with, or another run folder"
        )

    def _set_aside(self, step: int) -> None:
        """Rename a damaged checkpoint, so that its step can be written again."""
        self._manager.close()
        if jax.process_index() == 0:
            place = self.folder / f"damaged-{step}"
            number = 1
            while place.exists():
                number += 1
                place = self.folder / f"damaged-{step}-{number}"
            (self.folder / str(step)).rename(place)
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices(f"damaged checkpoint {step}")
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        handlers = {"state": ocp.StandardCheckpointHandler(), "data": ocp.JsonCheckpointHandler()}
        return ocp.CheckpointManager(self.folder, options=self._options, item_handlers=handlers)

    def _start_sums(self) -> None:
        folder = self.folder / str(self._unsummed)
        self._unsummed = None
        arguments = (folder, jax.process_index(), jax.process_count())
        self._sums = threading.Thread(target=write_sums, args=arguments, name="checkpoint sums")
        self._sums.start()


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed run had begun to write; for the one process that works in the folder."""
    for place in folder.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(place, ignore_errors=True)


def _path(path: tuple) -> str:
    names = (getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))) for key in path)
    return ".".join(str(name) for name in names)


def _described(x: Any) -> jax.ShapeDtypeStruct:
    """With a place for it: without one, Orbax takes only arrays that were on the devices that are here."""
    where = getattr(x, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def _first_of_all_processes(own: str | None) -> str | None:
    """The complaint of the first process that has one."""
    if jax.process_count() == 1:
        return own
    from jax.experimental import multihost_utils

    text = np.zeros(200, np.uint8)
    encoded = (own or "").encode()[:200]
    text[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    everyone = multihost_utils.process_allgather(text)
    return next((bytes(row).rstrip(b"\0").decode(errors="replace") for row in everyone if row.any()), None)
