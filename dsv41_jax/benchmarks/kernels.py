"""`bench.py kernels`: the time of every kernel beside its reference's, or its instruction bundles."""

from __future__ import annotations

import argparse
import dataclasses
import json

import jax
from tqdm import tqdm

from dsv41_jax import compile_cache
from dsv41_jax.benchmarks.machine import machine
from dsv41_jax.kernel_workloads import OPERATIONS, Workload, workloads
from dsv41_jax.kernel_workloads.timing import Roofline, best_seconds, roofline
from pallas_kernels.implementation import resolve
from pallas_kernels.schedule import Loop

TPU_GENERATIONS = ("v5e", "v5p", "v6e", "v7x")


def kernel_row(work: Workload, key: jax.Array, implementation: str, line: Roofline) -> dict[str, object]:
    """Times of a workload's kernel and of its reference, and what part of the bound the kernel reaches."""
    arguments = jax.jit(work.make)(key)
    few = work.part(arguments) if work.part else arguments
    reference = best_seconds(jax.jit(lambda a: work.call(a, "reference")), few)
    kernel = work.jitted(implementation)
    seconds = best_seconds(kernel, work.again(arguments, kernel(arguments)), work.again)
    return {
        "op": work.op,
        "workload": work.name,
        "reference_ms": 1e3 * reference,
        "reference_of_a_part": work.part is not None,
        "kernel_ms": 1e3 * seconds,
        "ratio": reference / seconds,
        "of_bound": line.bound(work) / seconds,
    }


def kernels(flags: argparse.Namespace) -> None:
    """The measurement that the flags ask for, printed."""
    compile_cache.enable()
    if flags.static:
        kernels_static(flags)
        return
    accelerator = jax.default_backend() != "cpu"
    implementation = resolve("bench", "auto") if accelerator else "interpret"
    line = roofline(tiny=not accelerator)
    facts = machine() | {"implementation": implementation}
    if not accelerator:
        facts["note"] = "no accelerator: tiny sizes, kernels interpreted; the times say nothing about accelerators"
    works = workloads("released" if accelerator else "tiny", flags.ops)
    works = [work for work in works if not (flags.quick and work.large)]
    rows = [
        kernel_row(work, jax.random.fold_in(jax.random.key(0), i), implementation, line)
        for i, work in enumerate(tqdm(works, desc="timing"))
    ]
    if flags.json:
        print(json.dumps({"machine": facts, "roofline": dataclasses.asdict(line), "results": rows}, indent=1))
        return
    print(", ".join(f"{name}: {value}" for name, value in facts.items()))
    print(f"measured: {line}")
    lines = ["| op | workload | reference ms | kernel ms | ratio | of the bound |", "|---|---|---|---|---|---|"]
    for row in rows:
        part = " (first rows only)" if row["reference_of_a_part"] else ""
        times = f"{row['reference_ms']:.3f}{part} | {row['kernel_ms']:.3f}"
        lines.append(f"| {row['op']} | {row['workload']} | {times} | {row['ratio']:.2f} | {row['of_bound']:.1%} |")
    print("\n".join(lines))


def kernels_static(flags: argparse.Namespace) -> None:
    """`bench.py kernels --static`."""
    from dsv41_jax.kernel_workloads.static import static_costs  # sets libtpu up, which generation must not see

    works = workloads("released", flags.ops)
    works = [work for work in works if not (flags.quick and work.large)]
    costs, bar = [], tqdm(total=len(works) * len(flags.static), desc="compiling")
    for cost in static_costs(flags.static, works):
        costs.append(cost)
        bar.update()
    bar.close()
    if flags.json:
        fields = ("generation", "bundles", "error")
        rows = [{"workload": c.work.name, "unit": c.work.unit, "each": c.each} for c in costs]
        rows = [row | {name: getattr(c, name) for name in fields} for row, c in zip(rows, costs, strict=True)]
        print(json.dumps(rows, indent=1))
        return
    lines = ["| op | workload | TPU | bundles | | programs |", "|---|---|---|---|---|---|"]
    for cost in costs:
        start = f"| {cost.work.op} | {cost.work.name} | {cost.generation} |"
        if cost.error:
            lines.append(f"{start} does not compile | | {cost.error} |")
            continue
        total = sum(filter(None, cost.bundles.values()))
        if None in cost.bundles.values():
            counted = f"{total:,} and loops whose length depends on the data |"
        elif cost.each < 0.1:
            counted = f"{total:,} | {1 / cost.each:,.0f} {cost.work.unit}s a bundle"
        else:
            counted = f"{total:,} | {cost.each:,.2f} a {cost.work.unit}"
        known = [f"{name} {'?' if n is None else f'{n:,}'}" for name, n in cost.bundles.items()]
        lines.append(f"{start} {counted} | {', '.join(known[:4])} |")
    print("\n".join(lines))
    if flags.loops:
        for cost in costs:
            for program in cost.programs[: flags.loops]:
                print(
                    f"\n{cost.work.name}, {cost.generation}: {program.name}, {program.straight} bundles outside loops"
                )
                print(loops_text(program.loops))


def loops_text(loops: list[Loop]) -> str:
    """One line for each loop, indented by its depth."""
    lines = []
    for loop in loops:
        counts = f"{loop.own} bundles, {loop.dmas} copies, {loop.matmuls} matrix instructions"
        lines.append(f"{'  ' * loop.depth}loop x {'?' if loop.trips is None else loop.trips}: {counts}")
        lines += filter(None, [loops_text(loop.inner)])
    return "\n".join(lines)


def add_command(commands: argparse._SubParsersAction) -> None:
    """The subcommand and its flags."""
    one = commands.add_parser("kernels", help="every kernel against its reference and against the roofline")
    one.set_defaults(run=kernels)
    one.add_argument("--ops", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), help="default: all")
    one.add_argument("--quick", action="store_true", help="leave out workloads of many gigabytes")
    one.add_argument(
        "--static",
        nargs="+",
        choices=list(TPU_GENERATIONS),
        metavar="TPU",
        help="bundles from the TPU compiler's schedule",
    )
    one.add_argument(
        "--loops", type=int, default=1, help="with --static: programs whose loops are printed (default: 1)"
    )
    one.add_argument("--json", action="store_true", help="print JSON instead of a table")
