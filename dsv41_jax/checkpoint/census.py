"""Census of a checkpoint: the tensors that are there against those that the configuration implies."""

from collections.abc import Iterable
from dataclasses import dataclass

from dsv41_jax.checkpoint.manifest import manifest
from dsv41_jax.checkpoint.names import canonical
from dsv41_jax.checkpoint.safetensors_file import TensorEntry
from dsv41_jax.config import ModelConfig

KINDS = ("missing", "unexpected", "wrong shape", "wrong dtype", "twice")


@dataclass(frozen=True)
class Problem:
    """What is wrong with one tensor: one of KINDS, and a sentence that names tensor and file."""

    kind: str
    text: str


@dataclass(frozen=True)
class Census:
    """The result.

    Attributes:
        entries: {released name: entry} of the tensors that are as implied, in manifest order.
        ignored: names of tensors that are there and not used (draft copies of embed and head).
        problems: everything else.
        expected: number of tensors implied.
    """

    entries: dict[str, TensorEntry]
    ignored: tuple[str, ...]
    problems: tuple[Problem, ...]
    expected: int


def take_census(config: ModelConfig, found: Iterable[TensorEntry]) -> Census:
    """Compare the tensors found in the files with the manifest of `config`; names in older spellings count."""
    entries: dict[str, TensorEntry] = {}
    ignored, problems = [], []
    for entry in found:
        name = canonical(entry.name)
        if name is None:
            ignored.append(entry.name)
        elif name in entries:
            other = entries[name]
            where = f"{entry.name} in {entry.file.name}"
            problems.append(
                Problem("twice", f"{where}: a second {name}; the first is {other.name} in {other.file.name}")
            )
        else:
            entries[name] = entry
    expected = manifest(config)
    good = {}
    for name, spec in expected.items():
        entry, shape = entries.get(name), list(spec.shape)
        if entry is None:
            problems.append(Problem("missing", f"{name}: missing; config.json implies {spec.dtype} {shape}"))
            continue
        where = f"{name} in {entry.file.name}"
        if entry.shape != spec.shape:
            text = f"{where}: shape {list(entry.shape)}, but config.json implies {shape}"
            problems.append(Problem("wrong shape", text))
        elif entry.dtype != spec.dtype:
            text = f"{where}: dtype {entry.dtype}, but the released format has {spec.dtype}"
            problems.append(Problem("wrong dtype", text))
        else:
            good[name] = entry
    problems += [
        Problem("unexpected", f"{e.name} in {e.file.name}: unexpected; config.json implies no such tensor")
        for n, e in entries.items()
        if n not in expected
    ]
    return Census(good, tuple(ignored), tuple(problems), len(expected))
