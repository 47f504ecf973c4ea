"""Converts a model between the released format (safetensors) and an Orbax folder; every tensor keeps its bytes.

python launch/convert.py DeepSeek-V4.1-Flash flash-orbax --to=orbax
python launch/convert.py deepseek-ai/DeepSeek-V4.1-Flash flash-orbax --to=orbax --revision=main --verify
python launch/convert.py flash-orbax flash-again --to=released

No accelerator. Tensors pass through in pieces of up to 32 MB: memory stays below 1 GB whatever the model's size. DST
appears under its name only when complete. Until then what is done is in .DST.partial beside it: after a kill, run the
same command again and it goes on.

Several processes, on one machine or on several that see the same DST, share the work: start each with its --process
and the same --processes (or all with --distributed, where jax.distributed knows them). Process 0 waits for the others
and completes DST; if one stays away it says which, and after that one was run, --finish completes DST.
"""

from __future__ import annotations

import argparse
import os
import sys


def main(argv: list[str] | None = None) -> int:
    """Convert a folder; `argv` as on the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SRC", help='folder of the model, or a hub id "owner/name"')
    parser.add_argument("target", metavar="DST", help="new folder")
    parser.add_argument("--to", required=True, choices=("orbax", "released"), help="format of DST")
    parser.add_argument("--revision", help="of a hub id: a branch, tag or commit (default: the newest)")
    parser.add_argument("--force", action="store_true", help="replace DST if it holds a model; one process only")
    parser.add_argument(
        "--shard_bytes", type=int, default=5_000_000_000, help="limit of one safetensors file (default: 5 GB)"
    )
    parser.add_argument("--process", type=int, default=0, metavar="I", help="which process this is (default: 0)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="how many share the work (default: 1)")
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="take I and N from jax.distributed, which knows them under Slurm, Open MPI, on GKE and on TPU VMs",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="process 0 gives up when no process has shown progress for so long (default: 600)",
    )
    parser.add_argument("--finish", action="store_true", help="convert nothing, complete DST if all shares are done")
    parser.add_argument("--verify", action="store_true", help="read DST again and compare the checksums of all tensors")
    flags = parser.parse_args(argv)
    if flags.shard_bytes < 1:
        parser.error(f"--shard_bytes={flags.shard_bytes}: at least 1 is needed")
    if not 0 <= flags.process < flags.processes:
        parser.error(f"--process={flags.process} --processes={flags.processes}: processes count from 0 to N - 1")
    if flags.distributed and (flags.process, flags.processes) != (0, 1):
        parser.error("--distributed says which process this is; leave out --process and --processes")
    if flags.force and (flags.distributed or flags.processes > 1):
        parser.error("--force is for a single process; with several, move the old DST away first")
    if flags.finish and (flags.distributed or flags.process):
        parser.error("--finish is for process 0 alone, with the --processes of the others")
    if not flags.wait > 0:
        parser.error(f"--wait={flags.wait:g}: must be positive")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed

    from dsv41_jax.checkpoint.conversion import Processes
    from dsv41_jax.checkpoint.convert import convert

    try:
        index, count = _distributed() if flags.distributed else (flags.process, flags.processes)
        convert(
            flags.source,
            flags.target,
            flags.to,
            revision=flags.revision,
            force=flags.force,
            shard_bytes=flags.shard_bytes,
            processes=Processes(index, count, flags.wait),
            finish=flags.finish,
            verify=flags.verify,
        )
    except (ValueError, OSError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("convert: interrupted; what is done is kept: run the same command to go on", file=sys.stderr)
        return 130
    return 0


def _distributed() -> tuple[int, int]:
    """(number of this process, how many there are). All have to be there; after that they need not be any more."""
    import jax

    try:
        jax.distributed.initialize()
        found = jax.process_index(), jax.process_count()
        jax.distributed.shutdown()
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"jax.distributed: {error}") from error
    return found


if __name__ == "__main__":
    sys.exit(main())
