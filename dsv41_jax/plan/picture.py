"""Reports as a picture: memory of a device, and the bounds of a step, a pair of bars for each."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from dsv41_jax.chips import GB
from dsv41_jax.plan.report import Report

_MEMORY = (("params", "weights", "#4c72b0"), ("cache", "cache", "#55a868"), ("scratch", "scratch and rest", "#dd8452"))
_BOUNDS = (
    *(("hbm", "HBM", "#4c72b0"), ("matmul", "matrix unit", "#c44e52"), ("links", "links", "#8172b3")),
    ("vector", "vector unit", "#937860"),
)
_WIDTH, _LABEL, _BAR, _ROW, _TOP, _GAP = 1200, 300, 14, 84, 96, 40


def draw(reports: Sequence[Report], path: str | Path) -> None:
    """Write a PNG: for each report the memory of a device against its limit, and the least times of a step."""
    font, bold = ImageFont.load_default(14), ImageFont.load_default(16)
    image = Image.new("RGB", (_WIDTH, _TOP + _ROW * len(reports) + 24), "white")
    canvas = ImageDraw.Draw(image)
    width = (_WIDTH - _LABEL - 2 * _GAP) // 2 - 60
    left, right = _LABEL, _LABEL + width + 60 + _GAP
    canvas.text((left, 12), "memory of a device, GB (the line is the limit)", fill="black", font=bold)
    canvas.text((right, 12), "a step takes at least, ms", fill="black", font=bold)
    _legend(canvas, left, [(label, color) for _, label, color in _MEMORY], font)
    _legend(canvas, right, [(label, color) for _, label, color in _BOUNDS], font)
    most = max([1e-9, *(r.memory.live for r in reports if r.memory), *(r.request.machine.chip.memory for r in reports)])
    longest = max([1e-9, *(value for r in reports if r.bounds for value in r.bounds.known.values())])
    for number, report in enumerate(reports):
        top = _TOP + number * _ROW
        request = report.request
        canvas.text((12, top), f"{request.topology}  {request.mesh}", fill="black", font=bold)
        detail = f"{request.phase} {request.batch} x {request.tokens}, {request.context:,} tokens"
        canvas.text((12, top + 22), detail, fill="#444444", font=font)
        if report.tokens_per_second:
            canvas.text((12, top + 42), f"at most {report.tokens_per_second:,.0f} tokens/s", fill="#444444", font=font)
        if report.memory:
            _memory_bar(canvas, left, top + 8, width / most, report, font)
        else:
            canvas.text((left, top + 8), "does not compile", fill="#c44e52", font=font)
        if report.bounds:
            _bound_bars(canvas, right, top, width / longest, report, font)
    image.quantize(64).save(path, format="PNG", optimize=True)


def _legend(canvas: ImageDraw.ImageDraw, x: int, entries: list[tuple[str, str]], font: ImageFont.FreeTypeFont) -> None:
    for label, color in entries:
        canvas.rectangle((x, 48, x + 12, 60), fill=color)
        canvas.text((x + 18, 44), label, fill="black", font=font)
        x += 36 + int(canvas.textlength(label, font=font))


def _memory_bar(canvas: ImageDraw.ImageDraw, x: int, y: int, scale: float, report: Report, font) -> None:
    memory, start = report.memory, float(x)
    weights = memory.parts.get("params", memory.parts.get("state", 0))
    parts = {"params": weights, "cache": memory.parts.get("cache", 0)}
    parts["scratch"] = memory.live - sum(parts.values())
    for name, _, color in _MEMORY:
        end = start + scale * parts[name]
        canvas.rectangle((start, y, end, y + 2 * _BAR), fill=color)
        start = end
    limit = x + scale * memory.limit
    canvas.line((limit, y - 6, limit, y + 2 * _BAR + 6), fill="black", width=2)
    text = f"{memory.live / GB:.1f} of {memory.limit / GB:.1f}"
    canvas.text((x, y + 2 * _BAR + 6), text, fill="black" if report.fits else "#c44e52", font=font)


def _bound_bars(canvas: ImageDraw.ImageDraw, x: int, y: int, scale: float, report: Report, font) -> None:
    for name, _, color in _BOUNDS:
        value = getattr(report.bounds, name)
        if value is None:
            continue
        canvas.rectangle((x, y, x + max(1.0, scale * value), y + _BAR), fill=color)
        canvas.text((x + scale * value + 6, y - 2), f"{1e3 * value:.2f}", fill="black", font=font)
        y += _BAR + 4
