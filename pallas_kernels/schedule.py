"""The TPU compiler's schedule of a program: instruction bundles per loop, read from the dumps that libtpu can write.

A bundle is about a cycle without stalls. The counts rank variants of a kernel on a machine without a TPU; they are no
times: waiting for memory does not show.
"""

import dataclasses
import os
import re
import sys
from pathlib import Path

_LINE = re.compile(r"^\s*(?:0x)?([0-9a-f]+)\s*([A-Z]{2})?\s*:\s*([> ]*)\{(.*)$")
_EXIT = re.compile(r"scmp\.\w+(?:\.\w+)* (?:/\*.*?\*/)?(?:\(!?%\w+\), )?%(\w+), (\d+) /\* loop exit test \*/")
_PHI = re.compile(r"%(\w+) = sphi %\w+, %(\w+)")
_FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")


@dataclasses.dataclass
class Loop:
    """One loop of a program.

    Attributes:
        depth: 1 for the outermost. own: bundles of one iteration outside of inner loops.
        trips: iterations, where the schedule says a number. The pipeline of a kernel's grid has 2 more than its steps.
        dmas, matmuls: instructions of one iteration outside of inner loops that start copies or feed the matrix unit.
    """

    depth: int
    own: int = 0
    trips: int | None = None
    dmas: int = 0
    matmuls: int = 0
    inner: list["Loop"] = dataclasses.field(default_factory=list)

    def bundles(self, trips: dict[int, int] | None = None) -> int:
        """Bundles of one iteration with its inner loops.

        Args:
            trips: iterations by depth, for inner loops whose number the schedule does not say.

        Raises:
            ValueError: a number is missing.
        """
        total = self.own
        for loop in self.inner:
            count = (trips or {}).get(loop.depth, loop.trips)
            if count is None:
                raise ValueError(f"the schedule does not say how often the loop at depth {loop.depth} runs")
            total += count * loop.bundles(trips)
        return total


@dataclasses.dataclass
class Program:
    """A fusion or a kernel.

    Attributes:
        straight: bundles outside of loops. loops: its outermost loops.
        cores: tensor cores that share its steps (2 on a v5p, where a kernel's grid has a parallel axis).
    """

    name: str
    straight: int
    loops: list[Loop]
    cores: int = 1

    @property
    def size(self) -> int:
        """Bundles in memory."""

        def count(loop: Loop) -> int:
            return loop.own + sum(map(count, loop.inner))

        return self.straight + sum(map(count, self.loops))

    def bundles(self, trips: dict[int, int] | None = None) -> int:
        """Bundles of a call on one core; `trips` as in `Loop.bundles`."""
        return Loop(0, self.straight, inner=self.loops).bundles(trips)


def parse(name: str, text: str) -> Program:
    """A `final_bundles` dump."""
    program, stack = Program(name, 0, [], 2 if "/* core id */" in text else 1), []
    counted: dict[str, Loop] = {}  # by the names of a loop's counters
    for line in text.splitlines():
        found = _LINE.match(line)
        if not found:
            continue
        _, mark, nesting, code = found.groups()
        depth = nesting.count(">")
        if code.startswith("}"):  # an empty bundle has no nesting written to it
            depth = len(stack)
        del stack[depth if mark != "LB" else depth - 1 :]
        if mark == "LB":
            loop = Loop(depth)
            (stack[-1].inner if stack else program.loops).append(loop)
            stack.append(loop)
        if not stack:
            program.straight += 1
            continue
        loop = stack[-1]
        loop.own += 1
        loop.dmas += code.count("= dma.")
        loop.matmuls += len(re.findall(r"= vmat|= vmatmul|vmatpush", code))
        for names in _PHI.findall(code):
            counted |= dict.fromkeys(names, loop)
        for counter, trips in _EXIT.findall(code):  # an outer loop's test may stand in an inner one
            counted.get(counter, loop).trips = int(trips)
    return program


def dump_to(folder: Path) -> None:
    """Make libtpu write its schedules into a folder. Only before its first use in a process.

    Raises:
        RuntimeError: libtpu is loaded already.
    """
    if any("libtpu" in line for line in Path("/proc/self/maps").read_text().splitlines()):
        raise RuntimeError("libtpu is loaded already: schedules can only be dumped by a process that asks for it first")
    folder.mkdir(parents=True, exist_ok=True)
    # Of the compiler's many passes only the last one.
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=^final_bundles$"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
    if "jax" in sys.modules:  # a persistent cache would skip the compilation that is to be seen
        import jax

        jax.config.update("jax_enable_compilation_cache", False)


def take(folder: Path) -> list[Program]:
    """The programs dumped since the last call, the largest first; empties the folder (dumps are large)."""
    programs = []
    for path in sorted(folder.iterdir()):
        if found := _FILE.fullmatch(path.name):
            programs.append(parse(found.group(1), path.read_text(errors="replace")))
        path.unlink()
    return sorted(programs, key=lambda program: program.size, reverse=True)
