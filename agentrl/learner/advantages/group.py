"""Advantages of episodes over their groups: pure functions of the groups of a step.

Each is declared with `agentrl.advantage`, which makes it a name of ``learner.advantage``. It is called with all groups
that the step learns from, and returns a number (or one a turn: `turn`) for each member of each group. What stands in
braces in ``explain`` is the episode's reward and its group's mean, std and mean of the others.

A reward of ``None`` is that of a member that cannot be scored (an infrastructure error, or no reward applies): it is
in no mean and no standard deviation, and its advantage is 0. Standard deviations are unbiased.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from agentrl.settings.entries import advantage
from agentrl.spread import Scored, Values, center, center_rewards

EPS = 1e-4  # added to a standard deviation, as TRL does


@advantage(explain="({reward} - {mean:.4g}) / ({std:.4g} + 0.0001)")
def grpo(groups: Sequence[Sequence[Scored]]) -> list[list[float]]:
    """Compute (r - mean) / std of the group (GRPO, arXiv 2402.03300)."""
    return [[a / (compute_std(_rewards(group)) + EPS) for a in center_rewards(group)] for group in groups]


@advantage(explain="{reward} - {mean:.4g}")
def dr_grpo(groups: Sequence[Sequence[Scored]]) -> list[list[float]]:
    """Compute r - mean: no division, so hard and easy tasks weigh by what they teach (Dr. GRPO, arXiv 2503.20783)."""
    return [center_rewards(group) for group in groups]


@advantage(explain="its distance from the group's mean, divided by the standard deviation of all rewards of the step")
def batch(groups: Sequence[Sequence[Scored]]) -> list[list[float]]:
    """Compute (r - the group's mean) / the std of all rewards of the step (REINFORCE++-baseline, arXiv 2501.03262)."""
    std = compute_std([r for group in groups for r in _rewards(group)])
    return [[a / (std + EPS) for a in center_rewards(group)] for group in groups]


@advantage(explain="{reward} - {others:.4g}, the mean of the others")
def rloo(groups: Sequence[Sequence[Scored]]) -> list[list[float]]:
    """Compute r - the mean of the others (RLOO, arXiv 2402.14740)."""
    advantages = []
    for group in groups:
        others = sum(r is not None for r in _rewards(group)) - 1
        advantages.append([a * (others + 1) / max(others, 1) for a in center_rewards(group)])
    return advantages


@advantage(explain="each reward component normalised in the group, their weighted sum normalised over the step")
def gdpo(groups: Sequence[Sequence[Scored]]) -> list[list[float]]:
    """Normalise each component of the reward in its group, then their weighted sum over the step (GDPO,
    arXiv 2601.05242): components of different scale do not drown each other."""
    sums = [_sum_normalised(group) for group in groups]
    totals, magnitudes = [total for own in sums for total, _ in own], [size for own in sums for _, size in own]
    std, centered = compute_std(totals), iter(center(totals, magnitudes))
    return [[next(centered) / (std + EPS) for _ in own] for own in sums]


def _sum_normalised(group: Sequence[Scored]) -> list[tuple[float | None, float]]:
    """Sum each member's normalised components; beside it the sum of their absolute values."""
    scored = [m for m in group if m.reward is not None]
    totals, sizes = [0.0] * len(scored), [0.0] * len(scored)
    for name in dict.fromkeys(name for member in scored for name in member.rewards):
        parts = [member.rewards.get(name) for member in scored]
        std = compute_std(parts)
        for i, (member, distance) in enumerate(zip(scored, center(parts), strict=True)):
            z = member.weights.get(name, 1.0) * distance / (std + EPS)
            totals[i], sizes[i] = totals[i] + z, sizes[i] + abs(z)
    by_member = iter(zip(totals, sizes, strict=True))
    return [(None, 0.0) if m.reward is None else next(by_member) for m in group]


def _rewards(group: Sequence[Scored]) -> list[float | None]:
    return [member.reward for member in group]


def compute_std(values: Values) -> float:
    """Compute the unbiased standard deviation of the values that are known; 0.0 of fewer than two."""
    scored = [v for v in values if v is not None]
    if len(scored) < 2:
        return 0.0
    mean = sum(scored) / len(scored)
    return sqrt(sum((v - mean) ** 2 for v in scored) / (len(scored) - 1))
