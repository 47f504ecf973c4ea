"""Compiles one step in a process of its own: `python -m dsv41_jax.plan.worker`, a request as JSON in, a report out.

A process for each step, so that its memory is given back, and because libtpu takes its flags once.
"""

import dataclasses
import functools
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dsv41_jax import accounting
from dsv41_jax.compiled_program import Collective, CompiledProgram
from dsv41_jax.numerics import RELEASED
from dsv41_jax.plan import static_bundles
from dsv41_jax.plan.bounds import Bounds, links_seconds, matmul_seconds
from dsv41_jax.plan.report import CollectiveRow, LoopRow, Memory, Report
from dsv41_jax.plan.request import STEP_OPTIONS, Request
from dsv41_jax.plan.traffic import local_bytes, traffic
from dsv41_jax.sharded_step import abstract_step
from dsv41_jax.topologies import NoCompiler
from pallas_kernels import schedule

LARGE_MOVE = 8 << 20  # bytes; smaller copies are not listed


def say(text: str) -> None:
    """Progress, for whoever started this process."""
    print(text, file=sys.stderr, flush=True)


class PlannedStep:
    """The step of a checked request, on devices that need not be there.

    Attributes:
        step: see `sharded_step.AbstractStep`.
    """

    def __init__(self, request: Request):
        self.request, self.machine, self.config = request, request.machine, request.model
        self.numerics = RELEASED.computed_by("tpu" if self.machine.tpu else "gpu")
        self.mesh = request.layout.mesh(self.machine.jax_devices())
        options = {name: getattr(request, name) for name in STEP_OPTIONS}
        if request.phase == "train":
            from dsv41_jax.training.planned import abstract_training_step, planned_settings

            settings = request.training or planned_settings(request.batch, request.context)
            self.step = abstract_training_step(self.config, self.mesh, settings)
        else:
            self.step = abstract_step(self.config, self.numerics, self.mesh, **options)

    @property
    def arguments(self) -> dict[str, Any]:
        """Descriptions of the arguments, by name."""
        return dict(zip(self.step.names, self.step.arguments, strict=True))

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of the arguments on a device, by name."""
        return {name: sum(map(local_bytes, jax.tree.leaves(tree))) for name, tree in self.arguments.items()}

    @functools.cached_property
    def traced(self) -> jax.stages.Traced:
        """The step as a jaxpr. Arguments that it does not use stay: they are in memory all the same."""
        jitted = jax.jit(self.step.function, donate_argnums=self.step.donate, keep_unused=True)
        with jax.set_mesh(self.mesh):  # kernels ask which generation they are for
            return jitted.trace(*self.step.arguments)

    @functools.cached_property
    def flops(self) -> dict[str, float]:
        """FLOPs of one device by precision, with as many rows for its experts as uniform routing gives."""
        chosen = self.request.batch * self.request.tokens * self.config.num_experts_per_tok
        training = self.request.phase == "train"
        # Serving's first round of an exchange is outside of its loop. The optimizer's products are outside of any
        # shard_map, in the shapes of all devices together: they are left out.
        return accounting.jaxpr_work(
            self.traced.jaxpr,
            expert_rows=chosen / self.machine.devices,
            while_trips=1 if training else 0,
            spread_only=training,
        )

    @property
    def weighted(self) -> tuple[float, float] | None:
        """FLOPs of a token, weighted: as the program has them, on all devices together, and by closed arithmetic for
        the last tokens of the context. None for training, for which there is no such arithmetic.
        """
        request = self.request
        if request.phase == "train":
            return None
        counted = accounting.weighted(self.flops) * self.machine.devices / (request.batch * request.tokens)
        contexts = np.arange(request.context - request.tokens + 1, request.context + 1)
        encoder = request.phase == "prefill"
        expected = accounting.phase(
            self.config,
            contexts,
            "encoder" if encoder else "all",
            logits=0 if encoder else request.tokens,
            draft_windows=not encoder,
        )
        return counted, expected.weighted()

    def compiled(self) -> jax.stages.Compiled:
        """The program for the devices."""
        with jax.set_mesh(self.mesh):
            lowered = self.traced.lower()
        return lowered.compile(None if self.machine.tpu else {"xla_gpu_autotune_level": 0})

    def cycles(self, program: CompiledProgram, folder: Path) -> tuple[dict[str, float], tuple[str, ...]]:
        """Bundles of a core in a step by kernel, from the schedules in a folder; see `static_bundles`."""
        request, config, devices = self.request, self.config, self.machine.devices
        tokens, chosen = request.batch * request.tokens, config.num_experts_per_tok
        touched = accounting.touched_experts(config.n_routed_experts, chosen, tokens)
        load = static_bundles.ExpertLoad(touched / devices, tokens * chosen / devices)
        steps = static_bundles.static_steps(self.traced.jaxpr)
        cycles, partly = static_bundles.read(folder).cycles(program, load, steps)
        if request.phase == "decode":
            index = static_bundles.index_cycles(config, self.machine, request.rows, request.context)
            cycles = cycles | {static_bundles.INDEX: index}
        return cycles, partly

    def memory(self, analysis: Any) -> Memory:
        """From a compiled program's `memory_analysis()`."""
        memory = Memory(
            parts=self.parts,
            arguments=analysis.argument_size_in_bytes,
            scratch=analysis.temp_size_in_bytes,
            outputs=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            code=analysis.generated_code_size_in_bytes,
            limit=self.machine.chip.memory,
            tokens_left=0,
        )
        shards = self.request.layout.data * self.request.layout.tensor
        room = accounting.tokens_that_fit(self.config, max(memory.left, 0), 0, self.numerics)
        return dataclasses.replace(memory, tokens_left=shards * room)


def report(request: Request, by_rule: bool) -> Report:
    """Build, compile and read the step of a checked request; before libtpu is used, if its schedule is asked for."""
    with tempfile.TemporaryDirectory(prefix="schedule") as name:
        folder = Path(name) / "dumped" if request.schedule else None
        if folder:
            schedule.dump_to(folder)
        say("tracing")
        begin = time.perf_counter()
        planned = PlannedStep(request)
        chip = planned.machine.chip
        moved = traffic(planned.config, planned.numerics, planned.step.arguments[0], request)
        bounds = Bounds(hbm=moved.total / chip.bandwidth, matmul=matmul_seconds(planned.flops, chip), links=0.0)
        traced = time.perf_counter()
        found = Report(request, by_rule, moved, flops=planned.flops, weighted=planned.weighted)
        found = dataclasses.replace(found, trace_seconds=traced - begin)
        say("compiling")
        try:
            compiled = planned.compiled()
        except Exception as error:  # it does not fit, or the compiler refuses: both are results
            parts = ", ".join(f"{name} {count / 1e9:.2f} GB" for name, count in planned.parts.items())
            return dataclasses.replace(found, error=f"{_reason(error)} Arguments alone: {parts}.", **_spent(traced))
        found = dataclasses.replace(found, **_spent(traced), memory=planned.memory(compiled.memory_analysis()))
        say("reading the program")
        program = CompiledProgram(compiled.as_text())
        if request.hlo:
            name = f"{request.topology}-{request.phase}-{request.mesh}.hlo".replace(":", "-")
            (Path(request.hlo) / name).write_text(compiled.as_text())
        nodes = [planned.machine.node_of(device) for device in planned.mesh.devices.flat]
        bounds = dataclasses.replace(bounds, links=links_seconds(program.collectives, planned.machine, nodes))
        if folder:
            say("reading the schedule")
            cycles, partly = planned.cycles(program, folder)
            vector = {name: count / chip.clock for name, count in cycles.items()}
            bounds = dataclasses.replace(bounds, vector=sum(vector.values()))
            found = dataclasses.replace(found, vector=vector, left_out=partly)
        return dataclasses.replace(
            found,
            bounds=bounds,
            collectives=_collectives(planned, program, nodes),
            loops=_loops(program),
            kernels=program.kernels,
            kernels_per_reuse_layer=program.kernels_per_reuse_layer(),
            moves=tuple((m.operation, m.name, m.bytes, m.times) for m in program.large_moves(LARGE_MOVE)),
            unknown_loops=len(program.unknown_loops),
        )


def _collectives(planned: PlannedStep, program: CompiledProgram, nodes: list[int]) -> tuple[CollectiveRow, ...]:
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
            seconds=links_seconds(found, planned.machine, nodes),
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
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "compile_seconds": time.perf_counter() - since,
        "host_memory": 1024 * used.ru_maxrss,
        "processor_seconds": used.ru_utime + used.ru_stime,
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
