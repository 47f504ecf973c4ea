"""Converts a model between the released format (safetensors) and an Orbax folder; every tensor keeps its bytes.

python launch/convert.py DeepSeek-V4.1-Flash flash-orbax --to=orbax
python launch/convert.py flash-orbax flash-again --to=released

One process, no accelerator. Host memory: the model without its Engram tables (308 GB for the released checkpoint) and
the largest weight once more (96 GB), or 2 GB if that is less. DST appears under its name only when complete.
"""

from __future__ import annotations

import argparse
import os
import sys


def main(argv: list[str] | None = None) -> int:
    """Convert a folder; `argv` as on the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SRC", help="folder of the model")
    parser.add_argument("target", metavar="DST", help="new folder")
    parser.add_argument("--to", required=True, choices=("orbax", "released"), help="format of DST")
    parser.add_argument("--force", action="store_true", help="replace DST if it holds a model")
    parser.add_argument(
        "--shard_bytes", type=int, default=5_000_000_000, help="limit of one safetensors file (default: 5 GB)"
    )
    flags = parser.parse_args(argv)
    if flags.shard_bytes < 1:
        parser.error(f"--shard_bytes={flags.shard_bytes}: at least 1 is needed")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the parameters pass through host memory

    from dsv41_jax.checkpoint.convert import convert

    try:
        convert(flags.source, flags.target, flags.to, force=flags.force, shard_bytes=flags.shard_bytes)
    except (ValueError, OSError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    print(f"{flags.target}: complete")
    return 0


if __name__ == "__main__":
    sys.exit(main())
