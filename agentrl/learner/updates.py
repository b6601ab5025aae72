"""The optimizer steps of a batch: the rows of each, in micro-batches, with what stays the same over all iterations.

Rank 0 has all the rows, and plans: which of them go through the model together. Every process has the micro-batches
of its own share, and the outline of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.learner.distributed import ProcessGroup
from agentrl.learner.packing import MicroBatch
from agentrl.learner.row_arrays import RowArrays


@dataclass
class MicroBatchState:
    """Tensors of a micro-batch's trained tokens, (trained,) each, that stay the same over all iterations."""

    ref_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    high_entropy_mask: Tensor | None = None
    _first: Tensor | None = None  # logprobs of the first iteration, until it is over
    _correction: Tensor | None = None
    _gradients: Tensor | None = None

    def begin(self, logp: Tensor, correction: Tensor) -> None:
        """Begin an iteration; autograd keeps the gradient of the first one's logprobs."""
        if self._correction is None:
            self._first, self._correction = logp, correction
            if logp.requires_grad:
                logp.retain_grad()

    def keep_gradients(self) -> None:
        """Take the gradient of the first iteration's logprobs, once it is computed; 0 for a loss that has none."""
        if self._first is not None:
            logp, self._first = self._first, None
            self._gradients = torch.zeros_like(logp) if logp.grad is None else logp.grad

    def learned(self) -> Tensor:
        """Return the old logprobs, gradients and corrections side by side, (trained, 3)."""
        assert self.old_logprobs is not None
        assert self._gradients is not None
        assert self._correction is not None
        columns = (self.old_logprobs, self._gradients, self._correction)
        return torch.stack([c.detach().float() for c in columns], 1).cpu()


class UpdateOutline(NamedTuple):
    """An optimizer step as every process knows it, whoever has its rows."""

    micro_batches: int
    tokens: int  # of all rows, the prompts' too
    trained_tokens: int
    idle_token: int  # one of them, for a process that has no row


@dataclass(frozen=True)
class Update:
    """An optimizer step of a batch: this process's micro-batches with their state, and what means are over."""

    shard: Sequence[tuple[MicroBatch, MicroBatchState]]
    bonus_tokens: float
    tokens: int  # of all rows, the prompts' too
    idle: int = 0  # rounds in which this process has no micro-batch, and others have
    idle_token: int = 0


def outline_update(batches: Sequence[MicroBatch]) -> UpdateOutline:
    """Outline an optimizer step of all its micro-batches."""
    rows = [row for batch in batches for row in batch.rows]
    trained = sum(row.trained for row in rows)
    return UpdateOutline(len(batches), sum(len(row.token_ids) for row in rows), trained, int(rows[0].token_ids[0]))


def cut_batch(
    rows: Sequence[RowArrays], weights: Sequence[float], numbers: Sequence[int]
) -> list[tuple[list[RowArrays], list[float]]]:
    """Return the rows of each optimizer step with their weights; a step without a row is left out."""
    by_number: dict[int, tuple[list[RowArrays], list[float]]] = {number: ([], []) for number in sorted(set(numbers))}
    for row, weight, number in zip(rows, weights, numbers, strict=True):
        by_number[number][0].append(row)
        by_number[number][1].append(weight)
    return list(by_number.values())


def unshard(
    process_group: ProcessGroup, updates: Sequence[Sequence[MicroBatch]], gathered: Sequence[Tensor]
) -> list[Tensor]:
    """Split what rank 0 gathered of the processes' trained tokens into one piece for each micro-batch, as planned."""
    own = [[batch for batches in updates for batch in process_group.shard(batches, r)] for r in range(len(gathered))]
    sizes = [[sum(batch.trained_counts) for batch in batches] for batches in own]
    pieces = [iter(torch.split(values, n)) for values, n in zip(gathered, sizes, strict=True)]
    return [next(pieces[i % len(gathered)]) for batches in updates for i in range(len(batches))]


def order_by_row(rows: Sequence[RowArrays], batches: Sequence[MicroBatch], values: Sequence[Tensor]) -> list[Tensor]:
    """Split the values of the micro-batches' trained tokens into one piece for each row, in the order of ``rows``."""
    pairs = ((b.rows, b.split_by_row(v)) for b, v in zip(batches, values, strict=True))
    by_row = {id(row): piece for batch_rows, pieces in pairs for row, piece in zip(batch_rows, pieces, strict=True)}
    return [by_row[id(row)] for row in rows]
