"""Optimised HLO text as computations and instructions: names, operations, result types, operands, attributes."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

_HEAD = re.compile(r"^(ENTRY )?%([\w.\-]+) \(")
_LINE = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = ")
_OPERATION = re.compile(r" ([a-z][\w\-]*)\(")
_NAMES = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_DIGITS = re.compile(r"\d+")
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})?\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_PALLAS = re.compile(r'op_name="(?:[^"]*/)?([\w.\-]+)/pallas_call"')


def arrays(shape: str) -> Iterator[tuple[int, list[int]]]:
    """(bits of an element, dimensions) of each array in a type."""
    for dtype, dims in _ARRAY.findall(shape):
        if dtype in ("token", "opaque"):
            continue
        bits = 8 if dtype == "pred" else int(_DIGITS.search(dtype).group())
        yield bits, [int(n) for n in dims.split(",") if n]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        shape: its result's type as text. attributes: the text after the operands, without what the compiler's back end
            keeps to itself.
        known_trips: of a while loop, where the back end wrote it down.
    """

    name: str
    operation: str
    shape: str
    operands: tuple[str, ...]
    attributes: str
    argument: str
    known_trips: int | None = None

    def attribute(self, key: str) -> str | None:
        """The name after `key=%`."""
        found = re.search(rf"\b{key}=%([\w.\-]+)", self.attributes)
        return found.group(1) if found else None

    @property
    def branches(self) -> list[str]:
        """Computations of a conditional."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if listed:
            return _NAMES.findall(listed.group(1))
        return [self.attribute("true_computation"), self.attribute("false_computation")]

    @property
    def target(self) -> str | None:
        """What a custom call calls."""
        found = _TARGET.search(self.attributes)
        return found.group(1) if found else None

    @property
    def kernel(self) -> str:
        """A custom call's name: of the Pallas kernel, or of the target."""
        found = _PALLAS.search(self.attributes)
        return found.group(1) if found else self.target or self.name

    @property
    def literal(self) -> int | None:
        """The value of an integer constant."""
        return int(self.argument) if re.fullmatch(r"-?\d+", self.argument) else None

    def result_bytes(self, largest: bool = False) -> int:
        """Bytes of the result: of all arrays in it, or of the largest."""
        sizes = [math.prod(dims) * bits // 8 for bits, dims in arrays(self.shape)]
        return max(sizes, default=0) if largest else sum(sizes)

    @property
    def on_chip(self) -> bool:
        """Whether the result, or what a copy in the background copies, lies in a TPU's on-chip memory."""
        arrays = self.shape.split("}")[: 2 if self.operation == "copy-start" else 1]
        return any(re.search(r"S\([1-9]\)", part) for part in arrays)

    @property
    def shape_rank(self) -> int:
        """Dimensions of the result's largest array."""
        return max((len(dims) for _, dims in arrays(self.shape)), default=0)

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of devices of a collective; none where it names pairs, or all devices without a list."""
        if found := _IOTA.search(self.attributes):
            shape, over, order = ([int(n) for n in part.split(",")] if part else None for part in found.groups())
            numbers = np.arange(math.prod(over)).reshape(over)
            numbers = numbers if order is None else numbers.transpose(order)
            return tuple(map(tuple, numbers.reshape(shape).tolist()))
        if (found := _LISTED.search(self.attributes)) and found.group(1):
            return tuple(tuple(map(int, part.split(","))) for part in re.findall(r"\{([\d,]+)\}", found.group(1)))
        return ()


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions, in the order in which they are scheduled."""

    name: str
    instructions: tuple[Instruction, ...]


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """All computations of a module by name, and the name of the entry.

    Raises:
        ValueError: no entry.
    """
    found: dict[str, Computation] = {}
    name, entry, lines = None, None, []
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            name, lines = head.group(2), []
            entry = name if head.group(1) else entry
        elif line.startswith("}") and name is not None:
            found[name], name = Computation(name, tuple(lines)), None
        elif name is not None and (instruction := _instruction(line)):
            lines.append(instruction)
    if entry is None:
        raise ValueError("not the text of a compiled program: it has no ENTRY computation")
    return found, entry


def _instruction(line: str) -> Instruction | None:
    head = _LINE.match(line)
    operation = head and _OPERATION.search(line, head.end() - 1)
    if not operation:
        return None
    shape = line[head.end() : operation.start()]
    close = line.find(")", operation.end())
    argument = line[operation.end() : close]
    stop = line.find("backend_config=", close)
    attributes = line[close + 1 : stop if stop >= 0 else len(line)]
    trips = _TRIPS.search(line, stop) if operation.group(1) == "while" and stop >= 0 else None
    return Instruction(
        head.group(1),
        operation.group(1),
        shape,
        tuple(_NAMES.findall(argument)),
        attributes,
        argument,
        int(trips.group(1)) if trips else None,
    )


def loop_trips(computations: dict[str, Computation], body: Computation, loop: Instruction) -> int | None:
    """Iterations of a while loop that stands in `body` and counts from a constant to a constant in steps of one; None
    for any other.
    """
    if loop.known_trips is not None:
        return loop.known_trips
    inside = computations[loop.attribute("condition")].instructions
    outside = {instruction.name: instruction for instruction in body.instructions}
    test, by_name = inside[-1], {instruction.name: instruction for instruction in inside}
    if test.operation != "compare" or "direction=LT" not in test.attributes:
        return None
    carried = outside.get(loop.operands[0])

    def constant(name: str, where: dict[str, Instruction]) -> int | None:
        found = where.get(name)
        while found is not None and found.operation in ("copy", "bitcast"):
            found = where.get(found.operands[0])
        return found.literal if found is not None and found.operation == "constant" else None

    def first(operand: Instruction) -> int | None:
        """What an operand is before the first iteration."""
        if operand.operation != "get-tuple-element":
            return constant(operand.name, by_name)
        index = int(re.search(r"index=(\d+)", operand.attributes).group(1))
        return None if carried is None or carried.operation != "tuple" else constant(carried.operands[index], outside)

    counter, limit = (by_name[name] for name in test.operands)
    start, stop = first(counter), first(limit)
    if counter.operation != "get-tuple-element" or start is None or stop is None:
        return None
    return stop - start
