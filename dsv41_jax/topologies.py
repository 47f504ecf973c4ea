"""Machines that need not be there, by their spelled names: devices to compile for, and how they are connected.

    name          chips  devices
    v5e:8x16        128      128   TPU v5e, a 2D mesh (a torus along an axis of 16)
    v5p:4x4x4        64       64   TPU v5p, 3D (a torus where all three axes are multiples of 4)
    v6e:4x4          16       16   TPU v6e, as v5e
    v7x:4x4x2        32       64   TPU v7x, as v5p; two devices a chip (libtpu calls it tpu7x)
    h100:2x8         16       16   hosts x GPUs of a host; NVLink inside a host, InfiniBand between hosts
    h200:1x8          8        8
    b200:2x8         16       16

TPU slices come in hosts of 4 chips (2x2), so each of the first two axes is even. `python -m dsv41_jax.topologies`
prints the table with memory, and the chips' figures with their sources.
"""

import dataclasses
import functools
import itertools
import math
import re
from typing import Any

from dsv41_jax.chips import CHIPS, CLOCK_NOTE, GB, TERA, Chip

_NAME = re.compile(r"([a-z]\w*):(\d+(?:x\d+)*)")
_AXES = {"v5e": 2, "v6e": 2, "v5p": 3, "v7x": 3}
_LIBTPU = {"v7x": "tpu7x"}
_POD = {"v5e": 256, "v6e": 256, "v5p": 8960, "v7x": 9216}  # chips
_TPU_HOST = 4  # chips
EXAMPLES = ("v5e:8x16", "v5p:4x4x4", "v6e:4x4", "v7x:4x4x2", "h100:2x8", "h200:1x8", "b200:2x8")


class NoCompiler(RuntimeError):
    """The compiler for a topology is not installed; the message says how to get it."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine.

    Attributes:
        name: as spelled. kind: of chip, a key of CHIPS.
        shape: chips along each axis of a TPU slice, or (hosts, GPUs of a host).
    """

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def chip(self) -> Chip:
        """The figures of a device."""
        return CHIPS[self.kind]

    @property
    def tpu(self) -> bool:
        """Whether it is a TPU slice."""
        return self.chip.platform == "tpu"

    @property
    def chips(self) -> int:
        """Number of chips."""
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """Number of devices as JAX counts them."""
        return self.chips * (self.chip.node if self.tpu else 1)

    @property
    def hosts(self) -> int:
        """Number of hosts: machines, each with a process of its own."""
        return -(-self.chips // _TPU_HOST) if self.tpu else self.shape[0]

    @property
    def torus(self) -> tuple[bool, ...]:
        """Which axes of a slice are closed to rings; a GPU machine has none."""
        if not self.tpu:
            return (False,) * len(self.shape)
        if len(self.shape) == 3:
            return (all(n % 4 == 0 for n in self.shape),) * 3
        return tuple(n == 16 for n in self.shape)

    @property
    def links(self) -> int:
        """Links to other nodes of the node that has the fewest: a corner of a mesh."""
        if not self.tpu:
            return self.chip.links
        return sum(min(2 if ring else 1, n - 1) for n, ring in zip(self.shape, self.torus, strict=True))

    @property
    def hops(self) -> float:
        """Links that a byte crosses on average between two nodes, each pair as likely."""
        if not self.tpu:
            return 1.0

        def mean(n: int, ring: bool) -> float:
            far = [abs(i - j) for i, j in itertools.product(range(n), repeat=2)]
            return sum(min(d, n - d) if ring else d for d in far) / n**2

        nodes = self.chips
        between = sum(mean(n, ring) for n, ring in zip(self.shape, self.torus, strict=True))
        return between * nodes / (nodes - 1) if nodes > 1 else 0.0

    @functools.cached_property
    def _devices(self) -> tuple[Any, ...]:
        return _tpu_devices(self) if self.tpu else _gpu_devices(self)

    def jax_devices(self) -> list[Any]:
        """Devices for a mesh: one can compile for them and not run.

        Raises:
            NoCompiler: libtpu or JAX's CUDA plugin is missing. ValueError: the compiler does not know the shape.
        """
        return list(self._devices)

    def node_of(self, device: Any) -> int:
        """Number of the node (chip or host) of one of `jax_devices`."""
        if not self.tpu:
            return device.process_index
        number = 0
        for place, size in zip(device.coords, (*self.shape, 1), strict=False):
            number = number * size + place
        return number


def parse(name: str) -> Topology:
    """The topology of a spelled name.

    Raises:
        ValueError: unknown; says what is known.
    """
    found = _NAME.fullmatch(name.strip().lower())
    spelled = f"write chip:AxB or chip:AxBxC, as in {', '.join(EXAMPLES)}"
    if not found:
        raise ValueError(f"topology {name!r} is not of the form chip:AxB; {spelled}")
    kind, shape = found.group(1).removeprefix("tpu"), tuple(map(int, found.group(2).split("x")))
    kind = {"v5lite": "v5e", "7x": "v7x"}.get(kind, kind)
    if kind not in CHIPS:
        raise ValueError(f"topology {name!r}: no chip {kind!r}, there are {', '.join(CHIPS)}; {spelled}")
    if min(shape) < 1:
        raise ValueError(f"topology {name!r}: every axis needs at least one chip; {spelled}")
    axes = _AXES.get(kind, 2)
    if len(shape) != axes:
        what = f"{axes} axes of chips" if kind in _AXES else "hosts x GPUs of a host"
        raise ValueError(f"topology {name!r}: {kind} takes {what}; {spelled}")
    topology = Topology(f"{kind}:{'x'.join(map(str, shape))}", kind, shape)
    if topology.tpu and any(n % 2 for n in shape[:2]):
        raise ValueError(f"topology {name!r}: hosts hold 2x2 chips, so the first two axes must be even; {spelled}")
    if topology.chips > _POD.get(kind, topology.chips):
        raise ValueError(f"topology {name!r}: a pod of {kind} has at most {_POD[kind]} chips (as in {EXAMPLES[2]})")
    if not topology.tpu and shape[1] > topology.chip.node:
        raise ValueError(f"topology {name!r}: a host has at most {topology.chip.node} GPUs; {spelled}")
    return topology


def _tpu_devices(topology: Topology) -> tuple[Any, ...]:
    from jax.experimental import topologies

    from dsv41_jax import aot  # noqa: F401  sets libtpu up; not for those who only read the tables

    name = f"{_LIBTPU.get(topology.kind, topology.kind)}:{'x'.join(map(str, topology.shape))}"
    try:
        return tuple(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:
        if "not installed" in str(error) or "libtpu.so" in str(error):
            raise NoCompiler(
                "compiling for a TPU needs libtpu, also on a machine without a TPU: pip install "
                f'"{_extra("tpu")}" (Linux on x86-64; nothing else of it is used)'
            ) from error
        raise ValueError(f"topology {topology.name!r}: {_first_line(error)}") from error


def _gpu_devices(topology: Topology) -> tuple[Any, ...]:
    from jax.experimental import topologies

    from dsv41_jax.aot import GPU_TARGETS

    hosts, gpus = topology.shape
    try:
        described = topologies.get_topology_desc(
            platform="cuda",
            topology_name=topology.kind,
            target_config=GPU_TARGETS[topology.kind].description(),
            topology=f"1x{hosts}x{gpus}",  # partitions, hosts, GPUs of a host
        )
    except NotImplementedError as error:
        raise NoCompiler(
            "compiling for a CUDA GPU needs JAX's CUDA plugin, also on a machine without a GPU: pip install "
            f'"{_extra("cuda12")}"'
        ) from error
    return tuple(described.devices)


def _extra(name: str) -> str:
    import jax

    return f"jax[{name}]=={jax.__version__}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def table() -> str:
    """The spelled examples, and every chip's figures with their sources, in Markdown."""
    lines = ["| topology | chips | devices | hosts | usable HBM in all |", "|---|---|---|---|---|"]
    for topology in map(parse, EXAMPLES):
        memory = topology.devices * topology.chip.memory / GB
        counts = f"{topology.chips} | {topology.devices} | {topology.hosts}"
        lines.append(f"| `{topology.name}` | {counts} | {memory:,.0f} GB |")
    lines += [
        "",
        "| a device | HBM (usable) | HBM/s | bf16 | fp8 | int8 | links of a node, each way | inside a node | clock |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, chip in CHIPS.items():
        memory = f"{chip.published_memory / GB:.0f} GB ({chip.memory / GB:.1f})"
        rates = " | ".join(f"{chip.peak(p) / TERA:,.0f}" for p in ("bf16", "fp8", "int8"))
        inner = f"{chip.node} devices, {chip.inner / GB:.0f} GB/s" if chip.inner else "1 device"
        clock = f"{chip.clock / 1e9:.2f} GHz x {chip.cores}" if chip.clock else ""
        links = f"{chip.links} x {chip.link / GB:.0f} GB/s"
        lines.append(f"| {name} | {memory} | {chip.bandwidth / GB:,.0f} GB/s | {rates} | {links} | {inner} | {clock} |")
    lines += ["", "Matmul rates in TFLOP/s, dense.", CLOCK_NOTE, "Sources:"]
    lines += [f"- {name}: {source}" for name, chip in CHIPS.items() for source in chip.sources]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
