"""Converts a model between the released format (safetensors) and an Orbax folder; every tensor keeps its bytes.

python launch/convert.py DeepSeek-V4.1-Flash flash-orbax --to=orbax
python launch/convert.py deepseek-ai/DeepSeek-V4.1-Flash flash-orbax --to=orbax --revision=main --verify
python launch/convert.py flash-orbax flash-again --to=released

No accelerator. Tensors pass through in pieces of up to 8 MB: memory stays below 1 GB whatever the model's size. DST
appears under its name only when complete. Until then what is done is in .DST.partial beside it: after a kill, run the
same command again and it goes on.

Several processes, on one machine or on several that see the same DST, share the work: run the same command in each,
where --process and --processes say which one it is; under Slurm, on TPU slices and with JAX_NUM_PROCESSES these are
found. Process 0 waits for the others and completes DST; if one stays away it says which one that is. Run that one, and
process 0 again, or --finish.
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
    parser.add_argument("--process", type=int, metavar="I", help="which process this is, from 0 (default: found, or 0)")
    parser.add_argument("--processes", type=int, metavar="N", help="how many share the work (default: found, or 1)")
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
    if flags.process is not None and flags.processes is None:
        parser.error(f"--process={flags.process}: --processes is needed too")
    if flags.processes is not None and not 0 <= (flags.process or 0) < flags.processes:
        parser.error(f"--process={flags.process} --processes={flags.processes}: processes count from 0 to N - 1")
    if flags.processes is not None and flags.processes > 1 and flags.process is None and not flags.finish:
        parser.error(f"--processes={flags.processes}: --process is needed too")
    if not flags.wait > 0:
        parser.error(f"--wait={flags.wait:g}: must be positive")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed

    from dsv41_jax.checkpoint.conversion import Processes
    from dsv41_jax.checkpoint.convert import convert

    try:
        index, count = _processes(flags.process, flags.processes)
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


def _processes(process: int | None, processes: int | None) -> tuple[int, int]:
    """(number of this process, how many there are), as given or as the environment says."""
    if processes is not None:
        return process or 0, processes
    from dsv41_jax.cluster import find_cluster

    cluster = find_cluster()
    return (0, 1) if cluster is None else (cluster.process, cluster.processes)


if __name__ == "__main__":
    sys.exit(main())
