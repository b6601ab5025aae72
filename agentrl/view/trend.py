"""The trend of a noisy curve: rising, falling or flat, and since when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from agentrl.view.index import Column

SPAN = 5  # points in a moving mean
LEAST = 8  # points before anything is said
SMALL = 0.02  # of the curve's range: no change


class Trend(NamedTuple):
    """The direction of a curve. ``since``: the first step of the flat stretch, or of the best mean before a fall."""

    word: Literal["flat", "rising", "falling", "short"]
    since: int
    level: float  # now, the mean of the last points
    best: float
    first: float


def find_trend(steps: Sequence[int], values: Sequence[float]) -> Trend:
    """Find the trend of a curve by its moving mean, measured in its noise."""
    y = np.asarray(values, dtype=float)
    if len(y) < LEAST:
        last = float(y[-1]) if len(y) else 0.0
        return Trend(
            "short", steps[0] if len(steps) else 0, last, float(max(y, default=0.0)), float(y[0]) if len(y) else 0.0
        )
    smooth = np.convolve(y, np.ones(SPAN) / SPAN, mode="valid")
    noise = float(np.median(np.abs(np.diff(y)))) * 1.4826 / np.sqrt(2)
    tolerance = max(SMALL * max(float(np.ptp(y)), abs(float(y.mean()))), 2.5 * noise / np.sqrt(SPAN))
    level, best, first = float(smooth[-1]), float(smooth.max()), float(smooth[0])
    flat = _find_flat_start(smooth, tolerance)
    if best - level > 3 * tolerance:
        return Trend("falling", int(steps[int(smooth.argmax()) + SPAN // 2]), level, best, first)
    long_enough = len(smooth) - flat + SPAN - 1 >= max(LEAST, len(y) // 10)
    if not long_enough or _rises(y[flat:]) or _rises(y[-max(LEAST, len(y) // 4) :]):
        return Trend("rising", int(steps[0]), level, best, first)
    return Trend("flat", int(steps[flat + SPAN // 2 if flat else 0]), level, best, first)


def _rises(y: Column) -> bool:
    """Return True if a straight line through the points rises by more than chance."""
    x = np.arange(len(y)) - (len(y) - 1) / 2
    slope = float((x * y).sum() / (x * x).sum())
    left = y - y.mean() - slope * x
    error = float(np.sqrt((left * left).sum() / max(len(y) - 2, 1) / (x * x).sum()))
    return slope > 3 * error and slope * len(y) > SMALL * abs(float(y.mean()))


def _find_flat_start(smooth: Column, tolerance: float) -> int:
    """Return the start of the last stretch that stays near its own mean."""
    start = len(smooth) - 1
    for i in range(len(smooth) - 1, -1, -1):
        level = float(smooth[i:].mean())
        if np.abs(smooth[i:] - level).max() > tolerance:
            break
        start = i
    return start
