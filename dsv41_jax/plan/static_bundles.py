"""The TPU compiler's schedule of a whole step: instruction bundles of every kernel, as often as it runs.

A bundle is about a cycle without stalls, so bundles over the clock are a floor of the time that the cores need, kernels
of our own and fusions of the compiler together.
"""

import dataclasses
import re
from pathlib import Path

from dsv41_jax.compiled_program import CompiledProgram
from dsv41_jax.config import ModelConfig
from dsv41_jax.hlo_fingerprints import Fingerprints
from dsv41_jax.hlo_text import Instruction
from dsv41_jax.layer_map import Mode, layer_map
from dsv41_jax.topologies import Topology
from pallas_kernels import schedule

_ELSEWHERE = ("call-start", "async-start", "copy-start", "slice-start")  # on the SparseCore, or a DMA
_EXPERTS = ("moe_gate_up", "moe_down")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Programs by the name of the instruction that they were made for; of equal instructions one has a program."""

    programs: dict[str, schedule.Program]

    def cycles(self, program: CompiledProgram, touched: float) -> tuple[float, tuple[str, ...]]:
        """Bundles that a core works on in a step, and the kernels of which only a part is in it.

        The schedule has every step of a grid. Those of experts have room for all that could be chosen; here as many
        tiles count as experts are expected to be touched. Loops whose length depends on the data count once.

        Args:
            touched: experts of a device that a step is expected to touch.
        """
        same, made = Fingerprints(program.computations), {}
        for computation in program.computations.values():
            for instruction in computation.instructions:
                if instruction.name in self.programs:
                    made.setdefault(same.of(instruction), self.programs[instruction.name])
        total, partly = 0.0, set()
        for loop in program.loops:
            for instruction in loop.instructions:
                if instruction.operation in _ELSEWHERE:
                    continue
                found = made.get(same.of(instruction))
                if found is None:
                    partly.add(_base(instruction))
                    continue
                try:
                    bundles = found.bundles()
                except ValueError:
                    bundles = _once(found.loops) + found.straight
                    partly.add(_base(instruction))
                total += loop.times * bundles * _share(instruction, touched)
        return total, tuple(sorted(partly))


def _once(loops: list[schedule.Loop]) -> int:
    return sum((loop.trips or 1) * (loop.own + _once(loop.inner)) for loop in loops)


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


def _share(instruction: Instruction, touched: float) -> float:
    """The part of a kernel's grid that is used."""
    if instruction.operation != "custom-call" or instruction.kernel not in _EXPERTS:
        return 1.0
    tiles = int(re.search(r"\[(\d+)", instruction.shape).group(1))  # the result is [tiles, rows, columns]
    return min(1.0, touched / tiles)


def read(folder: Path) -> Schedule:
    """The schedules that a compilation has dumped into a folder (see `pallas_kernels.schedule`); empties it."""
    return Schedule({program.name: program for program in schedule.take(folder)})
