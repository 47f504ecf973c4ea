"""The folder in which a conversion grows: what is done in it is known after a kill, and it gets its name when complete.

    .NAME.partial/            beside the target NAME
        ...                   the files of the new folder
        checksums.json        only once all of it is done
        .progress/plan.json   what is converted from what, by how
        .progress/process-I.jsonl   the journal of process I: a line for each piece on the disk, with its checksum
    .NAME.partial.lock-I      held by process I while it lives

A line is written after the piece it names is on the disk, so what a journal says is true at any moment; a line that was
cut short by a kill is no line. All processes read all journals, so their number may change between runs.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dsv41_jax.checkpoint.checksum import CHECKSUM_FILE
from dsv41_jax.checkpoint.pieces import Piece
from dsv41_jax.checkpoint.process_lock import LockedError, hold, is_held
from dsv41_jax.checkpoint.safetensors_file import CheckpointError

Done = tuple[int, str]  # CRC-32 of a piece, stamp of the source it was read from


class PartialFolder:
    """The partial folder of a target, as process number `process` sees it."""

    def __init__(self, target: Path, process: int):
        self.target, self.process = target, process
        self.path = target.with_name(f".{target.name}.partial")
        self._old = target.with_name(f".{target.name}.old")
        self._progress = self.path / ".progress"
        self._plan = self._progress / "plan.json"
        self._lock_stem = f".{target.name}.partial.lock-"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold this process's lock for a block. CheckpointError: another process does this process's work already."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with hold(self.target.with_name(f"{self._lock_stem}{self.process}")):
                yield
        except LockedError as error:
            raise CheckpointError(
                f"{self.target}: is being written already, by {error}; wait for it or stop it"
            ) from error

    def others_work(self) -> bool:
        """Whether another process holds its lock."""
        own = f"{self._lock_stem}{self.process}"
        return any(lock.name != own and is_held(lock) for lock in self._locks())

    def _locks(self) -> list[Path]:
        return [file for file in self.target.parent.iterdir() if file.name.startswith(self._lock_stem)]

    def is_complete(self) -> bool:
        """Whether all is done but the name."""
        return (self.path / CHECKSUM_FILE).is_file()

    def plan(self) -> dict | None:
        """What is being converted here, or None if nothing is."""
        try:
            return json.loads(self._plan.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise CheckpointError(f"{self._plan}: damaged; remove {self.path} and convert the model again") from error

    def begin(self, plan: dict, stamp: str) -> None:
        """Make the folder if it is not there, and go on with this process's journal."""
        self._progress.mkdir(parents=True, exist_ok=True)
        if not self._plan.exists():
            new = self._plan.with_suffix(f".{self.process}")
            new.write_text(json.dumps(plan), encoding="utf-8")
            new.replace(self._plan)
        self._append(["", json.dumps({"source": stamp})])  # the line before may have been cut short

    def _append(self, lines: list[str]) -> None:
        with open(self._progress / f"process-{self.process}.jsonl", "a", encoding="utf-8") as journal:
            journal.write("\n".join(lines) + "\n")

    def record(self, pieces: Iterable[tuple[Piece, int]]) -> None:
        """Add pieces that are on the disk, with their checksums, to the journal."""
        self._append([json.dumps([p.name, p.start, p.stop, crc]) for p, crc in pieces])

    def _journals(self) -> list[Path]:
        return sorted(self._progress.glob("process-*.jsonl"))

    def journal_bytes(self) -> int:
        """The size of all journals, which grows while any process makes progress."""
        return sum(journal.stat().st_size for journal in self._journals())

    def done(self, planned: Iterable[Piece]) -> dict[Piece, Done]:
        """Those of the planned pieces that are on the disk."""
        by_key = {(p.name, p.start, p.stop): p for p in planned}
        result: dict[Piece, Done] = {}
        for journal in self._journals():
            stamp = ""
            for line in journal.read_text(encoding="utf-8", errors="replace").splitlines():
                entry = _parse(line)
                if isinstance(entry, dict):
                    stamp = str(entry.get("source"))
                elif entry is not None and (piece := by_key.get(tuple(entry[:3]))) is not None:
                    result[piece] = (entry[3], stamp)
        return result

    def forget(self, names: Iterable[str]) -> None:
        """Take all pieces of some tensors out of the journals, so that they are converted again."""
        bad = set(names)
        for journal in self._journals():
            lines = journal.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [line for line in lines if not (isinstance(e := _parse(line), list) and e[0] in bad)]
            new = journal.with_suffix(".new")
            new.write_text("\n".join(kept) + "\n", encoding="utf-8")
            new.replace(journal)

    def publish(self) -> None:
        """Give the complete folder its name; what has the name is replaced. After a kill, do it again."""
        shutil.rmtree(self._progress, ignore_errors=True)
        if self.target.exists() and any(self.target.iterdir()):
            shutil.rmtree(self._old, ignore_errors=True)
            self.target.rename(self._old)
        self.path.rename(self.target)
        self.clean()

    def clean(self) -> None:
        """Remove what lies beside the finished folder: the one it replaced, and locks of killed processes."""
        shutil.rmtree(self._old, ignore_errors=True)
        for lock in self._locks():
            if not is_held(lock):
                lock.unlink(missing_ok=True)


def _parse(line: str) -> list | dict | None:
    """A line of a journal: a piece, or which source the following ones were read from. None for a damaged line."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if isinstance(entry, dict):
        return entry
    if isinstance(entry, list) and [type(part) for part in entry] == [str, int, int, int]:
        return entry
    return None
