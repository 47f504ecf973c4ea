"""`bench.py engram`: rows a second from Engram tables off the device; see `engram_bench`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

from dsv41_jax import compile_cache, engram_bench
from dsv41_jax.benchmarks.machine import machine


def engram(flags: argparse.Namespace) -> None:
    """The measurement that the flags ask for, printed."""
    compile_cache.enable()
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


def add_command(commands: argparse._SubParsersAction) -> None:
    """The subcommand and its flags."""
    one = commands.add_parser("engram", help="rows a second of Engram tables in host memory and in a file")
    one.set_defaults(run=engram)
    one.add_argument("--gigabytes", type=float, default=2.0, help="size of the table that is made (default: 2)")
    one.add_argument("--folder", default=None, help="where its file is made (default: the system's temporary folder)")
    one.add_argument("--tokens", type=int, nargs="+", default=[64, 512], help="tokens of a call (default: 64 512)")
    one.add_argument("--calls", type=int, default=20, help="calls of a repeat (default: 20)")
    one.add_argument("--repeats", type=int, default=5, help="times each thing is measured (default: 5)")
    one.add_argument("--json", action="store_true", help="print JSON instead of a table")
