"""Checks and times every kernel on this machine's accelerator, at the released sizes, on fresh random inputs.

    python launch/device_check.py                  all operations: a few minutes on one GPU or TPU chip
    python launch/device_check.py --quick          only what takes little memory and time
    python launch/device_check.py --ops moe mhc    some operations
    JAX_PLATFORMS=cpu python launch/device_check.py --implementation interpret    tiny sizes, no accelerator

Each workload runs as its kernel and as its reference, and the results are compared; then the kernel is timed. The
bound is max(bytes / copy, FLOPs / matmul), with the copy bandwidth and the bf16 matmul rate measured first, on the same
device. A time close to that of an empty call is marked: the host, not the kernel, was measured. Interpreted kernels are
not timed. The exit status is 1 if a result is outside its tolerance or a kernel fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from dsv41_jax import kernel_workloads
from dsv41_jax.kernel_workloads import OPERATIONS, Workload
from dsv41_jax.kernel_workloads.timing import Roofline, best_seconds, roofline


@dataclasses.dataclass
class Row:
    """A line of the table. `error` is what went wrong, if anything did."""

    op: str
    name: str
    difference: str = ""
    within: bool = False
    seconds: float | None = None
    bytes_per_second: float | None = None
    fraction: float | None = None
    host_bound: bool = False
    error: str = ""


def check(work: Workload, key: jax.Array, implementation: str) -> tuple[Row, Callable[[Any], Any], Any]:
    """Compare the kernel with the reference; returns the row, the compiled kernel and arguments for timing it."""
    arguments = jax.jit(work.make)(key)
    few = work.part(arguments) if work.part else arguments
    want = jax.block_until_ready(jax.jit(lambda a: work.call(a, "reference"))(few))
    kernel = work.jitted(implementation)
    out = jax.block_until_ready(kernel(arguments))
    compared = work.compare(out, want)
    return Row(work.op, work.name, str(compared), compared.within), kernel, work.again(arguments, out)


def measure(work: Workload, key: jax.Array, implementation: str, line: Roofline) -> Row:
    """Check and time one workload."""
    try:
        row, kernel, arguments = check(work, key, implementation)
        if implementation == "interpret":
            return row
        row.seconds = best_seconds(kernel, arguments, work.again)
    except Exception as error:  # a kernel that fails must not hide the others
        return Row(work.op, work.name, error=f"{type(error).__name__}: {error}".splitlines()[0][:200])
    row.bytes_per_second = work.bytes / row.seconds
    row.fraction = line.bound(work) / row.seconds
    row.host_bound = row.seconds < 2 * line.call
    return row


def text_of(row: Row) -> str:
    """A row of the table."""
    start = f"{row.op:<17} {row.name:<32}"
    if row.error:
        return f"{start} FAILED  {row.error}"
    difference = row.difference if row.within else f"WRONG {row.difference}"
    if row.seconds is None:
        return f"{start} {difference}"
    mark = " (host)" if row.host_bound else ""
    speed = f"{row.seconds * 1e3:>10.3f} {row.bytes_per_second / 1e9:>9.1f} {row.fraction:>6.0%}{mark}"
    return f"{start} {difference:<18} {speed}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Flags; refuses a machine without an accelerator unless kernels are interpreted."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ops", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), help="what to check")
    parser.add_argument("--seed", type=int, help="of the random inputs; by default another one each time")
    parser.add_argument("--quick", action="store_true", help="leave out workloads of many gigabytes")
    parser.add_argument("--json", metavar="FILE", help="also write the rows and the roofline to a file")
    parser.add_argument(
        "--implementation",
        default="auto",
        choices=("auto", "tpu", "gpu", "interpret"),
        help="auto: the kernels of the accelerator; interpret: the TPU kernels, interpreted, at tiny sizes",
    )
    flags = parser.parse_args(arguments)
    if flags.implementation != "interpret" and jax.default_backend() == "cpu":
        parser.error(
            "JAX sees no accelerator here (only CPUs). Kernels are checked on a GPU or TPU; for a tiny dry run "
            "without one, use --implementation=interpret"
        )
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit status."""
    flags = parse(arguments)
    tiny = flags.implementation == "interpret"
    seed = time.time_ns() % 2**31 if flags.seed is None else flags.seed
    device = jax.devices()[0]
    print(f"{device.platform} {device.device_kind}, jax {jax.__version__}, seed {seed}")
    line = roofline(tiny)
    print(f"measured: {line}")
    print(f"{'operation':<17} {'inputs':<32} {'max error':<18} {'ms':>10} {'GB/s':>9} {'bound':>6}")
    rows = []
    for number, work in enumerate(kernel_workloads.workloads("tiny" if tiny else "released", flags.ops)):
        if flags.quick and work.large:
            continue
        key = jax.random.fold_in(jax.random.key(seed), number)
        rows.append(measure(work, key, flags.implementation, line))
        print(text_of(rows[-1]), flush=True)
    if flags.json:
        with open(flags.json, "w", encoding="utf-8") as file:
            about = {"device": device.device_kind, "jax": jax.__version__, "seed": seed}
            rows_of = [dataclasses.asdict(row) for row in rows]
            json.dump({**about, "roofline": dataclasses.asdict(line), "rows": rows_of}, file, indent=1)
    bad = [row for row in rows if row.error or not row.within]
    print(f"{len(rows) - len(bad)} of {len(rows)} workloads right")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
