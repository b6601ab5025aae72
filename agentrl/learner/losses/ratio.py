"""The policy's ratio to the one that acted: pure functions of tensors with one entry a trained token.

``rows`` names the row (the trajectory) of each token; sums over a row do not depend on where its tokens stand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def row_sum(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Sum (tokens,) over each row: (rows,)."""
    return values.new_zeros(count).index_add(0, rows, values)


def row_mean(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Average (tokens,) over each row: (rows,); 0 for a row without tokens."""
    return row_sum(values, rows, count) / row_sum(values.detach() * 0 + 1, rows, count).clamp(min=1)


def _token_log_ratio(logp: Tensor, old: Tensor, rows: Tensor, count: int) -> Tensor:
    """Compute each token's own log ratio."""
    return logp - old


def _sequence_log_ratio(logp: Tensor, old: Tensor, rows: Tensor, count: int) -> Tensor:
    """Give every token the mean of its row: the row's likelihood ratio by length (GSPO, arXiv 2507.18071)."""
    return row_mean(logp - old, rows, count)[rows]


LEVELS: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "token": _token_log_ratio,
    "sequence": _sequence_log_ratio,
}
