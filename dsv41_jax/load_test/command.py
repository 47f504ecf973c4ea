"""`bench.py serve`: the flags, and one sweep."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dsv41_jax.load_test import picture, report
from dsv41_jax.load_test.client import NotReady, Options, Outcome, complete, prepare, text_ids
from dsv41_jax.load_test.connection import Server
from dsv41_jax.load_test.drive import Load, Measured, run
from dsv41_jax.load_test.workload import MIXES, Planned, Shape, parse_mix, requests

_KEYS = "DSV41_API_KEYS"  # as the server reads them, commas between them


def _numbers(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 < value < float("inf") for value in values):
        raise ValueError
    return values


def _whole(text: str) -> list[float]:
    if not all(value.is_integer() for value in _numbers(text)):
        raise ValueError
    return _numbers(text)


def _range(text: str) -> range:
    low, high = map(int, text.split(":"))
    if not 0 <= low < high:
        raise ValueError
    return range(low, high)


def _mix(text: str) -> tuple[Shape, ...]:
    try:
        return parse_mix(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_command(commands: argparse._SubParsersAction) -> None:
    """The subcommand and its flags."""
    one = commands.add_parser("serve", help="a running server under load: first token, further tokens, throughput")
    one.set_defaults(run=serve, parser=one)
    one.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    one.add_argument(
        "--api_key_file", default=None, help=f"file whose first line is the key (default: {_KEYS}, if set)"
    )
    one.add_argument("--model", default=None, help="name that requests have (default: the server's model)")
    load = one.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=_whole,
        default=[1, 2, 4, 8, 16],
        metavar="N,...",
        help="closed loop: so many clients, each waits for its answer before it asks again (default: 1,2,4,8,16)",
    )
    load.add_argument(
        "--rate",
        type=_numbers,
        default=None,
        metavar="R,...",
        help="open loop: so many requests a second, at random times (Poisson), whatever is still running",
    )
    one.add_argument("--requests", type=int, default=None, help="of each load (default: 64, without --duration)")
    one.add_argument("--duration", type=float, default=None, help="seconds in which each load sends requests")
    one.add_argument("--warmup", type=int, default=2, help="requests before, that do not count (default: 2)")
    one.add_argument(
        "--mix",
        type=_mix,
        default="chat",
        help=f"lengths: NAME:WEIGHT:PROMPT:OUTPUT,... in tokens, or one of {', '.join(MIXES)} (default: chat)",
    )
    one.add_argument(
        "--vocab",
        type=_range,
        default=None,
        metavar="LOW:HIGH",
        help="prompts are of random ids from LOW to HIGH - 1 (default: of the ids of an ordinary text, by /tokenize)",
    )
    one.add_argument(
        "--end_id", type=int, default=None, help="the end-of-sequence id: forbid it, so that answers have full length"
    )
    one.add_argument("--temperature", type=float, default=1.0, help="of the answers (default: 1)")
    one.add_argument("--seed", type=int, default=0, help="of lengths, prompts and arrivals (default: 0)")
    one.add_argument("--timeout", type=float, default=600.0, help="seconds after which a request is an error")
    one.add_argument("--json", action="store_true", help="print JSON instead of tables")
    one.add_argument("--out", default=None, metavar="FILE", help="write JSON there, with a row for every request")
    one.add_argument("--png", default=None, metavar="FILE", help="draw the sweep there")


def check(flags: argparse.Namespace) -> None:
    """End the process where flags do not fit together, before any request is sent."""
    fail = flags.parser.error
    for name in ("requests", "duration", "timeout"):
        value = getattr(flags, name)
        if value is not None and not value > 0:
            fail(f"--{name}={value}: must be above 0")
    if flags.warmup < 0:
        fail(f"--warmup={flags.warmup}: must not be negative")
    for name in ("out", "png"):
        path = getattr(flags, name)
        if path and not Path(path).resolve().parent.is_dir():
            fail(f"--{name}: there is no folder {Path(path).resolve().parent}")


def loads(flags: argparse.Namespace) -> list[Load]:
    """The sweep."""
    count = 64 if flags.requests is None and flags.duration is None else flags.requests
    kind, values = ("closed", flags.concurrency) if flags.rate is None else ("open", flags.rate)
    return [Load(kind, value, count, flags.duration) for value in values]


def api_key(file: str | None) -> str | None:
    """The first key of a file, or of the environment; None where there is none.

    Raises:
        ValueError: an empty file. OSError: no file.
    """
    lines = os.environ.get(_KEYS, "").split(",") if file is None else Path(file).read_text().splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if file is not None and not keys:
        raise ValueError(f"--api_key_file={file}: there is no key in it")
    return keys[0] if keys else None


async def sweep(flags: argparse.Namespace, server: Server) -> tuple[str, list[Measured]]:
    """The model's name, and what came of each load, one after another.

    Raises:
        NotReady: the server cannot be measured.
    """
    served = await prepare(server)
    model = flags.model or served
    ids: Sequence[int] = flags.vocab or await text_ids(server, model)
    options = Options(model, flags.temperature, flags.end_id, flags.timeout)

    async def send(planned: Planned, due: float) -> Outcome:
        return await complete(server, options, planned, due)

    warm = requests(flags.mix, ids, flags.seed + 1)
    for _ in range(flags.warmup):
        outcome = await complete(server, options, next(warm))
        if outcome.error:
            raise NotReady(f"a warm-up request failed: {outcome.error}: {outcome.detail}")
    found = []
    for number, load in enumerate(loads(flags)):
        with tqdm(total=load.requests, desc=str(load), unit="request") as bar:
            failed = 0

            def done(outcome: Outcome, bar: tqdm = bar) -> None:
                nonlocal failed
                failed += outcome.error is not None
                bar.set_postfix(errors=failed, refresh=False)
                bar.update()

            seed = flags.seed + 1000 * (number + 1)  # other prompts for each load: no kept prefixes
            found.append(await run(load, requests(flags.mix, ids, seed), send, seed, done))
    return model, found


def document(flags: argparse.Namespace, model: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON: what was asked, and the rows."""
    mix = [f"{s.name}:{s.weight:g}:{s.prompt}:{s.output}" for s in flags.mix]
    names = ("url", "requests", "duration", "warmup", "end_id", "temperature", "seed", "timeout")
    vocab = None if flags.vocab is None else [flags.vocab.start, flags.vocab.stop]
    settings = {name: getattr(flags, name) for name in names} | {"mix": mix, "vocab": vocab}
    return {"model": model, "settings": settings, "results": rows}


def serve(flags: argparse.Namespace) -> None:
    """Measure a running server; ends the process with a message where there is none, or where every request failed."""
    check(flags)
    try:
        server = Server(flags.url, api_key(flags.api_key_file))
        model, found = asyncio.run(sweep(flags, server))
    except (NotReady, ValueError, OSError) as error:
        sys.exit(f"bench.py serve: {error}")
    rows = [report.summary(measured) for measured in found]
    asked = document(flags, model, rows)
    mix = ", ".join(asked["settings"]["mix"])
    print(json.dumps(asked, indent=1) if flags.json else f"{model} at {flags.url}; {mix}\n\n{report.tables(rows)}")
    if flags.out:
        every = [
            row | {"requests": [report.request_row(outcome) for outcome in measured.outcomes]}
            for row, measured in zip(rows, found, strict=True)
        ]
        Path(flags.out).write_text(json.dumps(document(flags, model, every), indent=1) + "\n")
    if flags.png:
        picture.draw(rows, flags.png, f"{model}: {mix}")
    if not any(row["complete"] for row in rows):
        sys.exit("bench.py serve: no request was completed")
