"""Checksums of the files of a checkpoint: Orbax reads a flipped bit as if nothing were wrong.

Every process writes the sums of its own files (`ocdbt.process_<i>`), process 0 those of all others, into a file beside
the checkpoint's own, and checks the same files before they are read.
"""

import json
import os
import re
import zlib
from pathlib import Path

_BLOCK = 1 << 24
_OWNED = re.compile(r"(?:ocdbt\.|array_metadatas/)process_(\d+)(?:/|$)")


def _owner(name: str, processes: int) -> int:
    """The process that answers for a file; process 0 for what belongs to none that still is there."""
    found = _OWNED.search(name)
    owner = int(found[1]) if found else 0
    return owner if owner < processes else 0


def _files(folder: Path) -> dict[str, Path]:
    found = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    return {path.relative_to(folder).as_posix(): path for path in found if not path.name.startswith("sums.")}


def file_sum(path: Path) -> str:
    """Size and CRC-32 of a file as text; OSError if it cannot be read."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return f"{path.stat().st_size} {crc:08x}"


def write_sums(folder: Path, process: int, processes: int) -> None:
    """Write the sums of this process's files of a complete checkpoint, all or nothing."""
    sums = {name: file_sum(path) for name, path in _files(folder).items() if _owner(name, processes) == process}
    partial = folder / f"sums.{process}.partial"
    partial.write_text(json.dumps({"processes": processes, "files": sums}), encoding="utf-8")
    partial.replace(folder / f"sums.{process}.json")


def summed(folder: Path) -> bool:
    """Whether a checkpoint has sums, of some process at least."""
    return any(folder.glob("sums.*.json"))


def damage(folder: Path, process: int, processes: int) -> str | None:
    """What is wrong with this process's files of a checkpoint; None if nothing is, or if no sums were written (the run
    ended between the checkpoint and its sums).

    The run that wrote it may have had another number of processes: their files are shared out anew.
    """
    wanted: dict[str, str] = {}
    for path in sorted(folder.glob("sums.*.json")):
        try:
            wanted |= json.loads(path.read_text(encoding="utf-8"))["files"]
        except (ValueError, KeyError, OSError) as error:
            return f"{path.name} cannot be read ({error})"
    files = _files(folder)
    for number, (name, expected) in enumerate(sorted(wanted.items())):
        mine = number % processes == process
        if name not in files:
            return f"{name} is missing"
        if files[name].stat().st_size != int(expected.split()[0]):
            return f"{name} has {files[name].stat().st_size} bytes, not {expected.split()[0]}"
        if mine and file_sum(files[name]) != expected:
            return f"{name} is damaged: its checksum is not the one written with it"
    return None
