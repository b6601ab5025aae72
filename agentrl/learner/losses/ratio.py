"""How far the policy has moved from the one that acted: pure functions of tensors with one entry a trained token.

``rows`` names the row (the trajectory) of each token; sums over a row do not depend on where its tokens stand.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def row_sum(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """(tokens,) to (rows,)"""
    return values.new_zeros(count).index_add(0, rows, values)


def row_mean(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """(tokens,) to (rows,); 0 for a row without tokens."""
    return row_sum(values, rows, count) / row_sum(values.detach() * 0 + 1, rows, count).clamp(min=1)


def token_log_ratio(logp: Tensor, old: Tensor, rows: Tensor, count: int) -> Tensor:
    """Of each token by itself."""
    return logp - old


def sequence_log_ratio(logp: Tensor, old: Tensor, rows: Tensor, count: int) -> Tensor:
    """The mean of its row, for every token: the row's likelihood ratio by length (GSPO, arXiv 2507.18071)."""
    return row_mean(logp - old, rows, count)[rows]


LogRatio = Callable[[Tensor, Tensor, Tensor, int], Tensor]
LEVELS: dict[str, LogRatio] = {"token": token_log_ratio, "sequence": sequence_log_ratio}
