"""What the TPU compiler's schedule says of the workloads: instruction bundles of each program, without a TPU.

Bundles rank variants of a kernel. They are about cycles without stalls, and no times.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

from dsv41_jax.aot import compile_for
from dsv41_jax.kernel_workloads.workload import Workload
from pallas_kernels import schedule


@dataclasses.dataclass(frozen=True)
class StaticCost:
    """A workload's schedule on one TPU generation.

    Attributes:
        bundles: of a call by program, on all cores together, the most first; None where it depends on the data how
            often a loop runs.
        each: bundles for one of the workload's units, of the programs whose bundles are known.
        error: why it did not compile, if it did not.
    """

    generation: str
    work: Workload
    bundles: dict[str, int | None] = dataclasses.field(default_factory=dict)
    programs: list[schedule.Program] = dataclasses.field(default_factory=list)
    error: str = ""

    @property
    def each(self) -> float:
        """Bundles for one unit."""
        return sum(filter(None, self.bundles.values())) / self.work.units


def _bundles(program: schedule.Program) -> int | None:
    try:
        return program.bundles() * program.cores
    except ValueError:
        return None


def static_costs(generations: list[str], works: list[Workload]) -> Iterator[StaticCost]:
    """Compile every workload for every generation and read its schedule. In a process that has not used libtpu yet.

    Raises:
        RuntimeError: libtpu is loaded already.
    """
    with tempfile.TemporaryDirectory(prefix="schedules") as name:
        folder = Path(name)
        schedule.dump_to(folder)
        for work in works:
            arguments = work.split(jax.eval_shape(work.make, jax.random.key(0)))
            for generation in generations:
                try:
                    compile_for(generation, functools.partial(work.call_split, "tpu"), *arguments, donate=0)
                except Exception as error:  # one that does not fit must not hide the others
                    yield StaticCost(generation, work, error=f"{type(error).__name__}: {error}".splitlines()[0][:200])
                    schedule.take(folder)
                    continue
                programs = [p for p in schedule.take(folder) if not p.name.startswith(("TLP", "<"))]
                bundles = {p.name: _bundles(p) for p in programs}
                programs.sort(key=lambda p: (bundles[p.name] is None, bundles[p.name]), reverse=True)
                yield StaticCost(generation, work, {p.name: bundles[p.name] for p in programs}, programs)
