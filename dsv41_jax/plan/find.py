"""Ranks the meshes of one topology for a step: all by arithmetic, the best few by compiling them."""

import dataclasses
import math

import jax
import numpy as np

from dsv41_jax import accounting
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import RELEASED
from dsv41_jax.parallel import Parallel
from dsv41_jax.plan.bounds import matmul_seconds
from dsv41_jax.plan.report import Report
from dsv41_jax.plan.request import STEP_OPTIONS, Request, layouts
from dsv41_jax.plan.run import plan_all
from dsv41_jax.plan.text import markdown, milliseconds, size
from dsv41_jax.plan.traffic import local_bytes, traffic
from dsv41_jax.sharded_step import abstract_step, parallel_of
from dsv41_jax.topologies import Topology


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What arithmetic says of a mesh: least seconds from HBM, matrix unit and links, bytes of arguments on a device."""

    mesh: str
    hbm: float
    matmul: float
    links: float
    arguments: int
    fits: bool

    @property
    def seconds(self) -> float:
        """The largest."""
        return max(self.hbm, self.matmul, self.links)


def estimates(request: Request) -> list[Estimate]:
    """All meshes, those that fit first, the fastest first; nothing is compiled."""
    config, machine = request.model, request.machine
    asked = [dataclasses.replace(request, mesh=str(layout)) for layout in layouts(machine, config)]
    found = [estimate(one, config, machine) for one in asked]
    return sorted(found, key=lambda e: (not e.fits, e.seconds, e.mesh))


def estimate(request: Request, config: ModelConfig, machine: Topology) -> Estimate:
    """Arithmetic of one mesh, from the shapes and shardings of the real step's arguments."""
    numerics = RELEASED.computed_by("tpu" if machine.tpu else "gpu")
    mesh, chip = request.layout.mesh(machine.jax_devices()), machine.chip
    step = abstract_step(config, numerics, mesh, **{name: getattr(request, name) for name in STEP_OPTIONS})
    parallel = parallel_of(mesh, request.tokens, request.rows)
    tokens = request.rows * request.tokens // parallel.parts  # of a device
    layers = config.decoder_start if request.phase == "prefill" else config.num_hidden_layers
    sent = layers * (_dense_bytes(config, parallel, tokens) + _routed_bytes(config, parallel, tokens))
    rate = chip.inner if machine.devices <= chip.node else machine.links * chip.link / chip.node
    repeated = parallel.context / parallel.parts  # devices along context that do the same
    moved = traffic(config, numerics, step.arguments[0], request).total
    flops = {name: count * request.batch * repeated / machine.devices for name, count in row_flops(request).items()}
    nbytes = sum(map(local_bytes, jax.tree.leaves(step.arguments)))
    times = (moved / chip.bandwidth, matmul_seconds(flops, chip), sent / rate)
    return Estimate(request.mesh, *times, nbytes, nbytes < chip.memory)


def row_flops(request: Request) -> dict[str, float]:
    """FLOPs of one row's tokens by precision, by closed arithmetic, at the end of the context."""
    encoder = request.phase == "prefill"
    contexts = np.arange(request.context - request.tokens + 1, request.context + 1)
    options = {"logits": 0 if encoder else request.tokens, "draft_windows": not encoder}
    phase = accounting.phase(request.model, contexts, "encoder" if encoder else "all", **options)
    return phase.by_precision()


def _dense_bytes(config: ModelConfig, parallel: Parallel, tokens: int) -> float:
    """Bytes that a device sends for a layer's split matrices: their inputs to the tensor group, their outputs home."""
    width = config.hidden_size + config.q_lora_rank + config.o_lora_rank * config.o_groups
    width += 2 * config.num_attention_heads * config.head_dim + 2 * config.moe_intermediate_size
    return 2 * width * tokens * (parallel.tensor - 1) / parallel.tensor


def _routed_bytes(config: ModelConfig, parallel: Parallel, tokens: int) -> float:
    """Bytes that a device sends for a layer's routed experts: bf16 rows there, and back float32 sums of all devices'
    (gather) or the bf16 outputs of each chosen expert.
    """
    if parallel.dispatch != "gather":
        away = (parallel.devices - 1) / parallel.devices
        return 2 * 2 * config.hidden_size * tokens * config.num_experts_per_tok * away
    shards = parallel.row_shards * parallel.parts
    repeated = 1 if parallel.parts > 1 else parallel.context
    summed = 2 * 4 * shards * (repeated - 1) / repeated  # the same tokens, other experts
    return config.hidden_size * tokens * ((2 + 4) * (shards - 1) + summed)


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
        seconds = [milliseconds(value) for value in (bounds.hbm, bounds.matmul, bounds.links)] if bounds else [""] * 3
        held = size(report.memory.live) if report.memory else ""
        rows.append((report.request.mesh, "compiled", "yes" if report.fits else "no", held, *seconds, limit))
    for e in ranked:
        if e.mesh not in done:
            seconds = [milliseconds(value) for value in (e.hbm, e.matmul, e.links)]
            rows.append((e.mesh, "estimated", "probably" if e.fits else "no", size(e.arguments), *seconds, ""))
    heads = ("mesh", "how", "fits", "bytes a device", "HBM ms", "matmul ms", "links ms", "tokens/s <=")
    return markdown(heads, rows)
