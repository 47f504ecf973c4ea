"""Prints the continuation of a prompt, piece by piece.

python launch/generate.py --model=demo --prompt="The harbour"
"""

from __future__ import annotations

import argparse
import sys

import dsv41_jax as ds
from dsv41_jax import compile_cache


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help='"demo", a released-format folder, or a hub id (default: demo)')
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max_new_tokens", type=int, default=60, help="most tokens to write (default: 60)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest token (default: 1)")
    parser.add_argument("--top_k", type=int, default=None, help="sample from the k likeliest tokens only")
    parser.add_argument("--top_p", type=float, default=None, help="sample from the likeliest tokens of this total mass")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument(
        "--numerics",
        default="released",
        choices=("released", "noquant", "float32"),
        help="released: bf16 with fp8 and fp4 as the release; noquant: bf16; float32 (default: released)",
    )
    parser.add_argument(
        "--compilation_cache",
        default=None,
        help="folder that keeps compiled programs for the next run (default: a folder in the user's cache)",
    )
    flags = parser.parse_args(argv)

    compile_cache.enable(flags.compilation_cache)
    print(f"loading {flags.model}; the first run of a model compiles it, which takes a while", file=sys.stderr)
    model = ds.load(flags.model, numerics=flags.numerics)
    sys.stdout.write(flags.prompt)
    for piece in model.stream(
        flags.prompt,
        max_new_tokens=flags.max_new_tokens,
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        seed=flags.seed,
    ):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
