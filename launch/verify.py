"""Examines a released-format or Orbax folder: is this the model, whole and undamaged? Exit code 0 if so, else 1.

python launch/verify.py DeepSeek-V4.1-Flash
python launch/verify.py DeepSeek-V4.1-Flash --sample=0.05 --layers=1

Compares all tensors with config.json, with the checksums that a conversion recorded and, for the released model, with
published bytes; looks for numbers that are none; runs the first layers on a fixed sequence and prints what passes
through them. Of an Orbax folder leaves and checksums are compared. Reading all of the released model takes as long as
its 510 GB take to read (twice, if there are checksums), in less than 1 GB of memory; running the first layers takes
about 10 GB, and 13 GB for each of them (--layers).
"""

from __future__ import annotations

import argparse
import os
import sys


def main(argv: list[str] | None = None) -> int:
    """Check a folder and print the findings; `argv` as on the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", metavar="PATH", help="folder of the model")
    parser.add_argument("--layers", type=int, default=3, help="first layers to run, 0 for none (default: 3)")
    parser.add_argument(
        "--sample",
        type=float,
        default=1.0,
        help="share of the bytes whose numbers are looked at, in pieces of up to 16 MB spread evenly over all files, "
        "and of the tensors whose checksums are compared; damage between them is not seen (default: 1, all)",
    )
    flags = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the layers run in host memory

    from dsv41_jax.checkpoint.verify import verify

    try:
        return 1 if verify(flags.path, layers=flags.layers, sample=flags.sample) else 0
    except (ValueError, OSError) as error:
        print(f"verify: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
