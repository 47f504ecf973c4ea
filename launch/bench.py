"""Measures speed. One subcommand for each thing measured; every number comes from one run, repeats interleaved.

    python launch/bench.py generate
    python launch/bench.py kernels
    python launch/bench.py kernels --static v5p v6e
    python launch/bench.py engram --gigabytes 8
    python launch/bench.py train
    python launch/bench.py serve --url=http://127.0.0.1:8000 --concurrency=1,4,16

`generate` prints tokens a second of prefill (by mode) and of decode (with and without drafts), by numerics, at batch 1.
Absolute numbers depend on the machine and on what else it does; the ratios to the first row of a kind are the result.

`kernels` prints the time of every operation's kernel beside its reference's, and the fraction reached of
max(bytes / copy, FLOPs / matmul), both measured first. With --static it compiles the kernels at released sizes for TPUs
that need not be there, and prints the instruction bundles of each program: a change can be ranked without a chip.

`engram` prints how many rows a second come from Engram tables off the device: host memory, and a file with its pages
and rows cached or not.

`serve` sends requests to a running server, as many at once or as many a second as it is told, and prints the time to
the first token, the time of each further one, and tokens a second. It computes nothing itself.

`train` prints the seconds of a training step, by parts, beside a plain `optax.adamw` loop without quantisation.
"""

from __future__ import annotations

import argparse

from dsv41_jax.benchmarks import engram, generate, kernels, train
from dsv41_jax.load_test import command as serve


def main(argv: list[str] | None = None) -> None:
    """Measure what the command line asks for; `argv` as on it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for each in (generate, kernels, engram, serve, train):
        each.add_command(commands)
    flags = parser.parse_args(argv)
    flags.run(flags)


if __name__ == "__main__":
    main()
