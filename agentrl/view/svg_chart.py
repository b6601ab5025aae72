"""Charts as SVG, for a page without scripts: curves over steps, and the lanes of a step over its seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, log10
from typing import Any, NamedTuple

from agentrl.view.escaping import escape_html

WIDTH, HEIGHT = 460, 210
_MOST_POINTS = 500  # of a curve
_LANE = 17  # pixels
_COLORS = {
    "generate": 0,
    "tools": 1,
    "tool/": 1,
    "env": 2,
    "agent": 2,
    "learn": 3,
    "reward": 4,
    "evaluate": 4,
    "render": 5,
}
_OTHER_COLOR = 5


class Curve(NamedTuple):
    """A labelled line of points; ``dots`` marks each point."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    dots: bool = False


class _Axis(NamedTuple):
    """The range of the values of an axis, and the pixels of its ends."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, about: int) -> list[float]:
        """Return about so many round values within the range."""
        raw = (self.high - self.low) / about
        power = 10.0 ** floor(log10(raw))
        step = next(f * power for f in (1, 2, 5, 10) if f * power >= raw)
        first = -floor(-self.low / step)
        return [i * step for i in range(int(first), floor(self.high / step + 1e-9) + 1)]


def draw_curves(title: str, curves: Sequence[Curve]) -> str:
    """Draw a figure of curves over steps; empty if no curve has a point."""
    shown = [curve for curve in curves if len(curve.steps)]
    if not shown:
        return ""
    first, last = min(curve.steps[0] for curve in shown), max(curve.steps[-1] for curve in shown)
    x = _Axis(first, max(last, first + 1), start=46, end=WIDTH - 10)
    y = _Axis(*_find_bounds([v for curve in shown for v in curve.values]), start=HEIGHT - 24, end=8)
    parts = []
    for value in y.ticks(4):
        at = y.at(value)
        parts.append(f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_draw_text(f"{value:.4g}", x.start - 5, f"{at + 3.5:.1f}", "end"))
    for step in x.ticks(6):
        if step == int(step):
            parts.append(_draw_text(str(int(step)), f"{x.at(step):.1f}", HEIGHT - 8, "middle"))
    for i, curve in enumerate(shown):
        points = [(x.at(s), y.at(v)) for s, v in _thin_out(curve)]
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        parts.append(f'<path class="c{i % 6}" d="M{path}"/>')
        if curve.dots or len(points) == 1:
            parts += [f'<circle class="c{i % 6}" cx="{a:.1f}" cy="{b:.1f}" r="2.6"/>' for a, b in points]
    legend = "".join(f'<span class="c{i % 6}">{escape_html(curve.label)}</span>' for i, curve in enumerate(shown))
    return _draw_figure(title, HEIGHT, parts, legend=legend)


def draw_lanes(title: str, picture: Mapping[str, Any]) -> str:
    """Draw a figure of a step's seconds: one row for what was waited for, then one for each lane."""
    x = _Axis(0.0, picture["seconds"] or 1.0, start=104, end=WIDTH - 46)
    rows = [("waited for", None, picture["waited"])]
    rows += [(name, seconds, [(a, b, name) for a, b in its]) for name, seconds, its in picture["lanes"]]
    height = 26 + _LANE * len(rows)
    parts = []
    for i, (name, seconds, bars) in enumerate(rows):
        top = 6 + _LANE * i
        parts.append(_draw_text(name[:18], x.start - 6, top + 11, "end"))
        parts += [_draw_bar(x, top + 2, begin, end, owner) for begin, end, owner in bars]
        if seconds is not None:
            parts.append(_draw_text(f"{seconds:.2f} s", x.end + 5, top + 11))
    parts.append(_draw_text("0", x.start, height - 6))
    parts.append(_draw_text(f"{x.high:.2f} s", x.end, height - 6, "end"))
    return _draw_figure(title, height, parts, kind="lanes")


def _draw_figure(title: str, height: int, parts: Sequence[str], *, kind: str = "", legend: str = "") -> str:
    name = escape_html(title)
    svg_class = f'class="{kind}" ' if kind else ""
    svg = f'<svg {svg_class}viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}">{"".join(parts)}</svg>'
    return f"<figure><figcaption><b>{name}</b>{legend}</figcaption>{svg}</figure>"


def _draw_text(text: str, x: float | str, y: float | str, anchor: str = "") -> str:
    anchored = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x}" y="{y}"{anchored}>{escape_html(text)}</text>'


def _draw_bar(x: _Axis, top: int, begin: float, end: float, owner: str) -> str:
    left, width = x.at(begin), max(x.at(end) - x.at(begin), 0.4)
    box = f'x="{left:.1f}" y="{top}" width="{width:.2f}" height="{_LANE - 5}"'
    return f'<rect class="{_color(owner)}" {box}><title>{escape_html(owner)} {end - begin:.3f} s</title></rect>'


def _color(owner: str) -> str:
    """Return the CSS class of a lane's colour; idle and queue have none."""
    if owner in ("idle", "queue"):
        return "none"
    return f"c{_COLORS.get('tool/' if owner.startswith('tool/') else owner, _OTHER_COLOR)}"


def _find_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis: from 0 if that is near, never of no length, with a margin above."""
    low, high = min(values), max(values)
    low = 0.0 if 0 <= low < 0.5 * high else low
    if low == high and low >= 0:
        low, high = 0.0, high or 1.0
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    return low, high + (high - low) * 0.04


def _thin_out(curve: Curve) -> list[tuple[int, float]]:
    """Return the points; of a long curve the least and the greatest of each stretch."""
    points = list(zip(curve.steps, curve.values, strict=True))
    if len(points) <= _MOST_POINTS:
        return points
    size = -(-len(points) // (_MOST_POINTS // 2))
    thinned = []
    for i in range(0, len(points), size):
        stretch = points[i : i + size]
        thinned += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return thinned
