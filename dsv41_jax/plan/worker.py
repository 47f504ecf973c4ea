"""Compiles one step in a process of its own: `python -m dsv41_jax.plan.worker`, a request as JSON in, a report out.

A process for each step, so that its memory is given back, and because libtpu takes its flags once.
"""

import dataclasses
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from dsv41_jax.accounting import jaxpr_work, tokens_that_fit, touched_experts
from dsv41_jax.compiled_program import Collective, CompiledProgram
from dsv41_jax.config import ModelConfig, load_config
from dsv41_jax.numerics import RELEASED, Numerics
from dsv41_jax.plan import static_bundles
from dsv41_jax.plan.bounds import Bounds, links_seconds, matmul_seconds
from dsv41_jax.plan.report import CollectiveRow, LoopRow, Memory, Report
from dsv41_jax.plan.request import STEP_OPTIONS, Request
from dsv41_jax.plan.traffic import local_bytes, traffic
from dsv41_jax.sharded_step import AbstractStep, abstract_step
from dsv41_jax.topologies import NoCompiler, Topology
from pallas_kernels import schedule

LARGE_MOVE = 8 << 20  # bytes; smaller copies are not listed


def say(text: str) -> None:
    """Progress, for whoever started this process."""
    print(text, file=sys.stderr, flush=True)


def report(request: Request, by_rule: bool) -> Report:
    """Build, compile and read the step of a checked request."""
    machine, config = request.machine, load_config(request.config)
    numerics = RELEASED.computed_by("tpu" if machine.tpu else "gpu")
    with tempfile.TemporaryDirectory(prefix="schedule") as name:
        folder = Path(name) / "dumped" if request.schedule else None
        if folder:
            schedule.dump_to(folder)  # before libtpu is used
        say("tracing")
        mesh = request.layout.mesh(machine.jax_devices())
        options = {name: getattr(request, name) for name in STEP_OPTIONS}
        step = abstract_step(config, numerics, mesh, **options)
        return compile_report(request, by_rule, machine, config, numerics, step, mesh, folder)


def compile_report(
    request: Request,
    by_rule: bool,
    machine: Topology,
    config: ModelConfig,
    numerics: Numerics,
    step: AbstractStep,
    mesh: jax.sharding.Mesh,
    folder: Path | None = None,
) -> Report:
    """The report of a step on a mesh of a machine's devices.

    Args:
        folder: where libtpu writes its schedules, if it does.
    """
    arguments = dict(zip(step.names, step.arguments, strict=True))
    moved = traffic(config, numerics, arguments["params"], request)
    begin = time.perf_counter()
    jitted = jax.jit(step.function, donate_argnums=step.donate, keep_unused=True)
    with jax.set_mesh(mesh):  # kernels ask which generation they are for
        traced = jitted.trace(*step.arguments)
        flops = _flops(request, machine, config, traced.jaxpr)
        lowered = traced.lower()
    traced_at = time.perf_counter()
    hbm = moved.total / machine.chip.bandwidth
    known = Bounds(hbm=hbm, matmul=None if flops is None else matmul_seconds(flops, machine.chip), links=0.0)
    base = Report(request, by_rule, moved, known, flops=flops, trace_seconds=traced_at - begin)
    say("compiling")
    try:
        compiled = lowered.compile(None if machine.tpu else {"xla_gpu_autotune_level": 0})
    except Exception as error:  # it does not fit, or the compiler refuses: both are results
        return dataclasses.replace(base, bounds=None, error=_reason(error), **_spent(traced_at))
    spent = _spent(traced_at)
    say("reading the program")
    program = CompiledProgram(compiled.as_text())
    nodes = [machine.node_of(device) for device in mesh.devices.flat]
    bounds = dataclasses.replace(known, links=links_seconds(program.collectives, machine, nodes))
    left_out: tuple[str, ...] = ()
    if folder:
        say("reading the schedule")
        cycles, left_out = static_bundles.read(folder).cycles(program, _touched(request, config, machine))
        if request.phase == "decode":
            cycles += static_bundles.index_cycles(config, machine, request.rows, request.context)
        bounds = dataclasses.replace(bounds, vector=cycles / machine.chip.clock)
    return dataclasses.replace(
        base,
        bounds=bounds,
        memory=_memory(machine, config, numerics, request, arguments, compiled.memory_analysis()),
        collectives=_collectives(program, machine, nodes),
        loops=_loops(program),
        kernels=program.kernels,
        kernels_per_reuse_layer=program.kernels_per_reuse_layer(),
        moves=tuple((m.operation, m.name, m.bytes, m.times) for m in program.large_moves(LARGE_MOVE)),
        unknown_loops=len(program.unknown_loops),
        left_out=left_out,
        **spent,
    )


def _flops(request: Request, machine: Topology, config: ModelConfig, jaxpr: Any) -> dict[str, float] | None:
    """FLOPs of one device by precision, with as many rows for its experts as uniform routing gives."""
    rows = request.batch * request.tokens * config.num_experts_per_tok / machine.devices
    if request.phase == "train":
        return None
    return jaxpr_work(jaxpr, expert_rows=rows, while_trips=0)


def _touched(request: Request, config: ModelConfig, machine: Topology) -> float:
    """Experts of a device that a step is expected to touch, in each layer."""
    tokens = request.batch * request.tokens
    return touched_experts(config.n_routed_experts, config.num_experts_per_tok, tokens) / machine.devices


def _memory(
    machine: Topology, config: ModelConfig, numerics: Numerics, request: Request, arguments: dict, analysis: Any
) -> Memory:
    parts = {name: sum(map(local_bytes, jax.tree.leaves(tree))) for name, tree in arguments.items()}
    memory = Memory(
        parts=parts,
        arguments=analysis.argument_size_in_bytes,
        scratch=analysis.temp_size_in_bytes,
        outputs=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
        limit=machine.chip.memory,
        tokens_left=0,
    )
    shards = request.layout.data * request.layout.tensor
    return dataclasses.replace(memory, tokens_left=shards * tokens_that_fit(config, max(memory.left, 0), 0, numerics))


def _collectives(program: CompiledProgram, machine: Topology, nodes: list[int]) -> tuple[CollectiveRow, ...]:
    grouped: dict[tuple[str, int], list[Collective]] = {}
    for collective in program.collectives:
        grouped.setdefault((collective.kind, collective.group), []).append(collective)
    rows = [
        CollectiveRow(
            kind=kind,
            group=group,
            instructions=len(found),
            runs=sum(c.times for c in found),
            bytes=sum(c.times * c.sent for c in found),
            seconds=links_seconds(found, machine, nodes),
            at_least=any(c.at_least for c in found),
            overlapped=sum(bool(c.overlapped) for c in found),
        )
        for (kind, group), found in grouped.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _loops(program: CompiledProgram) -> tuple[LoopRow, ...]:
    return tuple(
        LoopRow(
            depth=loop.depth,
            trips=loop.trips,
            times=loop.times,
            fusions=loop.kernels["fusion"],
            custom_calls=loop.kernels["custom-call"],
            collectives=loop.kernels["collective"],
            others=loop.others.total(),
            names=dict(loop.custom),
        )
        for loop in program.loops
    )


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wanted = [line for line in lines if "memory" in line.lower() or "exceed" in line.lower()]
    return f"{type(error).__name__}: {' '.join((wanted or lines)[:2])}"[:600]


def _spent(since: float) -> dict[str, float]:
    return {
        "compile_seconds": time.perf_counter() - since,
        "host_memory": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def main() -> None:
    """Read {"request": .., "mesh_by_rule": ..} from standard input, print a report as JSON."""
    jax.config.update("jax_enable_compilation_cache", False)  # a cached program has no schedule and another time
    asked = json.load(sys.stdin)
    try:
        found = report(Request(**asked["request"]), asked["mesh_by_rule"])
    except NoCompiler as error:
        print(error, file=sys.stderr)
        sys.exit(3)
    json.dump(dataclasses.asdict(found), sys.stdout)


if __name__ == "__main__":
    main()
