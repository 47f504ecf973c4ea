"""The result of a plan: plain numbers, to be printed, drawn or kept as JSON."""

import dataclasses
from typing import Any

from dsv41_jax.plan.bounds import Bounds
from dsv41_jax.plan.request import Request
from dsv41_jax.plan.traffic import Traffic


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        parts: arguments by name (params, cache, inputs; of a training step state, batch), as the arrays have them.
        arguments: of all of them as laid out on the device: what tiling pads is in it.
        scratch: temporaries. outputs: what is returned beyond the donated cache. code: the program.
        limit: what a program may use. tokens_left: tokens of cache, in all rows of all devices, for which what is left
            has room.
    """

    parts: dict[str, int]
    arguments: int
    scratch: int
    outputs: int
    code: int
    limit: int
    tokens_left: int

    @property
    def live(self) -> int:
        """Bytes while the step runs."""
        return self.arguments + self.scratch + self.outputs + self.code

    @property
    def left(self) -> int:
        """Bytes that are free while the step runs; negative if it does not fit."""
        return self.limit - self.live

    @property
    def padding(self) -> int:
        """Bytes that the device's layouts add to the arguments."""
        return self.arguments - sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind and group size in a step: runs, bytes that a device sends, least seconds, how many of
    the instructions are asynchronous and have a kernel beside them.
    """

    kind: str
    group: int
    instructions: int
    runs: int
    bytes: float
    seconds: float
    at_least: bool
    overlapped: int


@dataclasses.dataclass(frozen=True)
class LoopRow:
    """Kernels of one iteration of a loop; see `compiled_program.Loop`."""

    depth: int
    trips: int | None
    times: int
    fusions: int
    custom_calls: int
    collectives: int
    others: int
    names: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Report:
    """What was learned of one request.

    Attributes:
        mesh_by_rule: whether the mesh was chosen here.
        memory .. kernels_per_reuse_layer: None if it did not compile; `error` says why.
        flops: of one device by precision, counted in the program. weighted: FLOPs of a token in the program, weighted
            as the report's Figure 2, and the same by the arithmetic of `accounting` (not for training).
        kernels: launched in a step.
        moves: (operation, name, bytes, times) of large instructions that only move data.
        unknown_loops: loops whose trips the data decides: what is in them counts as not run.
        vector: seconds of the vector unit's bound by kernel, where the schedule was read.
        left_out: kernels of which the bound of the vector unit has only a part: loops whose length depends on the data
            count once. Of a decode step's index kernels the rest is estimated (`static_bundles.INDEX_BUNDLES`).
        host_memory: peak bytes of the process that compiled. processor_seconds: that it took, on all cores together:
            where other programs run beside it, they say more than the time.
    """

    request: Request
    mesh_by_rule: bool
    traffic: Traffic | None = None
    bounds: Bounds | None = None
    memory: Memory | None = None
    flops: dict[str, float] | None = None
    weighted: tuple[float, float] | None = None
    collectives: tuple[CollectiveRow, ...] = ()
    loops: tuple[LoopRow, ...] = ()
    kernels: int | None = None
    kernels_per_reuse_layer: float | None = None
    moves: tuple[tuple[str, str, int, int], ...] = ()
    unknown_loops: int = 0
    vector: dict[str, float] | None = None
    left_out: tuple[str, ...] = ()
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0
    host_memory: int = 0
    processor_seconds: float = 0.0
    error: str = ""

    @property
    def fits(self) -> bool:
        """Whether it compiles and stays within the memory."""
        return self.memory is not None and self.memory.left >= 0

    @property
    def tokens_per_second(self) -> float | None:
        """At most, of all rows together."""
        if self.bounds is None:
            return None
        return self.request.batch * self.request.tokens / self.bounds.seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON: all fields, and what follows from them."""
        found = dataclasses.asdict(self)
        found["mesh"] = self.request.mesh
        found["fits"], found["tokens_per_second"] = self.fits, self.tokens_per_second
        if self.bounds:
            found["binding"], found["seconds"] = self.bounds.binding, self.bounds.seconds
        if self.memory:
            found["memory"] |= {"live": self.memory.live, "left": self.memory.left, "padding": self.memory.padding}
        return found


def from_dict(found: dict[str, Any]) -> Report:
    """The report of `dataclasses.asdict` (and of `as_dict`) after a way through JSON."""
    fields = {field.name: found[field.name] for field in dataclasses.fields(Report) if field.name in found}
    fields["request"] = Request(**fields["request"])
    for name, kind in (("traffic", Traffic), ("bounds", Bounds), ("memory", Memory)):
        if fields.get(name) is not None:
            keys = {field.name for field in dataclasses.fields(kind)}
            fields[name] = kind(**{key: value for key, value in fields[name].items() if key in keys})
    fields["collectives"] = tuple(CollectiveRow(**row) for row in fields.get("collectives", ()))
    fields["loops"] = tuple(LoopRow(**row) for row in fields.get("loops", ()))
    fields["moves"] = tuple(map(tuple, fields.get("moves", ())))
    fields["left_out"] = tuple(fields.get("left_out", ()))
    fields["weighted"] = tuple(fields["weighted"]) if fields.get("weighted") else None
    return Report(**fields)
