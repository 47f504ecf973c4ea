"""The TPU compiler's schedule of a whole step: instruction bundles of every kernel, as often as it runs.

A bundle is about a cycle without stalls, so bundles over the clock are a floor of the time that the cores need, kernels
of our own and fusions of the compiler together.
"""

import collections
import dataclasses
import math
import re
from pathlib import Path

from jax.extend.core import ClosedJaxpr, Jaxpr

from dsv41_jax.compiled_program import CompiledProgram
from dsv41_jax.config import ModelConfig
from dsv41_jax.hlo_fingerprints import Fingerprints
from dsv41_jax.hlo_text import Instruction
from dsv41_jax.layer_map import Mode, layer_map
from dsv41_jax.topologies import Topology
from pallas_kernels import schedule

_ELSEWHERE = ("call-start", "async-start", "copy-start", "slice-start")  # on the SparseCore, or a DMA
FUSIONS, OTHERS = "fusions", "other operations"
INDEX = "index scores and selection"
_EXPERTS = ("moe_gate_up", "moe_down")
_TILES = re.compile(r"\[\d+,(\d+),\d+\]")  # tiles, rows of a tile, columns


@dataclasses.dataclass(frozen=True)
class ExpertLoad:
    """What the experts of a device are expected to get in a layer: experts that are touched, (token, slot) rows."""

    touched: float
    rows: float


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Programs by the name of the instruction that they were made for; of equal instructions one has a program."""

    programs: dict[str, schedule.Program]

    def cycles(
        self, program: CompiledProgram, load: ExpertLoad, steps: dict[str, int]
    ) -> tuple[dict[str, float], tuple[str, ...]]:
        """Bundles that a core works on in a step, by kernel (FUSIONS and OTHERS are the compiler's), and the kernels of
        which only a part is in it.

        The grid of an expert kernel goes over tiles of rows: one for each touched expert at least, and enough for all
        rows. Other loops whose length depends on the data count once.

        Args:
            load: what a device's experts get in a layer. steps: see `static_steps`.
        """
        same, made = Fingerprints(program.computations), {}
        for computation in program.computations.values():
            for instruction in computation.instructions:
                if instruction.name in self.programs:
                    made.setdefault(same.of(instruction), self.programs[instruction.name])
        total, partly = collections.Counter(), set()
        for loop in program.loops:
            for instruction in loop.instructions:
                if instruction.operation in _ELSEWHERE:
                    continue
                found = made.get(same.of(instruction))
                if found is None:
                    partly.add(_base(instruction))
                    continue
                bundles, whole = _bundles(instruction, found, load, steps)
                if not whole:
                    partly.add(_base(instruction))
                total[_kind(instruction)] += loop.times * bundles
        return dict(total.most_common()), tuple(sorted(partly))


def _bundles(
    instruction: Instruction, program: schedule.Program, load: ExpertLoad, steps: dict[str, int]
) -> tuple[float, bool]:
    """Bundles of a call on one core, and whether all are in it."""
    name = instruction.kernel if instruction.operation == "custom-call" else ""
    if name in _EXPERTS and name in steps and len(program.loops) == 1:
        [grid] = program.loops
        height = int(_TILES.search(instruction.shape).group(1))
        tiles = max(load.touched, load.rows / height)
        return program.straight + steps[name] * tiles / program.cores * (grid.own + _once(grid.inner)), True
    try:
        return program.bundles(), True
    except ValueError:
        return program.straight + _once(program.loops), False


def static_steps(jaxpr: ClosedJaxpr | Jaxpr) -> dict[str, int]:
    """Steps of the grids of kernels that have a dynamic dimension, without that one, by name."""
    found: dict[str, int] = {}
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "pallas_call":
            grid = equation.params["grid_mapping"]
            if grid.num_dynamic_grid_bounds:
                found[equation.params["name"]] = math.prod(size for size in grid.grid if isinstance(size, int))
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(inner, (ClosedJaxpr, Jaxpr)):
                    found |= static_steps(inner)
    return found


def _once(loops: list[schedule.Loop]) -> int:
    return sum((loop.trips or 1) * (loop.own + _once(loop.inner)) for loop in loops)


def _kind(instruction: Instruction) -> str:
    if instruction.operation == "custom-call":
        return instruction.kernel
    return FUSIONS if instruction.operation == "fusion" else OTHERS


def _base(instruction: Instruction) -> str:
    """The kernel's name, or the instruction's without its number."""
    return instruction.kernel if instruction.operation == "custom-call" else re.sub(r"[.\d]+$", "", instruction.name)


@dataclasses.dataclass(frozen=True)
class IndexBundles:
    """Bundles of all cores for index kernels, whose loops are as long as the sequence.

    Attributes:
        scored: a key of a ratio-1 and of a ratio-2 source. selected: a score. block: of candidates. pooled: a key of a
            candidate pool.
    """

    scored: tuple[float, float]
    selected: float
    block: float
    pooled: float


# From `python launch/bench.py kernels --static v5e v5p v6e v7x --ops indexer` (jax 0.10.2, libtpu 0.0.42.1), put
# together by hand from its loops: docs/performance.md has the figures.
INDEX_BUNDLES = {
    "v5e": IndexBundles((0.39, 0.53), 13_100 / 262_144, 18_000 / 32_768, 48_000 / 16_384),
    "v5p": IndexBundles((0.39, 0.53), 13_100 / 262_144, 18_000 / 32_768, 49_000 / 16_384),
    "v6e": IndexBundles((0.39, 0.54), 11_800 / 262_144, 16_000 / 32_768, 49_000 / 16_384),
    "v7x": IndexBundles((0.39, 0.53), 11_200 / 262_144, 15_000 / 32_768, 49_000 / 16_384),
}


def index_cycles(config: ModelConfig, machine: Topology, rows: int, context: int) -> float:
    """Bundles that a core works on to score and select for one query of each of `rows` rows, in all layers."""
    each, pool = INDEX_BUNDLES[machine.kind], config.candidate_topk_blocks * config.candidate_block_size
    total = 0.0
    for share in layer_map(config)[: config.num_hidden_layers]:
        if share.mode not in (Mode.FULL, Mode.REINDEX):
            continue
        entries = context // share.ratio
        if share.pool == "searches" and entries > pool:
            total += pool * (each.pooled + each.selected)
            continue
        total += entries * (each.scored[share.ratio - 1] + each.selected)
        if share.pool == "builds":
            total += entries / config.candidate_block_size * each.block
    return rows * total / machine.chip.cores


def read(folder: Path) -> Schedule:
    """The schedules that a compilation has dumped into a folder (see `pallas_kernels.schedule`); empties it."""
    return Schedule({program.name: program for program in schedule.take(folder)})
