"""A curve as SVG, for a page without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import floor, log10
from typing import NamedTuple

from agentrl.view.text import visible

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 210, 46, 10, 8, 24
MOST = 500  # points of a line


class Line(NamedTuple):
    label: str
    steps: Sequence[int]
    values: Sequence[float]
    dots: bool = False


def plot(title: str, lines: Sequence[Line]) -> str:
    """A figure; empty where no line has a point."""
    shown = [line for line in lines if len(line.steps)]
    if not shown:
        return ""
    low, high = _bounds([v for line in shown for v in line.values])
    first, last = min(line.steps[0] for line in shown), max(line.steps[-1] for line in shown)
    last = last if last > first else first + 1

    def at(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for value in _ticks(low, high, 4):
        _, y = at(first, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{value:.4g}</text>')
    for step in _ticks(first, last, 6):
        if step == int(step):
            parts.append(f'<text x="{at(step, low)[0]:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{int(step)}</text>')
    for i, line in enumerate(shown):
        points = [at(s, v) for s, v in _thinned(line)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path class="c{i % 6}" d="M{path}"/>')
        if line.dots or len(points) == 1:
            parts += [f'<circle class="c{i % 6}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in points]
    keys = "".join(f'<span class="c{i % 6}">{_words(line.label)}</span>' for i, line in enumerate(shown))
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_words(title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption><b>{_words(title)}</b>{keys}</figcaption>{picture}</figure>"


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    low = 0.0 if 0 <= low < 0.5 * high else low
    if low == high and low >= 0:
        low, high = 0.0, high or 1.0
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    return low, high + (high - low) * 0.04


def _ticks(low: float, high: float, about: int) -> list[float]:
    raw = (high - low) / about
    power = 10.0 ** floor(log10(raw))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= raw)
    first = -floor(-low / step)
    return [i * step for i in range(int(first), floor(high / step + 1e-9) + 1)]


def _thinned(line: Line) -> list[tuple[int, float]]:
    """The least and the greatest of each stretch, where there are many."""
    points = list(zip(line.steps, line.values, strict=True))
    if len(points) <= MOST:
        return points
    size = -(-len(points) // (MOST // 2))
    found = []
    for i in range(0, len(points), size):
        stretch = points[i : i + size]
        found += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return found


def _words(text: str) -> str:
    return escape(visible(text))
