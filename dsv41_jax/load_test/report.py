"""What was measured, as numbers and as tables. Failed requests are counted by kind and are in no percentile."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dsv41_jax.load_test.client import Outcome
from dsv41_jax.load_test.drive import Measured

TIMES = {
    "first_token": "first token",
    "per_token": "each further token",
    "gap": "gap in the text",
    "latency": "whole answer",
}
_CUTS = {"p50": 50, "p95": 95, "p99": 99}


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Percentiles, the largest, and how many there are; None of no values."""
    array = np.fromiter(values, float)
    if not array.size:
        return None
    cuts = {name: float(np.percentile(array, cut)) for name, cut in _CUTS.items()}
    return cuts | {"max": float(array.max()), "count": int(array.size)}


def summary(measured: Measured) -> dict[str, Any]:
    """Numbers of one load: seconds, counts, and rates over the time from the first request to the last answer."""
    good = [outcome for outcome in measured.outcomes if outcome.error is None]
    kinds = collections.Counter(outcome.error for outcome in measured.outcomes if outcome.error)
    examples = {outcome.error: outcome.detail for outcome in measured.outcomes if outcome.error}
    tokens = sum(outcome.completion_tokens for outcome in good)
    return {
        "load": str(measured.load),
        "kind": measured.load.kind,
        "value": measured.load.value,
        "seconds": measured.seconds,
        "sent": len(measured.outcomes),
        "complete": len(good),
        "errors": dict(kinds.most_common()),
        "error_examples": examples,
        "ended_early": sum(outcome.ended_early for outcome in good),
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in good),
        "cached_tokens": sum(outcome.cached_tokens for outcome in good),
        "asked_tokens": sum(outcome.asked for outcome in good),
        "output_tokens": tokens,
        "output_tokens_per_second": tokens / measured.seconds,
        "requests_per_second": len(good) / measured.seconds,
        "latest_sent": max((outcome.late for outcome in measured.outcomes), default=0.0),
        "first_token": spread(outcome.first for outcome in good),
        "per_token": spread(o.per_token for o in good if o.per_token is not None),
        "gap": spread(gap for outcome in good for gap in outcome.gaps),
        "latency": spread(outcome.end for outcome in good),
    }


def request_row(outcome: Outcome) -> dict[str, Any]:
    """One request, for the JSON file."""
    return {
        "shape": outcome.shape,
        "prompt": outcome.prompt,
        "asked": outcome.asked,
        "error": outcome.error,
        "detail": outcome.detail,
        "finish": outcome.finish,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "completion_tokens": outcome.completion_tokens,
        "late": outcome.late,
        "first_token": outcome.first if outcome.error is None else None,
        "per_token": outcome.per_token,
        "largest_gap": max(outcome.gaps, default=None),
        "latency": outcome.end,
    }


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: what came through of each load, then its times."""
    heads = (
        *("load", "complete", "ended early", "output tokens", "output tokens/s", "requests/s", "prompt tokens"),
        *("cached", "errors"),
    )
    through = [
        [
            row["load"],
            f"{row['complete']} of {row['sent']}",
            str(row["ended_early"]),
            f"{row['output_tokens']:,} of {row['asked_tokens']:,}",
            f"{row['output_tokens_per_second']:.1f}",
            f"{row['requests_per_second']:.2f}",
            f"{row['prompt_tokens']:,}",
            f"{row['cached_tokens'] / row['prompt_tokens']:.0%}" if row["prompt_tokens"] else "",
            ", ".join(f"{count} x {kind}" for kind, count in row["errors"].items()) or "none",
        ]
        for row in rows
    ]
    times = [
        [row["load"], label, *(_milliseconds(row[name][cut]) for cut in (*_CUTS, "max")), f"{row[name]['count']:,}"]
        for row in rows
        for name, label in TIMES.items()
        if row[name]
    ]
    parts = [_markdown(heads, through)]
    if times:
        parts.append(_markdown(("load", "ms", *_CUTS, "max", "values"), times))
    return "\n\n".join([*parts, *notes(rows)])


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader of the numbers must know: errors, answers shorter than asked, a generator that was too slow."""
    found = []
    if any(row["ended_early"] for row in rows):
        found.append("Answers that the model ended early are shorter than asked; --end_id forbids it.")
    late = max((row["latest_sent"] for row in rows), default=0.0)
    if late > 0.05:
        found.append(
            f"A request was sent {_milliseconds(late)} ms late: this program was too slow, and the times include it."
        )
    examples = {kind: text for row in rows for kind, text in row["error_examples"].items()}
    return found + [f"{kind}: {text}" for kind, text in examples.items() if text]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
