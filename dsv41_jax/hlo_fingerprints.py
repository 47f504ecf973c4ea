"""Which instructions of a program do the same: compilers make one program for all of them."""

import re

from dsv41_jax.hlo_text import Computation, Instruction

_UNESSENTIAL = re.compile(r"(?:metadata|frontend_attributes)=\{[^}]*\}|(?:calls|to_apply|control-predecessors)=[^,]*")
_NAME = re.compile(r"%[\w.\-]+")


class Fingerprints:
    """Fingerprints of a parsed module's instructions."""

    def __init__(self, computations: dict[str, Computation]):
        self._computations = computations
        self._types = {i.name: i.shape for computation in computations.values() for i in computation.instructions}
        self._bodies: dict[str, int] = {}

    def of(self, instruction: Instruction) -> int:
        """Equal for instructions that do the same to arrays of the same types and layouts."""
        operands = tuple(self._types.get(name) for name in instruction.operands)
        return hash((instruction.operation, instruction.shape, operands, self._meaning(instruction)))

    def _meaning(self, instruction: Instruction) -> tuple:
        """Its attributes without names, and what it calls."""
        called = (instruction.attribute(key) for key in ("calls", "to_apply"))
        plain = _NAME.sub("%", _UNESSENTIAL.sub("", instruction.attributes)).strip(" ,")
        return plain, *(self._body(name) for name in called if name in self._computations)

    def _body(self, name: str) -> int:
        if name not in self._bodies:
            lines, places = [], {}
            for place, instruction in enumerate(self._computations[name].instructions):
                places[instruction.name] = place
                operands = tuple(places.get(operand) for operand in instruction.operands)
                literal = instruction.argument if instruction.operation in ("constant", "parameter") else ""
                lines.append((instruction.operation, instruction.shape, operands, literal, self._meaning(instruction)))
            self._bodies[name] = hash(tuple(lines))
        return self._bodies[name]
