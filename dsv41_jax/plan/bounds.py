"""Least times of a step, by what could bind it: HBM, matrix unit, links between devices, vector unit.

Each is a floor: as if that part worked at its published rate without a pause, and everything else took no time.
Latencies are not counted.
"""

import collections
import dataclasses

from dsv41_jax.chips import Chip
from dsv41_jax.compiled_program import Collective
from dsv41_jax.topologies import Topology


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Seconds of a step at least; None where it is not known.

    Attributes:
        hbm: bytes that must move at the bandwidth. matmul: FLOPs at the peak of their precision.
        links: collectives over the links. vector: instruction bundles of the compiler's schedule at the clock.
    """

    hbm: float
    matmul: float | None
    links: float
    vector: float | None = None

    @property
    def known(self) -> dict[str, float]:
        """The bounds that are known, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @property
    def binding(self) -> str:
        """The name of the largest."""
        return max(self.known, key=self.known.get)

    @property
    def seconds(self) -> float:
        """The largest."""
        return self.known[self.binding]


def matmul_seconds(flops: dict[str, float], chip: Chip) -> float:
    """Seconds of FLOPs by precision, as `accounting` counts them: "fp4" products run at the FP8 rate, a float32
    product is three bf16 ones, one-hot products are bf16.
    """
    rates = {"fp4": chip.fp8, "fp8": chip.fp8, "bf16": chip.bf16, "one_hot": chip.bf16, "f32": chip.bf16 / 3}
    return sum(count / rates[precision] for precision, count in flops.items())


def collective_seconds(collective: Collective, machine: Topology, nodes: list[int]) -> float:
    """Least seconds of one run.

    What crosses the boundary of a node (a chip, a host of GPUs) shares the node's links; between the devices of a node
    there is a faster way. On a mesh or torus of chips an all-to-all's bytes cross several links.

    Args:
        nodes: the node of each device, in the mesh's order.
    """
    if collective.group == 1:
        return 0.0
    chip = machine.chip
    members = collective.groups[0] if collective.groups else range(collective.group)
    held = collections.Counter(nodes[i] for i in members if i < len(nodes))
    spanned, inside = len(held), max(held.values())
    outer = machine.links * chip.link  # of a node, in one direction
    if spanned == 1:
        return collective.sent / chip.inner
    device = collective.sent / (chip.inner + outer / inside if chip.inner else outer)
    size, kind = collective.bytes, collective.kind
    if kind in ("all-to-all", "ragged-all-to-all"):
        far = (collective.group - inside) / collective.group  # of what a device sends
        hops = machine.hops if spanned == machine.chips else 1.0
        return max(device, inside * size * far * hops / (outer if hops == 1 else _mean_links(machine) * chip.link))
    if kind == "collective-permute":
        return size / outer
    crossing = size * (spanned - 1) / spanned * (2 if kind == "all-reduce" else 1)
    return max(device, crossing / outer)


def _mean_links(machine: Topology) -> float:
    """Links of a node on average: a mesh's corners have fewer."""
    if not machine.tpu:
        return machine.links
    ends = (2 if ring and n > 2 else 2 * (n - 1) / n for n, ring in zip(machine.shape, machine.torus, strict=True))
    return sum(ends)


def links_seconds(collectives: list[Collective], machine: Topology, nodes: list[int]) -> float:
    """Least seconds of all collectives of a step, one after another."""
    return sum(c.times * collective_seconds(c, machine, nodes) for c in collectives)
