"""Reports as text: one in full, several as a table."""

from collections.abc import Iterable, Sequence

from dsv41_jax.chips import GB
from dsv41_jax.plan.report import Memory, Report

_BINDS = {"hbm": "HBM", "matmul": "matrix unit", "links": "links", "vector": "vector unit"}
_SHOWN_COLLECTIVES, _SHOWN_MOVES, _SHOWN_KERNELS = 8, 6, 9


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns are aligned."""
    rows = [list(map(str, row)) for row in rows]
    widths = [max(len(row[i]) for row in [list(heads), *rows]) for i in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(heads), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)])


def size(value: float) -> str:
    """Bytes for reading."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:,.2f} {unit}"
    return f"{value:,.0f} B"


def milliseconds(seconds: float | None) -> str:
    """For reading; empty where it is not known."""
    return "" if seconds is None else f"{1e3 * seconds:,.3f}" if seconds < 1e-3 else f"{1e3 * seconds:,.2f}"


def full(report: Report) -> str:
    """Everything that a report says."""
    request = report.request
    machine = request.machine
    chosen = "chosen by rule" if report.mesh_by_rule else "given"
    lines = [
        f"{machine.name}: {machine.chips} chips, {machine.devices} devices, {machine.hosts} hosts; "
        f"mesh {request.mesh} (data x context x tensor, {chosen})",
        f"{request.phase}: {request.batch} rows, {request.tokens} token{'s' * (request.tokens > 1)} each, cache of "
        f"{request.context:,} tokens a row; Engram on {request.engram}, experts in {request.expert_storage}",
        "",
    ]
    if report.error:
        verdict = "DOES NOT FIT" if "RESOURCE_EXHAUSTED" in report.error else "does not compile"
        lines += [f"{verdict}: {report.error}", ""]
    if report.memory:
        lines += [*_memory(report.memory), ""]
    if report.traffic:
        lines += [*_traffic(report), ""]
    if report.flops:
        parts = ", ".join(f"{name} {count / 1e9:,.1f}" for name, count in report.flops.items() if count)
        left_out = "; the optimizer's are left out" if report.weighted is None else ""
        lines += [f"GFLOP a device: {parts} (by the precision that the release multiplies in{left_out})"]
        if report.weighted:
            program, arithmetic = (count / 1e9 for count in report.weighted)
            lines += [f"weighted GFLOP a token: {program:.2f} in the program, {arithmetic:.2f} by arithmetic"]
        lines.append("")
    if report.memory:
        lines += [*_collectives(report), "", *_kernels(report), ""]
    if report.bounds:
        lines += [*_bounds(report), ""]
    if report.bounds and report.bounds.vector is None and machine.tpu:
        lines += ["The vector unit's bound needs --schedule: unpacking FP4 and FP8 weights often binds there.", ""]
    lines.append(
        f"traced in {report.trace_seconds:.1f} s, compiled in {report.compile_seconds:.1f} s "
        f"({report.processor_seconds:.0f} s of processors), {size(report.host_memory)} of host memory at most"
    )
    return "\n".join(lines)


def _memory(memory: Memory) -> list[str]:
    verdict = "fits" if memory.left >= 0 else "DOES NOT FIT"
    rows = [(name, size(value)) for name, value in memory.parts.items()]
    rows += [("padding of layouts", size(memory.padding)), ("scratch", size(memory.scratch))]
    rows += [("outputs", size(memory.outputs)), ("program", size(memory.code)), ("in all", size(memory.live))]
    rows += [("usable", size(memory.limit)), ("left", size(memory.left))]
    return [
        f"{verdict}: bytes on a device",
        markdown(("", "bytes"), rows),
        f"What is left holds {memory.tokens_left:,} more tokens of cache, over all devices.",
    ]


def _traffic(report: Report) -> list[str]:
    moved = report.traffic
    rows = [
        (f"routed experts ({moved.distinct_experts:.0f} of a layer's are touched)", moved.experts),
        ("other weights", moved.dense),
        ("rows of tables", moved.table_rows),
        ("cache: index keys", moved.index_keys),
        ("cache: main KV", moved.main_kv),
        ("cache: windows", moved.window),
        ("cache: written", moved.written),
        ("in all", moved.total),
    ]
    return [
        "bytes that a device must move in a step (each once, activations left out)",
        markdown(("", "bytes"), [(name, size(value)) for name, value in rows]),
    ]


def _collectives(report: Report) -> list[str]:
    if not report.collectives:
        return ["no collectives"]
    heads = ("collective", "devices", "instructions", "runs", "sent by a device", "at least ms", "overlapped")
    rows = [
        (
            row.kind,
            row.group,
            row.instructions,
            f"{row.runs}{'+' if row.at_least else ''}",
            size(row.bytes),
            milliseconds(row.seconds),
            row.overlapped,
        )
        for row in report.collectives[:_SHOWN_COLLECTIVES]
    ]
    more = len(report.collectives) - _SHOWN_COLLECTIVES
    return [
        "collectives of a step (+: and in loops whose trips the data decides, which count as none)",
        markdown(heads, rows),
        *([f"and {more} kinds more"] if more > 0 else []),
    ]


def _kernels(report: Report) -> list[str]:
    each = report.kernels_per_reuse_layer
    lines = [
        f"{report.kernels:,} kernels (fusions, custom calls, collectives) in a step; "
        + ("no loop over Reuse layers was found" if each is None else f"{each:.1f} in a Reuse layer")
    ]
    rows = [
        ("  " * loop.depth + ("step" if loop.depth == 0 else f"x {loop.trips or '?'}"),)
        + (loop.times, loop.fusions, loop.custom_calls, loop.collectives, loop.others)
        for loop in report.loops
    ]
    lines.append(markdown(("loop", "runs", "fusions", "custom calls", "collectives", "other operations"), rows))
    if report.unknown_loops:
        lines.append(f"{report.unknown_loops} loops run as often as the data asks; they count as none")
    if report.moves:
        lines.append("large instructions that only move data:")
        lines += [
            f"  {operation} {name}: {size(amount)} x {times}"
            for operation, name, amount, times in report.moves[:_SHOWN_MOVES]
        ]
        if len(report.moves) > _SHOWN_MOVES:
            lines.append(f"  and {len(report.moves) - _SHOWN_MOVES} more")
    return lines


def _bounds(report: Report) -> list[str]:
    bounds = report.bounds
    parts = ", ".join(f"{_BINDS[name]} {milliseconds(value)} ms" for name, value in bounds.known.items())
    lines = [
        f"a step takes at least: {parts}",
        f"{_BINDS[bounds.binding]} binds: at most {report.tokens_per_second:,.0f} tokens/s in all, "
        f"{report.tokens_per_second / report.request.batch:,.1f} a row",
    ]
    if report.vector:
        most = sorted(report.vector.items(), key=lambda item: -item[1])[:_SHOWN_KERNELS]
        lines.append("vector unit, ms: " + ", ".join(f"{name} {milliseconds(value)}" for name, value in most))
        lines.append(
            "These are bundles of the compiler's schedule at the clock. Loops whose length depends on the data count "
            f"once, in {', '.join(report.left_out[:10])}."
        )
    return lines


def table(reports: Sequence[Report]) -> str:
    """Several reports, a line each."""
    heads = (
        *("topology", "step", "mesh", "fits", "weights GB", "cache GB", "scratch GB", "left GB"),
        *(
            "HBM ms",
            "matmul ms",
            "links ms",
            "vector ms",
            "binds",
            "tokens/s <=",
            "kernels/Reuse",
            "compile s (CPU)",
            "host GB",
        ),
    )
    return markdown(heads, [_row(report) for report in reports])


def _row(report: Report) -> list[str]:
    request, memory, bounds = report.request, report.memory, report.bounds
    host = "" if request.engram == "device" else f", Engram {request.engram}"
    step = f"{request.phase} {request.batch} x {request.tokens}, {_short(request.context)}{host}"
    row = [request.topology, step, request.mesh, "yes" if report.fits else "no"]
    if memory:
        weights = memory.parts.get("params", memory.parts.get("state", 0))
        amounts = (weights, memory.parts.get("cache", 0), memory.scratch, memory.left)
        row += [f"{value / GB:.2f}" for value in amounts]
    else:
        row += [""] * 4
    if bounds:
        row += [milliseconds(value) for value in (bounds.hbm, bounds.matmul, bounds.links, bounds.vector)]
        row += [_BINDS[bounds.binding], f"{report.tokens_per_second:,.0f}"]
    else:
        row += [""] * 6
    each = report.kernels_per_reuse_layer
    return [
        *row,
        "" if each is None else f"{each:.0f}",
        f"{report.trace_seconds + report.compile_seconds:.0f} ({report.processor_seconds:.0f})",
        f"{report.host_memory / GB:.1f}",
    ]


def _short(tokens: int) -> str:
    for factor, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens % factor == 0:
            return f"{tokens // factor}{unit}"
    return str(tokens)
