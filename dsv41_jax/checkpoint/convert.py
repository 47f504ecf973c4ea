"""Conversion of a model's folder between the released format and an Orbax folder, in one process.

Host memory: all parameters in their stored forms but the Engram tables, which pass through in blocks (for the released
checkpoint 308 GB of 510 GB), plus the leaves that Orbax is reading or writing: 1 to 2 GB, or the largest weight with
its scale if that is more (96 GB in the released checkpoint). Disk: the size of the model, beside the source.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tqdm import tqdm

from dsv41_jax.checkpoint.names import NameMap, name_map
from dsv41_jax.checkpoint.new_folder import check_free
from dsv41_jax.checkpoint.open_folder import is_orbax_folder, open_folder
from dsv41_jax.checkpoint.orbax import OrbaxFolder, save_orbax
from dsv41_jax.checkpoint.released import is_table, load_params
from dsv41_jax.checkpoint.safetensors_file import CheckpointError
from dsv41_jax.checkpoint.save_released import SHARD_BYTES, save_released
from dsv41_jax.numerics import RELEASED

FORMATS = ("orbax", "released")
_HEADROOM = 1.01  # headers, index and metadata beside the payload


def convert(
    source: str | Path, target: str | Path, to: str, *, force: bool = False, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the model in folder `source` to a new folder `target`; every tensor keeps its bytes. Shows progress.

    Configuration, tokenizer files and token map come along; other files of the source do not. `target` appears under
    its name only when complete.

    Args:
        source: a folder in the other format.
        target: must not exist or be empty, unless `force` is given.
        to: "orbax" or "released".
        force: replace `target` if it holds a model; the old one is kept until the new one is complete.
        shard_bytes: see `save_released`.

    Raises:
        ValueError: an unknown format. FileNotFoundError: no such source. CheckpointError: the source is not whole or
            has the wanted format already, the target is occupied, or the disk too small; all before anything is loaded.
    """
    if to not in FORMATS:
        raise ValueError(f"to={to!r} is unknown; choose one of {', '.join(FORMATS)}")
    source, target = Path(source).resolve(), Path(target).resolve()
    if not source.is_dir():
        raise FileNotFoundError(f"{source}: no such folder")
    if is_orbax_folder(source) == (to == "orbax"):
        raise CheckpointError(f"{source}: is in the format {to!r} already")
    replaces = _check_target(source, target, force)
    folder = open_folder(source)
    names = name_map(folder.config)
    total = sum(spec.nbytes for spec in names.specs.values())
    _check_disk(target, total)
    with _bar(f"reading {source.name}", total - _table_bytes(names)) as bar:
        params = load_params(folder, RELEASED, engram="mmap", progress=lambda done, _: bar.update(done - bar.n))
    if isinstance(folder, OrbaxFolder):
        folder.release()
    fresh = target.with_name(f".{target.name}.new-{os.getpid()}") if replaces else target
    try:
        with _bar(f"writing {target.name}", total) as bar:
            if to == "released":
                save_released(
                    params,
                    folder.config,
                    fresh,
                    source=folder,
                    shard_bytes=shard_bytes,
                    progress=lambda done, _: bar.update(done - bar.n),
                )
            else:
                with _growth(bar) as watch:
                    save_orbax(params, folder.config, fresh, source=folder, progress=watch)
        if replaces:
            _replace(target, fresh)
    finally:
        if replaces:
            shutil.rmtree(fresh, ignore_errors=True)


def _bar(what: str, total: int) -> tqdm:
    return tqdm(total=total, unit="B", unit_scale=True, desc=what)


def _table_bytes(names: NameMap) -> int:
    return sum(names.specs[name].nbytes for name, place in names.places.items() if is_table(place.path))


def _check_target(source: Path, target: Path, force: bool) -> bool:
    """Whether `target` holds something that is to be replaced; CheckpointError if it may not be written."""
    if target == source or target in source.parents or source in target.parents:
        raise CheckpointError(f"{target}: source and target folder must not contain each other")
    if not force or not target.exists() or target.is_dir() and not any(target.iterdir()):
        check_free(target)
        return False
    if not (target / "config.json").is_file():
        raise CheckpointError(f"{target}: holds something else than a model, so it is not replaced; remove it yourself")
    return True


def _check_disk(target: Path, nbytes: int) -> None:
    existing = next(folder for folder in target.parents if folder.exists())
    free, needed = shutil.disk_usage(existing).free, int(nbytes * _HEADROOM)
    if free < needed:
        raise CheckpointError(
            f"{target}: {free / 1e9:.1f} GB are free on its disk and {needed / 1e9:.1f} GB are needed; make room"
        )


def _replace(target: Path, fresh: Path) -> None:
    """Put the complete folder `fresh` in the place of `target`."""
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old)


@contextmanager
def _growth(bar: tqdm) -> Iterator[Callable[[Path], None]]:
    """Yields a function that makes `bar` follow the size of a folder, which Orbax fills without reporting."""
    done = threading.Event()
    threads: list[threading.Thread] = []

    def follow(folder: Path) -> None:
        while not done.wait(0.5):
            with suppress(OSError):  # files come and go, and at the end the folder changes its name
                size = sum(file.stat().st_size for file in list(folder.rglob("*")) if file.is_file())
                bar.update(min(size, bar.total) - bar.n)

    def watch(folder: Path) -> None:
        threads.append(threading.Thread(target=follow, args=(folder,), daemon=True))
        threads[0].start()

    try:
        yield watch
        bar.update(bar.total - bar.n)
    finally:
        done.set()
        for thread in threads:
            thread.join()
