"""Importance sampling between engine and learner: p_old / p_engine, bounded, one entry a trained token.

``token`` ratios are of single tokens; ``sequence`` ones of whole rows, the product of their tokens'; ``geometric`` ones
the same to the power of 1 / length, which long rows do not blow up. Outside of its bounds a ratio is cut
(``truncate``), or its tokens are not trained (``mask``); they stay in the denominators. ``none`` corrects nothing.

Each rule is declared with `agentrl.importance_sampling`, which makes it a name of ``learner.importance_sampling_mode``:
``(t: Tokens, *, parameters) -> Tensor``, the weight of each token. This module loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from agentrl.learner.losses.ratio import row_mean, row_sum
from agentrl.settings.entries import Entry, importance_sampling

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.learner.losses.losses import Tokens


def _token(difference: Tensor, rows: Tensor, count: int) -> Tensor:
    return difference.exp()


def _sequence(difference: Tensor, rows: Tensor, count: int) -> Tensor:
    return row_sum(difference, rows, count)[rows].exp()


def _geometric(difference: Tensor, rows: Tensor, count: int) -> Tensor:
    return row_mean(difference, rows, count)[rows].exp()


def _truncate(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    return ratio if low is None and high is None else ratio.clamp(low, high)


def _mask(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    outside = (ratio < (-inf if low is None else low)) | (ratio > (inf if high is None else high))
    return ratio.masked_fill(outside, 0.0)


@dataclass(frozen=True)
class _BoundedRatio:
    """Weigh a token by the ratio of its learner's to its engine's probability, within bounds."""

    level: Callable[[Tensor, Tensor, int], Tensor]
    bound: Callable[[Tensor, float | None, float | None], Tensor]

    def __call__(
        self,
        t: Tokens,
        *,
        importance_sampling_min: Annotated[float, Field(ge=0)] | None = None,
        importance_sampling_max: Annotated[float, Field(gt=0)] | None = 2.0,
    ) -> Tensor:
        """Compute the weight of each token.

        Args:
            importance_sampling_min: the lower bound.
            importance_sampling_max: the upper bound.
        """
        ratio = self.level(t.old_logprobs - t.sampling_logprobs, t.rows, t.count)
        return self.bound(ratio, importance_sampling_min, importance_sampling_max)


def _check_bounds(importance_sampling_min: float | None, importance_sampling_max: float | None) -> None:
    """Raise ValueError for bounds with nothing between them."""
    low, high = importance_sampling_min, importance_sampling_max
    if low is not None and high is not None and low > high:
        raise ValueError(f"importance_sampling_min {low} is over importance_sampling_max {high}")


def _declare(
    level: Callable[[Tensor, Tensor, int], Tensor],
    bound: Callable[[Tensor, float | None, float | None], Tensor],
    explain: str,
) -> Entry:
    declare = importance_sampling(explain=explain, by_row=level is not _token, check=_check_bounds)
    return declare(_BoundedRatio(level, bound))


_BOUNDS = "min {importance_sampling_min}, max {importance_sampling_max}"
_TOKEN, _ROW, _MEAN = "p_learner / p_engine of the token", "of its row", "of its row, by length"
token_truncate = _declare(_token, _truncate, f"{_TOKEN}, cut to its bounds: {_BOUNDS}")
token_mask = _declare(_token, _mask, f"{_TOKEN}, 0 outside of its bounds: {_BOUNDS}")
sequence_truncate = _declare(_sequence, _truncate, f"p_learner / p_engine {_ROW}, cut to its bounds: {_BOUNDS}")
sequence_mask = _declare(_sequence, _mask, f"p_learner / p_engine {_ROW}, 0 outside of its bounds: {_BOUNDS}")
geometric_truncate = _declare(_geometric, _truncate, f"p_learner / p_engine {_MEAN}, cut to its bounds: {_BOUNDS}")
geometric_mask = _declare(_geometric, _mask, f"p_learner / p_engine {_MEAN}, 0 outside of its bounds: {_BOUNDS}")


@importance_sampling(explain="no correction: each token counts 1, whatever the engine's probability was")
def none(t: Tokens) -> Tensor:
    """Return 1 for each token, as TRL does without its correction."""
    return t.old_logprobs.new_ones(t.old_logprobs.shape)
