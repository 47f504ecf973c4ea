"""A conversion under way: its plan, this process's share of the pieces, the wait for the others, the end.

A conversion is recognised by its plan (format, sizes of pieces, identity of the source) and the stamp of the source's
files: a complete one by both, one to go on with by its plan. If the stamp differs, what is done is compared first.
"""

import json
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from dsv41_jax.checkpoint import pieces as cut
from dsv41_jax.checkpoint.checksum import Checksums, crc32, differences, joined, read_checksums
from dsv41_jax.checkpoint.names import NameMap, name_map
from dsv41_jax.checkpoint.open_folder import open_folder
from dsv41_jax.checkpoint.orbax_writer import OrbaxWriter
from dsv41_jax.checkpoint.partial_folder import Done, PartialFolder
from dsv41_jax.checkpoint.pieces import Piece, share, total_bytes
from dsv41_jax.checkpoint.released_folder import complain
from dsv41_jax.checkpoint.released_writer import ReleasedWriter
from dsv41_jax.checkpoint.safetensors_file import CheckpointError
from dsv41_jax.checkpoint.save_released import copy_text_files, plan_files
from dsv41_jax.checkpoint.source_identity import identity, stamp
from dsv41_jax.checkpoint.tensor_source import TensorSource
from dsv41_jax.checkpoint.transfer import TensorWriter, transfer
from dsv41_jax.checkpoint.workers import each

WAIT_SECONDS = 600.0
_POLL_SECONDS = 0.5
_HEADROOM = 1.01  # headers, index and metadata beside the payload


@dataclass(frozen=True)
class Processes:
    """Who takes part: this is process `index` of `count`.

    Process 0 waits for the others until none of them has shown progress for `wait` seconds.
    """

    index: int = 0
    count: int = 1
    wait: float = WAIT_SECONDS

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"process {self.index} of {self.count}: there are processes 0 to {self.count - 1}")
        if not self.wait > 0:
            raise ValueError(f"wait={self.wait}: must be positive")


class Conversion:
    """A conversion of `source` to the new folder `target`; nothing is written before `run`.

    Args:
        source: a checked folder. target: the folder it becomes. to: "orbax" or "released".
        shard_bytes: see `save_released`.
        processes: who takes part. write: takes a line of report.
    """

    def __init__(
        self,
        source: TensorSource,
        target: Path,
        to: str,
        shard_bytes: int,
        processes: Processes,
        write: Callable[[str], None],
    ):
        self._source, self._target, self._to, self._shard_bytes = source, target, to, shard_bytes
        self._processes, self._write = processes, write
        self._names: NameMap = name_map(source.config)
        specs = self._names.specs
        order = source.reading_order(specs)
        if to == "released":
            order = [spec.name for file in plan_files(self._names, shard_bytes).values() for spec in file]
        self._pieces = [piece for name in order for piece in cut.pieces(specs[name])]
        self._shares = share(self._pieces, processes.count)
        self.partial = PartialFolder(target, processes.index)
        self._plan = {"to": to, "piece_bytes": cut.PIECE_BYTES}
        if to == "released":
            self._plan["shard_bytes"] = shard_bytes
        self._plan["source"] = identity(source)
        self._stamp = stamp(source)
        plan_id = f"{zlib.crc32(json.dumps(self._plan, sort_keys=True).encode()):08x}"
        self._id = f"{plan_id}-{self._stamp}"

    def is_complete_in(self, folder: Path) -> bool:
        """Whether `folder` is a complete result of this conversion.

        Processes other than 0 may read copies of the source, whose files have other times.
        """
        found = read_checksums(folder)
        if found is None:
            return False
        if self._processes.index:
            return found.conversion.split("-")[0] == self._id.split("-")[0]
        return found.conversion == self._id

    def check_partial(self) -> None:
        """CheckpointError if the partial folder that is there was begun as another conversion."""
        if self.partial.is_complete():
            if not self.is_complete_in(self.partial.path):
                raise CheckpointError(
                    f"{self.partial.path}: holds the result of another conversion, or the source has changed since; "
                    "remove it to begin anew"
                )
            return
        found = self.partial.plan()
        if found is None or found == self._plan:
            return
        before, now = found.get("source", {}), self._plan["source"]
        changed = [
            f"{file}: was {before.get(file, 'not there')}, is {now.get(file, 'not there')}"
            for file in sorted({*before, *now})
            if before.get(file) != now.get(file)
        ]
        changed += [
            f"{key}: was {found.get(key)}, is {self._plan.get(key)}"
            for key in sorted({*found, *self._plan} - {"source"})
            if found.get(key) != self._plan.get(key)
        ]
        advice = "Go on with the source and the options it was begun with, or remove it to begin anew."
        complain(self.partial.path, [f"begun as another conversion: {text}" for text in changed], advice)

    def check_disk(self) -> None:
        """CheckpointError if the disk cannot hold what is still to be written."""
        existing = next(folder for folder in self._target.parents if folder.exists())
        left = total_bytes(self._pieces) - total_bytes(self.partial.done(self._pieces))
        free, needed = shutil.disk_usage(existing).free, int(left * _HEADROOM)
        if not self.partial.is_complete() and free < needed:
            raise CheckpointError(
                f"{self._target}: {free / 1e9:.1f} GB are free on its disk and {needed / 1e9:.1f} GB are needed; "
                "make room"
            )

    def run(self, finish: bool, verify: bool) -> None:
        """Convert this process's share (unless `finish`); process 0 completes the folder. Hold the lock meanwhile."""
        first = self._processes.index == 0
        if not self.partial.is_complete():
            self.partial.begin(self._plan, self._stamp)
            self.check_partial()  # another process may have begun it in between
            writer = self._writer()
            try:
                if not finish:
                    self._convert_share(writer)
                if first:
                    done = self._wait(0 if finish else self._processes.wait)
                    self._complete(writer, done, verify)
            finally:
                writer.close()
        if first:
            self.partial.publish()
            self._write(f"{self._target}: complete")
        else:
            self._write(f"process {self._processes.index}: its share is done; process 0 completes the folder")

    def _writer(self) -> TensorWriter:
        if self._to == "orbax":
            return OrbaxWriter(self.partial.path, self._names)
        return ReleasedWriter(self.partial.path, self._names, self._shard_bytes)

    def _convert_share(self, writer: TensorWriter) -> None:
        mine, done = self._shares[self._processes.index], self.partial.done(self._pieces)
        there = [piece for piece in mine if piece in done]
        if there:
            self._write(
                f"going on: {total_bytes(there)} of {total_bytes(mine)} bytes ({len(there)} of {len(mine)} pieces) "
                "are done already and are skipped"
            )
            self._compare_again([piece for piece in there if done[piece][1] != self._stamp], done)
        with _bar(f"converting {self._source.path.name}", total_bytes(mine), total_bytes(there)) as bar:
            todo = [piece for piece in mine if piece not in done]
            transfer(self._source, writer, todo, self.partial.record, bar.update)
        if stamp(self._source) != self._stamp:
            raise CheckpointError(
                f"{self._source.path}: its files were written to while they were converted; run the same command "
                "again, which compares what is done with them"
            )

    def _compare_again(self, pieces: list[Piece], done: dict[Piece, Done]) -> None:
        """Go on only if what was read of a source whose files have other times now is still what it holds."""
        if not pieces:
            return
        self._write("the source's files have other times than then: what is done is compared with them")

        def read(piece: Piece) -> int:
            return crc32(self._source.rows(piece.name, piece.start, piece.stop))

        changed = {}
        with _bar("comparing", total_bytes(pieces)) as bar:
            for piece, checksum in each(read, pieces):
                bar.update(piece.nbytes)
                if checksum != done[piece][0]:
                    where = self._source.where(piece.name)
                    changed[piece.name] = f"{piece.name} in {where}: the source has changed since it was converted"
        advice = f"Put the old source back, or remove {self.partial.path} to begin anew."
        complain(self._source.path, list(changed.values()), advice)
        self.partial.record([(piece, done[piece][0]) for piece in pieces])  # under the new times

    def _wait(self, patience: float) -> dict[Piece, Done]:
        """The pieces that are done, once all are and nobody else is at work. CheckpointError: a process is missing."""
        size, changed, others = -1, time.monotonic(), self._processes.count > 1
        with _bar("all processes", total_bytes(self._pieces), hidden=not others) as bar:
            while True:
                if (now := self.partial.journal_bytes()) != size:
                    size, changed = now, time.monotonic()
                    done = self.partial.done(self._pieces)
                    bar.update(total_bytes(done) - bar.n)
                if len(done) == len(self._pieces) and not self.partial.others_work():
                    return done
                if time.monotonic() - changed >= patience:
                    raise CheckpointError(self._missing(done, patience))
                time.sleep(min(_POLL_SECONDS, patience))

    def _missing(self, done: dict[Piece, Done], patience: float) -> str:
        lacks = []
        for index, pieces in enumerate(self._shares):
            left = [piece for piece in pieces if piece not in done]
            if left:
                lacks.append(f"process {index} ({total_bytes(left)} bytes, from {left[0].name} on)")
        what = "not done: the shares of " + ", ".join(lacks) if lacks else "another process is still at work"
        since = f"; no process has shown progress for {patience:g} seconds" if patience else ""
        return f"{self.partial.path}: {what}{since}. What is done is kept: start those processes, and process 0, again"

    def _complete(self, writer: TensorWriter, done: dict[Piece, Done], verify: bool) -> None:
        self.check_partial()
        tensors: dict[str, int] = {}
        for piece in self._pieces:
            checksum = done[piece][0]
            tensors[piece.name] = joined(tensors.get(piece.name, 0), checksum, piece.nbytes)
        recorded = read_checksums(self._source.path)
        if recorded is not None:
            bad = [name for name, value in tensors.items() if recorded.tensors.get(name) != value]
            self.partial.forget(bad)
            problems = [f"{name} in {self._source.where(name)}: not the bytes that were written there" for name in bad]
            complain(self._source.path, problems, "The source is damaged. Fetch or convert it again, then go on.")
        writer.complete()
        self._source.config.write(self.partial.path)
        copy_text_files(self.partial.path, self._source, None)
        checksums = Checksums({name: tensors[name] for name in self._names.specs}, self._id)
        if verify:
            bad = compare(self.partial.path, checksums)
            self.partial.forget(bad)
            complain(self.partial.path, list(bad.values()), "Convert again: these tensors will be written anew.")
            self._write(f"verified: {len(checksums.tensors)} tensors have their checksums")
        checksums.write(self.partial.path)


def compare(folder: Path, checksums: Checksums) -> dict[str, str]:
    """Read a whole folder, of either format: {tensor: what is wrong} of those that have not their checksums."""
    source = open_folder(folder)
    specs = name_map(source.config).specs
    with _bar(f"verifying {folder.name}", sum(spec.nbytes for spec in specs.values())) as bar:
        return dict(differences(source, specs, checksums, list(specs), bar.update))


def _bar(what: str, total: int, initial: int = 0, hidden: bool = False) -> tqdm:
    return tqdm(total=total, initial=initial, unit="B", unit_scale=True, desc=what, disable=hidden)
