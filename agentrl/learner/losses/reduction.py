"""From tokens to one number: a weight for each token of a row, given how many trained tokens each row has.

They are fixed before the first backward pass of an optimizer step, from all of its rows: so the loss does not depend
on how rows are packed into micro-batches. (TRL's bnpo and dr_grpo take the mean of micro-batches' means instead.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Reduction = Callable[[Sequence[int], int], list[float]]  # lengths, and the longest a row could be


def token_mean(lengths: Sequence[int], longest: int) -> list[float]:
    """Every token of the step counts the same (DAPO, arXiv 2503.14476)."""
    return [1 / max(sum(lengths), 1)] * len(lengths)


def row_mean(lengths: Sequence[int], longest: int) -> list[float]:
    """Every row counts the same, whatever its length: the mean of the rows' means (GRPO, arXiv 2402.03300)."""
    return [1 / (max(n, 1) * len(lengths)) for n in lengths]


def constant(lengths: Sequence[int], longest: int) -> list[float]:
    """Over rows times the longest they could be, so that length has no influence (Dr. GRPO, arXiv 2503.20783)."""
    return [1 / (len(lengths) * longest) for _ in lengths]


def row_sum(lengths: Sequence[int], longest: int) -> list[float]:
    """The mean of the rows' sums: long rows count more, which is meant for ratios by row (LUSPO)."""
    return [1 / len(lengths) for _ in lengths]


REDUCTIONS: dict[str, Reduction] = {
    "dapo": token_mean,
    "bnpo": token_mean,
    "cispo": token_mean,
    "vespo": token_mean,
    "grpo": row_mean,
    "sapo": row_mean,
    "dr_grpo": constant,
    "luspo": row_sum,
}
