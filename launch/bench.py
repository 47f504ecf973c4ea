"""Measures speed. One subcommand for each thing measured; every number comes from one run, repeats interleaved.

    python launch/bench.py generate
    python launch/bench.py kernels
    python launch/bench.py kernels --static v5p v6e
    python launch/bench.py engram --gigabytes 8

`generate` prints tokens a second of prefill (by mode) and of decode (with and without drafts), by numerics, at batch 1.
Absolute numbers depend on the machine and on what else it does; the ratios to the first row of a kind are the result.

`kernels` prints the time of every operation's kernel beside its reference's, and the fraction reached of
max(bytes / copy, FLOPs / matmul), both measured first. With --static it compiles the kernels at released sizes for TPUs
that need not be there, and prints the instruction bundles of each program: a change can be ranked without a chip.

`engram` prints how many rows a second come from Engram tables off the device: host memory, and a file with its pages
and rows cached or not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

import dsv41_jax as ds
from dsv41_jax import ced, compile_cache, engram_bench
from dsv41_jax.kernel_workloads import OPERATIONS, Workload, workloads
from dsv41_jax.kernel_workloads.timing import Roofline, best_seconds, roofline
from dsv41_jax.sampling import SamplingOptions
from dsv41_jax.speculation import SpeculationStats, speculative_loop
from dsv41_jax.token_loop import Request, check_options, make_request, token_loop
from pallas_kernels.implementation import resolve
from pallas_kernels.schedule import Loop

TPU_GENERATIONS = ("v5e", "v5p", "v6e", "v7x")
NUMERICS = ("released", "noquant", "float32")
TEXT = (
    "And it came to pass in those days, that the word of the Lord came unto the people, and they heard it gladly. "
    "The heavens declare the glory of God, and the earth is full of his mercy. "
    "Blessed is the man that walketh not in the counsel of the ungodly, nor standeth in the way of sinners. "
)


@dataclasses.dataclass
class Case:
    """One thing measured.

    Attributes:
        kind: "prefill" or "decode"; ratios are to the first case of a kind.
        run: does it once, and gives (tokens, seconds).
        accepted: mean drafts accepted in a round, so far; None without drafts.
    """

    kind: str
    numerics: str
    how: str
    run: Callable[[], tuple[int, float]]
    accepted: Callable[[], float] | None = None
    speeds: list[float] = dataclasses.field(default_factory=list)


def machine() -> dict[str, object]:
    """What the numbers were measured on, and how busy it is with other work: load is of the last minute."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (FileNotFoundError, StopIteration):
        cpu = platform.processor() or platform.machine()
    device = jax.devices()[0]
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "device": f"{device.platform} {device.device_kind} x {jax.device_count()}",
        "jax": jax.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def measure(cases: list[Case], repeats: int) -> None:
    """Run every case once to compile, then `repeats` times in turn; speeds are appended to the cases."""
    with tqdm(total=len(cases) * (repeats + 1), desc="compiling") as bar:
        for repeat in range(repeats + 1):
            for case in cases:
                tokens, seconds = case.run()
                if repeat:
                    case.speeds.append(tokens / seconds)
                bar.update()
            bar.set_description("measuring")


def results(cases: list[Case]) -> list[dict[str, object]]:
    """Median speeds, their spread, and ratios to the first case of the kind."""
    base: dict[str, float] = {}
    rows = []
    for case in cases:
        median = statistics.median(case.speeds)
        rows.append(
            {
                "kind": case.kind,
                "numerics": case.numerics,
                "how": case.how,
                "tokens_per_second": median,
                "slowest": min(case.speeds),
                "fastest": max(case.speeds),
                "ratio": median / base.setdefault(case.kind, median),
                "accepted": None if case.accepted is None else case.accepted(),
            }
        )
    return rows


def table(rows: list[dict[str, object]]) -> str:
    """Results in Markdown."""
    lines = [
        "| | numerics | how | tokens/s (slowest to fastest) | ratio | drafts accepted |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        speed = "{tokens_per_second:.1f} ({slowest:.1f} to {fastest:.1f})".format(**row)
        accepted = "" if row["accepted"] is None else f"{row['accepted']:.2f}"
        lines.append(
            f"| {row['kind']} | {row['numerics']} | {row['how']} | {speed} | {row['ratio']:.2f} | {accepted} |"
        )
    return "\n".join(lines)


# --- generate --------------------------------------------------------------------------------------------------------


def prefill_case(model: ds.Model, mode: str, tokens: np.ndarray) -> Case:
    """Reading one prompt int32 [n] into a new cache."""

    def run() -> tuple[int, float]:
        start = time.perf_counter()
        jax.block_until_ready(model.prefill(tokens[None], mode=mode)[0])
        return len(tokens), time.perf_counter() - start

    return Case("prefill", model.numerics, mode, run)


def decode_case(model: ds.Model, request: Request, temperature: float, drafts: bool) -> Case:
    """One row of tokens, from the first to the last one."""
    stats = SpeculationStats(model.config.dspark_block_size)

    def run() -> tuple[int, float]:
        loop = speculative_loop(model, request, set(), stats) if drafts else token_loop(model, request, set())
        next(loop)  # read the prompt
        start = time.perf_counter()
        return sum(1 for _ in loop), time.perf_counter() - start

    how = f"temperature {temperature:g}, {'drafts' if drafts else 'no drafts'}"
    return Case("decode", model.numerics, how, run, (lambda: stats.mean_accepted) if drafts else None)


def generate_cases(model: ds.Model, flags: argparse.Namespace) -> list[Case]:
    """The cases of one model."""
    config, text = model.config, model.require_tokenizer().encode(TEXT, add_bos=True)
    tokens = np.resize(np.array(text, np.int32), flags.prompt_tokens)
    modes = [mode for mode in ced.PREFILL_MODES[::-1] if mode == "exact" or config.supports_ced]
    cases = [prefill_case(model, mode, tokens) for mode in modes]
    for temperature in flags.temperatures:
        # Nothing ends the text early: every run has as many tokens.
        options = dataclasses.replace(
            check_options(
                config, max_new_tokens=flags.new_tokens + 1, sampling=SamplingOptions(temperature=temperature)
            ),
            stop_ids=frozenset(),
        )
        request = make_request(config, [text], options)
        cases += [
            decode_case(model, request, temperature, drafts) for drafts in (False, True)[: 1 + bool(config.n_draft)]
        ]
    return cases


def generate(flags: argparse.Namespace) -> None:
    """`bench.py generate`."""
    facts = machine()
    cases = []
    for numerics in flags.numerics:
        cases += generate_cases(ds.load(flags.model, numerics=numerics), flags)
    cases.sort(key=lambda case: case.kind, reverse=True)  # prefill first; the order of numerics stays
    measure(cases, flags.repeats)
    rows = results(cases)
    facts["load_after"] = round(os.getloadavg()[0], 2)
    if flags.json:
        settings = {name: getattr(flags, name) for name in ("model", "prompt_tokens", "new_tokens", "repeats")}
        print(json.dumps({"machine": facts, "settings": settings, "results": rows}, indent=1))
        return
    print(", ".join(f"{name}: {value}" for name, value in facts.items()))
    sizes = f"prompts of {flags.prompt_tokens} tokens, {flags.new_tokens} new ones, median of {flags.repeats}"
    print(f"{flags.model}: {sizes}")
    print(table(rows))


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
    """`bench.py kernels`."""
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


def engram(flags: argparse.Namespace) -> None:
    """`bench.py engram`."""
    rows = int(flags.gigabytes * 1e9) // engram_bench.ROW_BYTES
    with tempfile.TemporaryDirectory(dir=flags.folder, prefix="engram-bench-") as folder:
        found = engram_bench.measure(Path(folder) / "table.bin", rows, flags.tokens, flags.calls, flags.repeats)
    facts = machine() | {"table_rows": rows, "table_bytes": rows * engram_bench.ROW_BYTES}
    if flags.json:
        print(json.dumps({"machine": facts, "results": [dataclasses.asdict(one) for one in found]}, indent=1))
        return
    print(", ".join(f"{name}: {value}" for name, value in facts.items()))
    print(f"calls of {engram_bench.COLUMNS} rows a token, {flags.calls} calls, median of {flags.repeats}")
    print(engram_bench.table(found))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "generate", help="prefill and decode tokens/s by numerics and mode, with and without drafts"
    )
    one.set_defaults(run=generate)
    one.add_argument("--model", default="demo", help='"demo" or a folder that ds.load takes (default: demo)')
    one.add_argument("--numerics", nargs="+", choices=NUMERICS, default=list(NUMERICS), help="default: all three")
    one.add_argument("--prompt_tokens", type=int, default=1024, help="length of the prompts read (default: 1024)")
    one.add_argument("--new_tokens", type=int, default=64, help="tokens decoded after the first one (default: 64)")
    one.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="of decoding (default: 0 1)")
    one.add_argument("--repeats", type=int, default=5, help="times each thing is measured (default: 5)")
    one.add_argument("--json", action="store_true", help="print JSON instead of a table")
    two = commands.add_parser("kernels", help="every kernel against its reference and against the roofline")
    two.set_defaults(run=kernels)
    two.add_argument("--ops", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), help="default: all")
    two.add_argument("--quick", action="store_true", help="leave out workloads of many gigabytes")
    two.add_argument(
        "--static",
        nargs="+",
        choices=list(TPU_GENERATIONS),
        metavar="TPU",
        help="bundles from the TPU compiler's schedule",
    )
    two.add_argument(
        "--loops", type=int, default=1, help="with --static: programs whose loops are printed (default: 1)"
    )
    two.add_argument("--json", action="store_true", help="print JSON instead of a table")
    three = commands.add_parser("engram", help="rows a second of Engram tables in host memory and in a file")
    three.set_defaults(run=engram)
    three.add_argument("--gigabytes", type=float, default=2.0, help="size of the table that is made (default: 2)")
    three.add_argument("--folder", default=None, help="where its file is made (default: the system's temporary folder)")
    three.add_argument("--tokens", type=int, nargs="+", default=[64, 512], help="tokens of a call (default: 64 512)")
    three.add_argument("--calls", type=int, default=20, help="calls of a repeat (default: 20)")
    three.add_argument("--repeats", type=int, default=5, help="times each thing is measured (default: 5)")
    three.add_argument("--json", action="store_true", help="print JSON instead of a table")
    flags = parser.parse_args(argv)
    compile_cache.enable()
    flags.run(flags)


if __name__ == "__main__":
    main()
