"""Prints the continuation of a prompt, or with --chat the answer to it, piece by piece.

python launch/generate.py --model=demo --prompt="The harbour"

On several hosts the same command runs on each, with --mesh: see docs/pods.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from typing import TextIO

import jax

import dsv41_jax as ds
from dsv41_jax import compile_cache, distributed
from dsv41_jax.sharding import Layout
from pallas_kernels.implementation import IMPLEMENTATIONS

OPTIONS = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("stop", "seed", "speculate"),
)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help='"demo", a released-format folder, or a hub id (default: demo)')
    parser.add_argument("--prompt", required=True, help="text to continue, or with --chat the message to answer")
    parser.add_argument("--chat", action="store_true", help="answer as a chat; reasoning goes to standard error")
    parser.add_argument(
        "--thinking",
        default="high",
        help="with --chat: low, high, max, none or an effort of 1 to 100 (default: high)",
    )
    parser.add_argument("--max_new_tokens", type=int, default=60, help="most tokens to write (default: 60)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest token (default: 1)")
    parser.add_argument("--top_k", type=int, default=None, help="sample from the k likeliest tokens only")
    parser.add_argument("--top_p", type=float, default=None, help="sample from the likeliest tokens of this total mass")
    parser.add_argument("--min_p", type=float, default=None, help="only tokens this likely, relative to the likeliest")
    parser.add_argument(
        "--repetition_penalty", type=float, default=1.0, help="above 1: less of what was said before (default: 1)"
    )
    parser.add_argument("--stop", action="append", default=[], help="text that ends the answer; can be repeated")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--speculate", action="store_true", help="draft several tokens and verify them in one step")
    parser.add_argument(
        "--numerics",
        default="released",
        choices=("released", "noquant", "float32"),
        help="released: bf16 with fp8 and fp4 as the release; noquant: bf16; float32 (default: released)",
    )
    parser.add_argument(
        "--implementation",
        default="auto",
        choices=IMPLEMENTATIONS,
        help="kernels or plain code; auto: the kernels of a TPU or GPU where the numerics are released (default: auto)",
    )
    parser.add_argument(
        "--mesh",
        default=None,
        help="spread the model over all devices: sizes DATAxCONTEXTxTENSOR, e.g. 4x1x4 (default: the first device)",
    )
    parser.add_argument(
        "--engram",
        default="device",
        choices=("device", "host", "mmap"),
        help="where Engram tables are: on devices, in host memory or in the file (default: device)",
    )
    parser.add_argument(
        "--compilation_cache",
        default=None,
        help="folder that keeps compiled programs for the next run (default: a folder in the user's cache)",
    )
    distributed.add_flags(parser)
    return parser.parse_args(argv)


def answer(model: ds.Model, prompt: str, thinking: str, options: dict, thoughts: TextIO) -> Iterator[str]:
    """Pieces of the answer to one message; its reasoning is written to `thoughts`."""
    effort = int(thinking) if thinking.isdigit() else thinking
    thought = False
    for delta in model.chat([{"role": "user", "content": prompt}], effort, stream=True, **options):
        thoughts.write(delta.reasoning)
        if thought and delta.content:
            thoughts.write("\n")
        thought = bool(delta.reasoning) or (thought and not delta.content)
        thoughts.flush()
        yield delta.content


def run(flags: argparse.Namespace) -> None:
    """Load the model and print; of several processes, which all compute the same text, the first one prints."""
    layout = None if flags.mesh is None else Layout.parse(flags.mesh)  # before the devices are looked at
    if jax.process_count() > 1 and layout is None:
        raise ValueError(f"{jax.process_count()} processes need a --mesh over their {jax.device_count()} devices")
    with contextlib.ExitStack() as files:
        out, notes = sys.stdout, sys.stderr
        if jax.process_index() > 0:
            out = notes = files.enter_context(open(os.devnull, "w"))
        print(f"loading {flags.model}; the first run of a model compiles it, which takes a while", file=notes)
        mesh = None if layout is None else layout.mesh()
        model = ds.load(
            flags.model, mesh, numerics=flags.numerics, engram=flags.engram, implementation=flags.implementation
        )
        where = f"{jax.device_count() if mesh else 1} x {jax.devices()[0].device_kind}"
        print(f"implementation: {model.implementation} on {where}", file=notes)
        options = {name: getattr(flags, name) for name in OPTIONS}
        if flags.chat:
            pieces = answer(model, flags.prompt, flags.thinking, options, notes)
        else:
            pieces = itertools.chain([flags.prompt], model.stream(flags.prompt, **options))
        for piece in itertools.chain(pieces, ["\n"]):
            out.write(piece)
            out.flush()
        for layer, stats in model.engram_stats.items():
            speed = f"{stats.lookups:,} lookups at {stats.lookups_per_second:,.0f}/s"
            print(f"Engram layer {layer}: {speed}, {stats.prefetched:,} of {stats.asked:,} rows read ahead", file=notes)


def main(argv: list[str] | None = None) -> None:
    """Continue or answer a prompt; `argv` as on the command line. Ends the process with a message on bad options."""
    flags = parse(argv)
    compile_cache.enable(flags.compilation_cache)
    distributed.run_command("generate", run, flags, may_differ=["compilation_cache"])


if __name__ == "__main__":
    main()
