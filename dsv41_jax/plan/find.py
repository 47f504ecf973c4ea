"""Ranks the meshes of one topology for a step: all by arithmetic, the best few by compiling them."""

import dataclasses
import math

import jax

from dsv41_jax.config import ModelConfig, load_config
from dsv41_jax.numerics import RELEASED
from dsv41_jax.plan.report import Report
from dsv41_jax.plan.request import STEP_OPTIONS, Request, layouts
from dsv41_jax.plan.run import plan_all
from dsv41_jax.plan.text import markdown, milliseconds, size
from dsv41_jax.plan.traffic import local_bytes, traffic
from dsv41_jax.sharded_step import abstract_step
from dsv41_jax.topologies import Topology


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What arithmetic says of a mesh: seconds from HBM and from the links, and bytes of arguments on a device."""

    mesh: str
    hbm: float
    links: float
    arguments: int
    fits: bool

    @property
    def seconds(self) -> float:
        """The larger one."""
        return max(self.hbm, self.links)


def estimates(request: Request) -> list[Estimate]:
    """All meshes, those that fit first, the fastest first; nothing is compiled."""
    config, machine = load_config(request.config), request.machine
    asked = [dataclasses.replace(request, mesh=str(layout)) for layout in layouts(machine, config)]
    found = [estimate(one, config, machine) for one in asked]
    return sorted(found, key=lambda e: (not e.fits, e.seconds, e.mesh))


def estimate(request: Request, config: ModelConfig, machine: Topology) -> Estimate:
    """Arithmetic of one mesh, from the shapes and shardings of the real step's arguments.

    The bytes over the links are those of the design: a layer gathers the rows of a tensor group for its split matrices
    and brings the results home, gathers all rows for the experts, and their float32 sums come back.
    """
    numerics = RELEASED.computed_by("tpu" if machine.tpu else "gpu")
    mesh = request.layout.mesh(machine.jax_devices())
    step = abstract_step(config, numerics, mesh, **{name: getattr(request, name) for name in STEP_OPTIONS})
    moved = traffic(config, numerics, step.arguments[0], request)
    layers = config.decoder_start if request.phase == "prefill" else config.num_hidden_layers
    layout, tokens = request.layout, request.rows * request.tokens
    width = config.hidden_size + config.q_lora_rank + config.o_lora_rank * config.o_groups
    width += 2 * config.num_attention_heads * config.head_dim + 2 * config.moe_intermediate_size
    dense = tokens * (layout.tensor - 1) / layout.tensor * 2 * width
    routed = tokens * (layout.data * layout.tensor - 1) * (2 + 4) * config.hidden_size
    if step.numerics.parallel.dispatch != "gather":  # only to the devices of the chosen experts, and back
        routed = tokens * config.num_experts_per_tok * (2 + 2) * config.hidden_size
    chip = machine.chip
    inside = machine.devices <= chip.node
    rate = chip.inner if inside else machine.links * chip.link / chip.node
    nbytes = sum(map(local_bytes, jax.tree.leaves(step.arguments)))
    hbm = moved.total / chip.bandwidth
    return Estimate(request.mesh, hbm, layers * (dense + routed) / rate, nbytes, nbytes < chip.memory)


def find(request: Request, compiled: int = 3, progress: bool = True) -> tuple[list[Estimate], list[Report]]:
    """All meshes by arithmetic, and reports of the `compiled` best ones, the best report first."""
    ranked = estimates(request)
    best = [dataclasses.replace(request, mesh=e.mesh) for e in ranked[:compiled]]
    reports = list(plan_all(best, progress))
    return ranked, sorted(reports, key=lambda r: (not r.fits, r.bounds.seconds if r.bounds else math.inf))


def text(ranked: list[Estimate], reports: list[Report]) -> str:
    """The ranking: what was compiled, then what was only estimated."""
    done = {report.request.mesh: report for report in reports}
    rows = []
    for report in reports:
        bounds = report.bounds
        limit = f"{report.tokens_per_second:,.0f}" if bounds else ""
        seconds = [milliseconds(value) for value in (bounds.hbm, bounds.links)] if bounds else ["", ""]
        held = size(report.memory.live) if report.memory else ""
        rows.append((report.request.mesh, "compiled", "yes" if report.fits else "no", held, *seconds, limit))
    for e in ranked:
        if e.mesh not in done:
            seconds = [milliseconds(value) for value in (e.hbm, e.links)]
            rows.append((e.mesh, "estimated", "probably" if e.fits else "no", size(e.arguments), *seconds, ""))
    heads = ("mesh", "how", "fits", "bytes a device", "HBM ms", "links ms", "tokens/s <=")
    return markdown(heads, rows)
