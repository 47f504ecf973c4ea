"""Which requests are sent, and when: mixes of lengths, random prompts, Poisson arrivals. All from one seed."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

# Tokens of prompt and answer.
MIXES = {
    "chat": "short:0.7:128:64,long:0.3:1024:128",
    "short": "short:1:128:64",
    "prefill": "prefill:1:4096:16",
    "decode": "decode:1:64:512",
    "documents": "question:0.5:256:128,document:0.5:8192:256",
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Requests of one length: a prompt of `prompt` tokens, an answer of at most `output`; `weight`: how often."""

    name: str
    weight: float
    prompt: int
    output: int


@dataclasses.dataclass(frozen=True)
class Planned:
    """One request to send."""

    shape: Shape
    token_ids: tuple[int, ...]
    seed: int


def parse_mix(text: str) -> tuple[Shape, ...]:
    """A name of `MIXES`, or NAME:WEIGHT:PROMPT:OUTPUT with commas between several.

    Raises:
        ValueError: anything else; names the part.
    """
    shapes = []
    for part in MIXES.get(text, text).split(","):
        try:
            name, weight, prompt, output = part.split(":")
            shape = Shape(name, float(weight), int(prompt), int(output))
        except ValueError:
            names = ", ".join(MIXES)
            raise ValueError(f"mix {part!r}: needed is one of {names}, or NAME:WEIGHT:PROMPT:OUTPUT,...") from None
        if not (0 < shape.weight < float("inf") and shape.prompt > 0 and shape.output > 0):
            raise ValueError(f"mix {part!r}: weight and lengths must be above 0")
        shapes.append(shape)
    return tuple(shapes)


def requests(mix: Sequence[Shape], ids: Sequence[int], seed: int) -> Iterator[Planned]:
    """Requests without end: shapes by weight, prompts of ids drawn evenly from `ids`. The same seed, the same requests.

    Prompts have no prefix in common, so a server that keeps prefixes gets nothing out of it.
    """
    rng = np.random.default_rng(seed)
    weights = np.array([shape.weight for shape in mix])
    pool = np.asarray(ids)
    while True:
        shape = mix[rng.choice(len(mix), p=weights / weights.sum())]
        prompt = pool[rng.integers(0, len(pool), shape.prompt)]
        yield Planned(shape, tuple(prompt.tolist()), int(rng.integers(2**31)))


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds after the start at which requests come: a Poisson process of `rate` requests a second."""
    rng, at = np.random.default_rng([seed, 1]), 0.0
    while True:
        at += rng.exponential(1 / rate)
        yield at
