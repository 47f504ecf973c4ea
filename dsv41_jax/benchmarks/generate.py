"""`bench.py generate`: tokens a second of prefill (by mode) and of decode (with and without drafts), by numerics."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from tqdm import tqdm

import dsv41_jax as ds
from dsv41_jax import ced, compile_cache
from dsv41_jax.benchmarks.machine import machine
from dsv41_jax.sampling import SamplingOptions
from dsv41_jax.speculation import SpeculationStats, speculative_loop
from dsv41_jax.token_loop import Request, check_options, make_request, token_loop

NUMERICS = ("released", "noquant", "float32")
TEXT = (
    "And it came to pass in those days, that the word of the Lord came unto the people, and they heard it gladly. "
    "The heavens declare the glory of God, and the earth is full of his mercy. "
    "Blessed is the man that walketh not in the counsel of the ungodly, nor standeth in the way of sinners. "
)


@dataclasses.dataclass
class Case:
    """One thing measured.

    Attributes:
        kind: "prefill" or "decode"; ratios are to the first case of a kind.
        run: does it once, and gives (tokens, seconds).
        accepted: mean drafts accepted in a round, so far; None without drafts.
    """

    kind: str
    numerics: str
    how: str
    run: Callable[[], tuple[int, float]]
    accepted: Callable[[], float] | None = None
    speeds: list[float] = dataclasses.field(default_factory=list)


def measure(cases: list[Case], repeats: int) -> None:
    """Run every case once to compile, then `repeats` times in turn; speeds are appended to the cases."""
    with tqdm(total=len(cases) * (repeats + 1), desc="compiling") as bar:
        for repeat in range(repeats + 1):
            for case in cases:
                tokens, seconds = case.run()
                if repeat:
                    case.speeds.append(tokens / seconds)
                bar.update()
            bar.set_description("measuring")


def results(cases: list[Case]) -> list[dict[str, object]]:
    """Median speeds, their spread, and ratios to the first case of the kind."""
    base: dict[str, float] = {}
    rows = []
    for case in cases:
        median = statistics.median(case.speeds)
        rows.append(
            {
                "kind": case.kind,
                "numerics": case.numerics,
                "how": case.how,
                "tokens_per_second": median,
                "slowest": min(case.speeds),
                "fastest": max(case.speeds),
                "ratio": median / base.setdefault(case.kind, median),
                "accepted": None if case.accepted is None else case.accepted(),
            }
        )
    return rows


def table(rows: list[dict[str, object]]) -> str:
    """Results in Markdown."""
    lines = [
        "| | numerics | how | tokens/s (slowest to fastest) | ratio | drafts accepted |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        speed = "{tokens_per_second:.1f} ({slowest:.1f} to {fastest:.1f})".format(**row)
        accepted = "" if row["accepted"] is None else f"{row['accepted']:.2f}"
        lines.append(
            f"| {row['kind']} | {row['numerics']} | {row['how']} | {speed} | {row['ratio']:.2f} | {accepted} |"
        )
    return "\n".join(lines)


def prefill_case(model: ds.Model, mode: str, tokens: np.ndarray) -> Case:
    """Reading one prompt int32 [n] into a new cache."""

    def run() -> tuple[int, float]:
        start = time.perf_counter()
        jax.block_until_ready(model.prefill(tokens[None], mode=mode)[0])
        return len(tokens), time.perf_counter() - start

    return Case("prefill", model.numerics, mode, run)


def decode_case(model: ds.Model, request: Request, temperature: float, drafts: bool) -> Case:
    """One row of tokens, from the first to the last one."""
    stats = SpeculationStats(model.config.dspark_block_size)

    def run() -> tuple[int, float]:
        loop = speculative_loop(model, request, set(), stats) if drafts else token_loop(model, request, set())
        next(loop)  # read the prompt
        start = time.perf_counter()
        return sum(1 for _ in loop), time.perf_counter() - start

    how = f"temperature {temperature:g}, {'drafts' if drafts else 'no drafts'}"
    return Case("decode", model.numerics, how, run, (lambda: stats.mean_accepted) if drafts else None)


def generate_cases(model: ds.Model, flags: argparse.Namespace) -> list[Case]:
    """The cases of one model."""
    config, text = model.config, model.require_tokenizer().encode(TEXT, add_bos=True)
    tokens = np.resize(np.array(text, np.int32), flags.prompt_tokens)
    modes = [mode for mode in ced.PREFILL_MODES[::-1] if mode == "exact" or config.supports_ced]
    cases = [prefill_case(model, mode, tokens) for mode in modes]
    for temperature in flags.temperatures:
        # Nothing ends the text early: every run has as many tokens.
        options = dataclasses.replace(
            check_options(
                config, max_new_tokens=flags.new_tokens + 1, sampling=SamplingOptions(temperature=temperature)
            ),
            stop_ids=frozenset(),
        )
        request = make_request(config, [text], options)
        cases += [
            decode_case(model, request, temperature, drafts) for drafts in (False, True)[: 1 + bool(config.n_draft)]
        ]
    return cases


def generate(flags: argparse.Namespace) -> None:
    """The measurement that the flags ask for, printed."""
    compile_cache.enable()
    facts = machine()
    cases = []
    for numerics in flags.numerics:
        cases += generate_cases(ds.load(flags.model, numerics=numerics), flags)
    cases.sort(key=lambda case: case.kind, reverse=True)  # prefill first; the order of numerics stays
    measure(cases, flags.repeats)
    rows = results(cases)
    facts["load_after"] = round(os.getloadavg()[0], 2)
    if flags.json:
        settings = {name: getattr(flags, name) for name in ("model", "prompt_tokens", "new_tokens", "repeats")}
        print(json.dumps({"machine": facts, "settings": settings, "results": rows}, indent=1))
        return
    print(", ".join(f"{name}: {value}" for name, value in facts.items()))
    sizes = f"prompts of {flags.prompt_tokens} tokens, {flags.new_tokens} new ones, median of {flags.repeats}"
    print(f"{flags.model}: {sizes}")
    print(table(rows))


def add_command(commands: argparse._SubParsersAction) -> None:
    """The subcommand and its flags."""
    one = commands.add_parser(
        "generate", help="prefill and decode tokens/s by numerics and mode, with and without drafts"
    )
    one.set_defaults(run=generate)
    one.add_argument("--model", default="demo", help='"demo" or a folder that ds.load takes (default: demo)')
    one.add_argument("--numerics", nargs="+", choices=NUMERICS, default=list(NUMERICS), help="default: all three")
    one.add_argument("--prompt_tokens", type=int, default=1024, help="length of the prompts read (default: 1024)")
    one.add_argument("--new_tokens", type=int, default=64, help="tokens decoded after the first one (default: 64)")
    one.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="of decoding (default: 0 1)")
    one.add_argument("--repeats", type=int, default=5, help="times each thing is measured (default: 5)")
    one.add_argument("--json", action="store_true", help="print JSON instead of a table")
