"""The optimizer steps of a batch: the rows of each, in micro-batches, with what stays the same over all iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.learner.packing import MicroBatch
from agentrl.types import Sample


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


@dataclass(frozen=True)
class Update:
    """An optimizer step of a batch: all its micro-batches, this process's with their state, and what means are over."""

    batches: Sequence[MicroBatch]
    shard: Sequence[tuple[MicroBatch, MicroBatchState]]
    bonus_tokens: float
    tokens: int  # of all rows, the prompts' too
    idle: int = 0  # rounds in which this process has no micro-batch, and others have


def cut_batch(
    rows: Sequence[Sample], weights: Sequence[float], numbers: Sequence[int]
) -> list[tuple[list[Sample], list[float]]]:
    """Return the rows of each optimizer step with their weights; a step without a row is left out."""
    by_number: dict[int, tuple[list[Sample], list[float]]] = {number: ([], []) for number in sorted(set(numbers))}
    for row, weight, number in zip(rows, weights, numbers, strict=True):
        by_number[number][0].append(row)
        by_number[number][1].append(weight)
    return list(by_number.values())


def order_by_row(rows: Sequence[Sample], batches: Sequence[MicroBatch], values: Sequence[Tensor]) -> list[Tensor]:
    """Split the values of the micro-batches' trained tokens into one piece for each row, in the order of ``rows``."""
    pairs = ((b.rows, b.split_by_row(v)) for b, v in zip(batches, values, strict=True))
    by_row = {id(row): piece for batch_rows, pieces in pairs for row, piece in zip(batch_rows, pieces, strict=True)}
    return [by_row[id(row)] for row in rows]
