"""The policy loss: pure functions of tensors with one entry a trained token.

A reduction is a weight for each token, fixed before the first backward pass of a step: so the loss does not depend
on how the rows are packed into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def clipped(logp: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """PPO's pessimistic clipped objective, negated; ``high > low`` is DAPO's clip-higher (arXiv 2503.14476)."""
    ratio = (logp - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def out_of_range(logp: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """1.0 where the clip takes the gradient away, 0.0 elsewhere."""
    ratio = (logp.detach() - old).exp()
    return (((ratio < 1 - low) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))).float()


def truncated_importance(old: Tensor, sampled: Tensor, cap: float) -> Tensor:
    """min(p_old / p_engine, cap): corrects for an engine whose numerics differ from the learner's (TIS)."""
    return (old - sampled).exp().clamp(max=cap)


def dapo_weights(lengths: Sequence[int]) -> list[float]:
    """A row's weight for each of its tokens: every token of the step counts the same (token mean)."""
    total = max(sum(lengths), 1)
    return [1 / total for _ in lengths]


def grpo_weights(lengths: Sequence[int]) -> list[float]:
    """Every row counts the same, whatever its length (the mean of the rows' means)."""
    return [1 / (max(n, 1) * len(lengths)) for n in lengths]


Reduction = Callable[[Sequence[int]], list[float]]
LOSSES: dict[str, Reduction] = {"dapo": dapo_weights, "grpo": grpo_weights}
