"""Reductions, from tokens to one number: the weight of each row's tokens, given how many trained tokens each row has.

Weights are fixed before the first backward pass of an optimizer step, from all of its rows: so the loss does not depend
on how rows are packed into micro-batches. (TRL's bnpo and dr_grpo take the mean of micro-batches' means instead.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentrl.settings.entries import Entry

Reduction = Callable[[Sequence[int], int], list[float]]  # lengths, and the longest a row could be


def _token_mean(lengths: Sequence[int], longest: int) -> list[float]:
    """Weigh every token of the step the same (DAPO, arXiv 2503.14476)."""
    return [1 / max(sum(lengths), 1)] * len(lengths)


def _seq_mean_token_mean(lengths: Sequence[int], longest: int) -> list[float]:
    """Weigh every row the same, whatever its length: the mean of the rows' means (GRPO, arXiv 2402.03300)."""
    return [1 / (max(n, 1) * len(lengths)) for n in lengths]


def _seq_mean_token_sum_norm(lengths: Sequence[int], longest: int) -> list[float]:
    """Divide by rows times the longest they could be, so that length has no influence (Dr. GRPO, arXiv 2503.20783)."""
    return [1 / (len(lengths) * longest) for _ in lengths]


def _seq_mean_token_sum(lengths: Sequence[int], longest: int) -> list[float]:
    """Take the mean of the rows' sums: long rows count more, which is meant for ratios by row (LUSPO)."""
    return [1 / len(lengths) for _ in lengths]


PER_UPDATE = ("update_token_mean",)  # those of an optimizer step's rows alone, where a batch is cut into several
REDUCTIONS: dict[str, Reduction] = {
    "token_mean": _token_mean,
    "update_token_mean": _token_mean,
    "seq_mean_token_mean": _seq_mean_token_mean,
    "seq_mean_token_sum_norm": _seq_mean_token_sum_norm,
    "seq_mean_token_sum": _seq_mean_token_sum,
}


def reduce_rows(entry: Entry, lengths: Sequence[int], longest: int) -> list[float]:
    """Compute the weight of each row's tokens by a loss's own reduction."""
    return REDUCTIONS[entry.reduction](lengths, longest)
