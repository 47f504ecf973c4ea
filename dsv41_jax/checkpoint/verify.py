"""Verification of a folder, for owners of the real weights: is this the model, whole and undamaged?

Six looks, each reported in a few lines: configuration and files, census of the tensors, published bytes, recorded
checksums, numbers that are none, and the first layers run on a fixed sequence. An Orbax folder gets those that do not
depend on the released format: configuration, leaves, checksums. Memory is bounded: tensors pass in chunks of
`finite.CHUNK_BYTES` or in pieces; only the first layers are loaded (see `first_layers`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dsv41_jax.checkpoint.census import KINDS, Census, take_census
from dsv41_jax.checkpoint.checksum import differences, read_checksums
from dsv41_jax.checkpoint.finite import check_tensors, plan
from dsv41_jax.checkpoint.first_layers import run_first_layers
from dsv41_jax.checkpoint.names import name_map
from dsv41_jax.checkpoint.open_folder import is_orbax_folder, open_folder
from dsv41_jax.checkpoint.probes import PROBES, check_probes, is_released
from dsv41_jax.checkpoint.released_folder import ReleasedFolder, all_entries, read_config
from dsv41_jax.checkpoint.safetensors_file import CheckpointError, TensorEntry, read_header
from dsv41_jax.checkpoint.save_released import TOKEN_MAP_FILE
from dsv41_jax.checkpoint.tensor_source import TensorSource
from dsv41_jax.config import ConfigError, ModelConfig
from dsv41_jax.numerics import RELEASED
from dsv41_jax.token_map import compressed_token_map
from dsv41_jax.tokenizer import Tokenizer

SHOWN = 10  # problems spelled out of each kind


class _Report:
    def __init__(self, write: Callable[[str], None]):
        self.write, self.problems = write, 0

    def found(self, problems: Sequence[str]) -> None:
        """Count problems and spell out the first few."""
        self.problems += len(problems)
        for text in problems[:SHOWN]:
            self.write(f"  problem: {text}")
        if len(problems) > SHOWN:
            self.write(f"  ... and {len(problems) - SHOWN} more")


def verify(path: str | Path, *, layers: int = 3, sample: float = 1.0, write: Callable[[str], None] = print) -> int:
    """Examine a folder and report on it line by line, the last line being `verdict: ok` or `verdict: N problems`.

    Args:
        path: a folder in the released format, or an Orbax folder.
        layers: how many of the first layers to run; 0 for none.
        sample: share of the tensors' chunks whose numbers are looked at, and of the tensors whose checksums are
            compared, spread evenly; 1 for all.
        write: takes a line.

    Returns:
        the number of problems.

    Raises:
        ValueError: layers or sample out of range. FileNotFoundError: no such folder.
    """
    if layers < 0 or not 0 < sample <= 1:
        raise ValueError(f"layers={layers} must not be negative, and sample={sample} must be above 0 and at most 1")
    folder, report = Path(path), _Report(write)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    config = _configuration(folder, report)
    if config is not None and is_orbax_folder(folder):
        _orbax(folder, sample, report)
    elif config is not None:
        census = _census(folder, config, report)
        _probes(config, census, report)
        released = ReleasedFolder(folder, config, census.entries)
        _checksums(released, sample, report)
        _numbers(census.entries, sample, report)
        _first_layers(released, layers, report)
    noun = "problem" if report.problems == 1 else "problems"
    write("verdict: ok" if not report.problems else f"verdict: {report.problems} {noun}")
    return report.problems


def _configuration(folder: Path, report: _Report) -> ModelConfig | None:
    try:
        config = read_config(folder)
    except CheckpointError as error:
        report.write("configuration: cannot be used")
        report.found([str(error)])
        return None
    which = "the released DeepSeek-V4.1-Flash" if is_released(config) else "not the released model's"
    report.write(f"configuration: legal, {which}; {config.num_hidden_layers} layers")
    return config


def _census(folder: Path, config: ModelConfig, report: _Report) -> Census:
    unreadable, entries = [], []
    try:
        entries = all_entries(folder)
    except CheckpointError as error:
        unreadable.append(str(error))
        for file in sorted(folder.glob("*.safetensors")):  # what is there is counted all the same
            try:
                entries += read_header(file)[0].values()
            except CheckpointError as problem:
                unreadable.append(str(problem))
    report.write(f"files: {len({entry.file for entry in entries})} readable" + ("" if unreadable else ", all in order"))
    report.found(list(dict.fromkeys(unreadable)))
    census = take_census(config, entries)
    count = Counter(problem.kind for problem in census.problems)
    kinds = ", ".join(f"{kind} {count[kind]}" for kind in KINDS)
    report.write(f"census: {census.expected} tensors implied, {len(census.entries)} as implied; {kinds}")
    for kind in KINDS:
        report.found([problem.text for problem in census.problems if problem.kind == kind])
    if census.ignored:
        report.write(f"  {len(census.ignored)} draft copies of embed and head are there and not used")
    return census


def _probes(config: ModelConfig, census: Census, report: _Report) -> None:
    if not is_released(config):
        report.write("published bytes: not applicable, this is not the released configuration")
        return
    problems = check_probes(census.entries)
    report.write(f"published bytes: {len(PROBES)} tensors compared, " + ("all equal" if not problems else "not equal"))
    report.found(problems)


def _orbax(folder: Path, sample: float, report: _Report) -> None:
    try:
        source = open_folder(folder)
    except CheckpointError as error:
        report.write("files: this is an Orbax folder, and not in order")
        report.found([str(error)])
        return
    report.write("files: this is an Orbax folder; its leaves are as implied")
    _checksums(source, sample, report)
    report.write("published bytes, numbers, first layers: looked at in the released format only")


def _checksums(source: TensorSource, sample: float, report: _Report) -> None:
    try:
        recorded = read_checksums(source.path)
    except CheckpointError as error:
        report.write("checksums: cannot be used")
        report.found([str(error)])
        return
    if recorded is None:
        report.write("checksums: none recorded (launch/convert.py records them)")
        return
    specs = name_map(source.config).specs
    names = [name for name in specs if name in source.entries]
    names = names[:: max(1, round(1 / sample))]
    with tqdm(total=sum(specs[n].nbytes for n in names), unit="B", unit_scale=True, desc="checksums") as bar:
        problems = [text for _, text in differences(source, specs, recorded, names, bar.update)]
    report.write(f"checksums: {len(names)} tensors compared, " + ("all equal" if not problems else "not all equal"))
    report.found(problems)


def _numbers(entries: dict[str, TensorEntry], sample: float, report: _Report) -> None:
    planned, total = plan(entries, sample)
    problems, zeros = [], []
    with tqdm(total=total, unit="B", unit_scale=True, desc="numbers") as bar:
        for check in check_tensors(entries, planned, bar.update):
            where = f"{check.name} in {entries[check.name].file.name}"
            if check.error is not None:
                problems.append(f"{where}: cannot be read: {check.error}")
            if check.bad:
                problems.append(f"{where}: {check.bad} values are not numbers, the first in row {check.first_bad_row}")
            if check.zero:
                zeros.append(check.name)
    share = total / max(1, sum(entry.nbytes for entry in entries.values()))
    report.write(
        f"numbers: {total} bytes of {len(planned)} tensors read ({100 * share:.3g}%), "
        + ("all finite" if not problems else f"{len(problems)} tensors are damaged")
    )
    report.found(problems)
    if zeros:
        report.write(
            f"  note: {len(zeros)} quantised weights are zero in all that was read ({zeros[0]}, ...); "
            "holes of an unfinished download look like that"
        )


def _first_layers(folder: ReleasedFolder, layers: int, report: _Report) -> None:
    config = folder.config
    layers = min(layers, config.num_hidden_layers)
    try:
        token_map = _token_map(folder.path, config)
    except CheckpointError as error:
        report.found([str(error)])
        return
    first_engram = min(config.engram_layer_ids, default=layers)
    if token_map is None and first_engram < layers:
        layers = first_engram
        report.write(f"first layers: no tokenizer.json, so only the {layers} before the first Engram layer can run")
    if layers == 0:
        report.write("first layers: not run")
        return
    report.write("first layers: loading and compiling, which takes minutes in the released size")
    try:
        reports, last = run_first_layers(folder, layers, RELEASED, token_map)
    except KeyError as error:
        report.write(f"first layers: not run, because {error.args[0]} is not as implied")
        return
    except (CheckpointError, ConfigError, OSError, EOFError) as error:
        report.write("first layers: not run")
        report.found([f"the first {layers} layers cannot be run: {error}"])
        return
    report.write(f"first layers: {layers} run on a fixed sequence")
    for one in reports:
        report.write(f"  layer {one.layer}: {one.stream}; {one.attention}; {one.experts} experts chosen")
    report.write(f"  {last}")
    for where, one in [(f"layer {r.layer}", s) for r in reports for s in (r.stream, r.attention)] + [("output", last)]:
        if not one.finite or one.rms == 0:
            report.found([f"first layers, {where}: {one.what} is {'zero' if one.finite else 'not finite'}"])


def _token_map(folder: Path, config: ModelConfig) -> np.ndarray | None:
    if not config.engram_layer_ids:
        return None
    if (folder / "tokenizer.json").is_file():
        return compressed_token_map(Tokenizer.from_folder(folder).backend)
    if (folder / TOKEN_MAP_FILE).is_file():
        return np.load(folder / TOKEN_MAP_FILE, allow_pickle=False)
    return None
