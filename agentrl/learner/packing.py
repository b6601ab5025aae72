"""From groups to samples, and from samples to tensors.

token_ids   (rows, length) int64     padded on the right
trained     (rows, length) bool      the engine sampled it, and its advantage is not zero
logprobs    (trained,)     float32   the engine's, in row order
advantages  (trained,)     float32
weights     (trained,)     float32   the reduction's
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.learner.advantage import Advantage
from agentrl.types import Group, Sample, Stop


@dataclass(frozen=True)
class MicroBatch:
    """Rows of similar length that go through the model together; the legend is at the top of this file."""

    token_ids: Tensor
    trained: Tensor
    logprobs: Tensor
    advantages: Tensor
    weights: Tensor


def samples(groups: Iterable[Group], advantage: Advantage, mask_stops: frozenset[Stop] = frozenset()) -> list[Sample]:
    """The rows worth learning from: zero-advantage members cost nothing, so they are not made.

    Args:
        groups: a faulted or unscored member gets no advantage and is in no statistic.
        advantage: of the rewards of a group.
        mask_stops: members that stopped for one of these reasons count in the statistics, but are not trained.
    """
    rows = []
    for group in groups:
        members = [t for t in group if t.fault is None]
        for t, a in zip(members, advantage([t.reward for t in members]), strict=True):
            if a != 0.0 and t.sampled_tokens and t.stop not in mask_stops:
                rows.append(Sample(t.token_ids, t.loss_mask, t.logprobs, [a] * len(t.token_ids)))
    return rows


def pack(rows: Sequence[Sample], weights: Sequence[float], token_budget: int) -> list[MicroBatch]:
    """Micro-batches of at most ``token_budget`` tokens, padding included; a longer row goes alone."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].token_ids))
    batches: list[list[int]] = []
    for i in order:
        if batches and (len(batches[-1]) + 1) * len(rows[i].token_ids) <= token_budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return [_tensors([rows[i] for i in batch], [weights[i] for i in batch]) for batch in batches]


def _tensors(rows: Sequence[Sample], weights: Sequence[float]) -> MicroBatch:
    length = max(len(r.token_ids) for r in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    trained = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, r in enumerate(rows):
        ids[i, : len(r.token_ids)] = torch.tensor(r.token_ids)
        trained[i, : len(r.token_ids)] = torch.tensor(r.loss_mask, dtype=torch.bool)

    def picked(values: Iterable[Iterable[float]]) -> Tensor:
        return torch.tensor(
            [v for row, r in zip(values, rows, strict=True) for v, m in zip(row, r.loss_mask, strict=True) if m]
        )

    each = ([w] * len(r.token_ids) for w, r in zip(weights, rows, strict=True))
    return MicroBatch(ids, trained, picked(r.logprobs for r in rows), picked(r.advantages for r in rows), picked(each))
