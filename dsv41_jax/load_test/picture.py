"""A sweep as a picture: four panels over the loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

_COLORS = {"p50": "#4c72b0", "p95": "#dd8452", "p99": "#c44e52"}
_PANELS = (("first_token", "first token, ms"), ("per_token", "each further token, ms"), ("gap", "gap in the text, ms"))
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 600, 340, 78, 24, 58, 56  # of a panel, and inside it
_HEAD = 44


def draw(rows: Sequence[dict[str, Any]], path: str | Path, title: str) -> None:
    """Write a PNG of `report.summary` rows, in their order: percentiles of three times, and output tokens a second.

    A load without a value (all its requests failed, say) has no point.
    """
    font, bold = ImageFont.load_default(13), ImageFont.load_default(16)
    image = Image.new("RGB", (2 * _WIDTH, _HEAD + 2 * _HEIGHT), "white")
    canvas = ImageDraw.Draw(image)
    canvas.text((16, 12), title, fill="black", font=bold)
    labels = [f"{row['value']:g}" for row in rows]
    unit = "clients at once" if rows[0]["kind"] == "closed" else "requests/s"
    panels = [
        (name, {cut: [row[key] and 1e3 * row[key][cut] for row in rows] for cut in _COLORS}) for key, name in _PANELS
    ]
    panels.append(("output tokens/s", {"all": [row["output_tokens_per_second"] for row in rows]}))
    for number, (name, lines) in enumerate(panels):
        corner = (number % 2 * _WIDTH, _HEAD + number // 2 * _HEIGHT)
        _panel(canvas, corner, name, unit, labels, lines, font)
    image.quantize(64).save(path, format="PNG", optimize=True)


def _panel(
    canvas: ImageDraw.ImageDraw,
    corner: tuple[int, int],
    name: str,
    unit: str,
    labels: Sequence[str],
    lines: dict[str, list[float | None]],
    font: ImageFont.FreeTypeFont,
) -> None:
    """One panel: a line for each entry of `lines`, a place on the x axis for each label, the y axis from 0."""
    x, y = corner
    left, right, top, bottom = x + _LEFT, x + _WIDTH - _RIGHT, y + _TOP, y + _HEIGHT - _BOTTOM
    canvas.text((left, y + 8), name, fill="black", font=ImageFont.load_default(15))
    most = max([value for values in lines.values() for value in values if value is not None], default=0.0) or 1.0
    step = _nice(most / 4)
    ticks = int(most / step) + 1

    def place(number: int, value: float) -> tuple[float, float]:
        across = (number + 0.5) / len(labels)
        return left + across * (right - left), bottom - value / (ticks * step) * (bottom - top)

    for tick in range(ticks + 1):
        at = place(0, tick * step)[1]
        canvas.line((left, at, right, at), fill="#dddddd")
        canvas.text((left - 8, at), f"{tick * step:,g}", fill="#444444", font=font, anchor="rm")
    for number, label in enumerate(labels):
        canvas.text((place(number, 0)[0], bottom + 8), label, fill="#444444", font=font, anchor="mt")
    canvas.text(((left + right) / 2, bottom + 28), unit, fill="#444444", font=font, anchor="mt")
    for number, (label, values) in enumerate(lines.items()):
        color = _COLORS.get(label, "#55a868")
        points = [place(i, value) for i, value in enumerate(values) if value is not None]
        if len(points) > 1:
            canvas.line(points, fill=color, width=2)
        for px, py in points:
            canvas.ellipse((px - 3, py - 3, px + 3, py + 3), fill=color)
        if len(lines) > 1:
            canvas.rectangle((left + 56 * number, y + 34, left + 56 * number + 12, y + 46), fill=color)
            canvas.text((left + 56 * number + 18, y + 32), label, fill="black", font=font)


def _nice(least: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= least * (1 - 1e-9))
