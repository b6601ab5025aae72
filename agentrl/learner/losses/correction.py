"""Importance sampling between engine and learner: p_old / p_engine, bounded, one entry a trained token.

``token`` ratios are of single tokens; ``sequence`` ones of whole rows, the product of their tokens'; ``geometric`` ones
the same to the power of 1 / length, which long rows do not blow up. Outside of [low, high] a ratio is cut
(``truncate``), or its tokens are not trained (``mask``); they stay in the denominators.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from agentrl.learner.losses.ratio import row_mean, row_sum

Bounds = tuple[float | None, float | None]
Correction = Callable[[Tensor, Tensor, Tensor, int, Bounds], Tensor]


def _token(difference: Tensor, rows: Tensor, count: int) -> Tensor:
    return difference.exp()


def _sequence(difference: Tensor, rows: Tensor, count: int) -> Tensor:
    return row_sum(difference, rows, count)[rows].exp()


def _geometric(difference: Tensor, rows: Tensor, count: int) -> Tensor:
    return row_mean(difference, rows, count)[rows].exp()


def _truncate(ratio: Tensor, bounds: Bounds) -> Tensor:
    return ratio if bounds == (None, None) else ratio.clamp(*bounds)


def _mask(ratio: Tensor, bounds: Bounds) -> Tensor:
    low, high = bounds
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if low is not None:
        outside |= ratio < low
    if high is not None:
        outside |= ratio > high
    return ratio.masked_fill(outside, 0.0)


def _build_correction(
    level: Callable[[Tensor, Tensor, int], Tensor], bound: Callable[[Tensor, Bounds], Tensor]
) -> Correction:
    def correction(old: Tensor, sampled: Tensor, rows: Tensor, count: int, bounds: Bounds) -> Tensor:
        return bound(level(old - sampled, rows, count), bounds)

    return correction


CORRECTIONS: dict[str, Correction] = {
    f"{level}_{bound}": _build_correction(ratio, cut)
    for level, ratio in (("token", _token), ("sequence", _sequence), ("geometric", _geometric))
    for bound, cut in (("truncate", _truncate), ("mask", _mask))
}
