"""What a compiled program does, read from its optimised HLO text: loops, kernels, collectives, data that is moved.

Everything is counted as often as it runs: bodies of loops times their trips. XLA's own counters see a body once.
"""

import collections
import dataclasses
import functools

from dsv41_jax.hlo_text import Computation, Instruction, loop_trips, parse

COLLECTIVES = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
# Custom calls that mark something for the compiler and run nothing.
_MARKERS = {
    *("AllocateBuffer", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked", "PrepareAsyncCallStart"),
    *("PrepareAsyncCallDone", "AsyncCollectiveStart", "AsyncCollectiveDone", "Sharding", "SPMDFullToShardShape"),
    *("SPMDShardToFullShape", "ConcatBitcast"),
}
_NOTHING = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "domain", "while", "conditional", "call", "add-dependency"),
}
_MOVES = {"copy", "copy-start", "transpose", "dynamic-slice", "slice", "pad", "concatenate", "reshape", "reverse"}
# A fusion of nothing but these moves data.
_MOVING = _MOVES | {"parameter", "constant", "bitcast", "convert", "broadcast", "tuple", "get-tuple-element"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction.

    Attributes:
        kind: one of COLLECTIVES. name: of the instruction.
        bytes: of its largest side on one device: an all-gather's result, a reduce-scatter's operand.
        group: devices that take part together. groups: their numbers in the mesh, a list for each group; empty when
            the program names pairs only.
        times: how often it runs. at_least: it stands in a loop whose trips the data decides, which count as none.
        overlapped: kernels between its start and its end; None where it is not asynchronous.
    """

    kind: str
    name: str
    bytes: int
    group: int
    groups: tuple[tuple[int, ...], ...]
    times: int
    at_least: bool
    overlapped: int | None

    @property
    def sent(self) -> float:
        """Bytes that each device must at least send, and receive, in one run."""
        share = (self.group - 1) / self.group
        return {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share) * self.bytes


@dataclasses.dataclass(frozen=True)
class Move:
    """An instruction that only moves data: operation, result bytes, how often."""

    operation: str
    name: str
    bytes: int
    times: int


@dataclasses.dataclass
class Loop:
    """The program's entry, or the body of a loop.

    Attributes:
        trips: iterations, None where the data decides. times: how often the body runs in all; a number of trips that is
            not known counts as none. depth: 0 for the entry.
        kernels: "fusion", "custom-call" and "collective": what one iteration launches, outside of inner loops.
        others: operations left to instructions of their own, by name (copies, sorts).
        custom: names of the kernels called.
        instructions: what runs, collectives apart.
    """

    name: str
    trips: int | None
    times: int
    depth: int
    kernels: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    others: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    custom: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    instructions: list[Instruction] = dataclasses.field(default_factory=list)
    inner: list["Loop"] = dataclasses.field(default_factory=list)


class CompiledProgram:
    """A program's loops, collectives and moves.

    Attributes:
        computations: the parsed text. entry: the outermost `Loop`. loops: all of them, the entry first.
        collectives, moves: as they stand in the text.
        unknown_loops: loops whose trips the text does not tell: what is in them counts as not run.
    """

    def __init__(self, text: str):
        """Read `compiled.as_text()`.

        Raises:
            ValueError: the text has no entry computation.
        """
        self.computations, entry = parse(text)
        self.loops: list[Loop] = []
        self.collectives: list[Collective] = []
        self.moves: list[Move] = []
        self.entry = self._loop(self.computations[entry], None, 1, 0, False)
        self.unknown_loops = [loop for loop in self.loops if loop.depth and loop.trips is None]

    @property
    def kernels(self) -> int:
        """Fusions, custom calls and collectives that a step launches."""
        return sum(loop.times * loop.kernels.total() for loop in self.loops)

    def _loop(self, body: Computation, trips: int | None, times: int, depth: int, at_least: bool) -> Loop:
        loop = Loop(body.name, trips, times, depth)
        self.loops.append(loop)
        self._walk(body, loop, at_least or (depth > 0 and trips is None))
        return loop

    def _walk(self, body: Computation, loop: Loop, at_least: bool) -> None:
        for position, instruction in enumerate(body.instructions):
            operation = instruction.operation
            if operation == "while":
                trips = loop_trips(self.computations, body, instruction)
                inner = self.computations[instruction.attribute("body")]
                loop.inner.append(self._loop(inner, trips, loop.times * (trips or 0), loop.depth + 1, at_least))
            elif operation == "conditional":
                self._walk(self._dearest(instruction), loop, at_least)
            elif operation == "call":
                self._walk(self.computations[instruction.attribute("to_apply")], loop, at_least)
            else:
                self._one(body, position, instruction, loop, at_least)

    def _one(self, body: Computation, position: int, instruction: Instruction, loop: Loop, at_least: bool) -> None:
        operation = instruction.operation
        if operation in _NOTHING or operation.endswith(("-done", "-update")):
            return
        collective = self._collective(instruction)
        if collective is not None:
            kind, inner = collective
            loop.kernels["collective"] += 1
            self.collectives.append(self._describe(body, position, kind, inner, loop.times, at_least))
            return
        if operation == "custom-call":
            if instruction.target in _MARKERS:
                return
            loop.kernels["custom-call"] += 1
            loop.custom[instruction.kernel] += 1
            loop.instructions.append(instruction)
            return
        if operation in ("fusion", "call-start", "async-start"):
            if "async-collective-done" not in instruction.name:
                loop.kernels["fusion"] += 1
                loop.instructions.append(instruction)
            if operation == "fusion" and self._only_moves(instruction):
                self._moved("fusion", instruction, loop.times)
            return
        if instruction.shape_rank == 0:
            return  # scalars are computed beside the kernels
        loop.others[operation] += 1
        loop.instructions.append(instruction)
        if operation in _MOVES:
            self._moved(operation, instruction, loop.times)

    def _moved(self, operation: str, instruction: Instruction, times: int) -> None:
        if instruction.on_chip:
            return  # between HBM and the chip's own memory: no copy, but reading ahead or writing back
        name = "copy" if operation == "copy-start" else operation
        self.moves.append(Move(name, instruction.name, instruction.result_bytes(largest=True), times))

    def _only_moves(self, instruction: Instruction) -> bool:
        callee = self.computations.get(instruction.attribute("calls") or "")
        return callee is not None and all(inner.operation in _MOVING for inner in callee.instructions)

    def _dearest(self, instruction: Instruction) -> Computation:
        """The branch with the most instructions."""
        branches = [self.computations[name] for name in instruction.branches]
        return max(branches, key=lambda branch: len(branch.instructions))

    def _collective(self, instruction: Instruction) -> tuple[str, Instruction] | None:
        """Kind and describing instruction of what is a collective or starts one."""
        kind = instruction.operation.removesuffix("-start")
        if kind in COLLECTIVES:
            return kind, instruction
        if instruction.operation not in ("fusion", "call-start", "async-start"):
            return None
        callee = instruction.attribute("calls") or instruction.attribute("to_apply") or ""
        # Fusions that carry a collective along while they compute, and its end: counted at its start.
        if "async_collective_fusion" in callee or "async-collective-done" in instruction.name:
            return None
        for inner in self.computations[callee].instructions if callee in self.computations else ():
            if inner.operation.removesuffix("-start") in COLLECTIVES:
                return inner.operation.removesuffix("-start"), inner
        return None

    def _describe(
        self, body: Computation, position: int, kind: str, inner: Instruction, times: int, at_least: bool
    ) -> Collective:
        start = body.instructions[position]
        overlapped = None
        if start.operation.endswith("-start") or "async-collective-start" in start.name:
            overlapped = self._between(body, position)
        operands = sum(self._shapes.get(name, 0) for name in inner.operands)
        size = max(inner.result_bytes(largest=inner.operation.endswith("-start")), operands)
        groups = inner.groups
        group = len(groups[0]) if groups else 2 if kind == "collective-permute" else self.partitions
        return Collective(kind, start.name, size, group, groups, times, at_least, overlapped)

    @functools.cached_property
    def _shapes(self) -> dict[str, int]:
        return {
            instruction.name: instruction.result_bytes()
            for computation in self.computations.values()
            for instruction in computation.instructions
        }

    @functools.cached_property
    def partitions(self) -> int:
        """Devices that the program's collectives name."""
        named = [i for c in self.computations.values() for x in c.instructions for g in x.groups for i in g]
        return max(named, default=0) + 1

    def _between(self, body: Computation, position: int) -> int:
        """Kernels from an asynchronous start to its end."""
        alive, count = {body.instructions[position].name}, 0
        for instruction in body.instructions[position + 1 :]:
            uses = alive.intersection(instruction.operands)
            if uses and ("-done" in instruction.operation or "async-collective-done" in instruction.name):
                return count
            if uses:
                alive.add(instruction.name)  # parts of its state, and fusions that carry it along
            compute = instruction.operation in ("fusion", "custom-call") and instruction.target not in _MARKERS
            count += compute and "async-collective" not in instruction.name
        return count

    def large_moves(self, at_least: int) -> list[Move]:
        """Moves of so many bytes or more, the largest first."""
        return sorted((m for m in self.moves if m.bytes >= at_least), key=lambda m: -m.bytes * m.times)

    def layer_loops(self, attention: str = "sparse_attention", experts: str = "moe_down") -> list[Loop]:
        """Loops over layers that attend and route but neither score nor write entries: Reuse layers."""

        def names(loop: Loop) -> set[str]:
            return set(loop.custom).union(*map(names, loop.inner))

        def layers(loop: Loop) -> bool:
            return {attention, experts} <= names(loop) and not any(map(layers, loop.inner))

        found = [loop for loop in self.loops if loop.depth and layers(loop)]
        other = ("index", "select", "candidate", "main_entries")
        return [loop for loop in found if not any(part in name for name in names(loop) for part in other)]

    def kernels_per_reuse_layer(self) -> float | None:
        """Kernels (fusions, custom calls, collectives) of a Reuse layer, the mean over them; None where none is in a
        loop. Inner loops count with their trips.
        """

        def launches(loop: Loop) -> int:
            return loop.kernels.total() + sum((inner.trips or 0) * launches(inner) for inner in loop.inner)

        loops = self.layer_loops()
        if not loops:
            return None
        return sum(loop.times * launches(loop) for loop in loops) / sum(loop.times for loop in loops)
