"""How much better than its group each trajectory was: pure functions of the groups of a step.

``None`` is a member that cannot be scored (the world failed, or no reward applies): it is in no mean and no
standard deviation, and its advantage is 0. Standard deviations are unbiased.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

from agentrl.spread import Scored, Values, center, center_rewards

EPS = 1e-4  # added to a standard deviation, as TRL does
Advantage = Callable[[Sequence[Sequence[Scored]]], list[list[float]]]  # groups to groups


def grpo(groups: Sequence[Sequence[Scored]]) -> list[list[float]]:
    """(r - mean) / std of the group (GRPO, arXiv 2402.03300)."""
    return [[a / (deviation(_rewards(group)) + EPS) for a in center_rewards(group)] for group in groups]


def dr_grpo(groups: Sequence[Sequence[Scored]]) -> list[list[float]]:
    """r - mean: no division, so that hard and easy tasks weigh by what they teach (Dr. GRPO, arXiv 2503.20783)."""
    return [center_rewards(group) for group in groups]


def batch(groups: Sequence[Sequence[Scored]]) -> list[list[float]]:
    """(r - the group's mean) / the std of all rewards of the step (REINFORCE++-baseline, arXiv 2501.03262)."""
    std = deviation([r for group in groups for r in _rewards(group)])
    return [[a / (std + EPS) for a in center_rewards(group)] for group in groups]


def rloo(groups: Sequence[Sequence[Scored]]) -> list[list[float]]:
    """r - the mean of the others (RLOO, arXiv 2402.14740)."""
    found = []
    for group in groups:
        others = sum(r is not None for r in _rewards(group)) - 1
        found.append([a * (others + 1) / max(others, 1) for a in center_rewards(group)])
    return found


def gdpo(groups: Sequence[Sequence[Scored]]) -> list[list[float]]:
    """Each part of the reward normalised by itself, in its group; the weighted sum again, over the step (GDPO,
    arXiv 2601.05242): parts of different scale do not drown each other."""
    sums = [_summed(group) for group in groups]
    known, magnitudes = [total for own in sums for total, _ in own], [size for own in sums for _, size in own]
    std, centered = deviation(known), iter(center(known, magnitudes))
    return [[next(centered) / (std + EPS) for _ in own] for own in sums]


def _summed(group: Sequence[Scored]) -> list[tuple[float | None, float]]:
    """Sum each member's normalised parts; beside it the sum of their absolute values."""
    scored = [m for m in group if m.reward is not None]
    totals, sizes = [0.0] * len(scored), [0.0] * len(scored)
    for name in dict.fromkeys(name for member in scored for name in member.rewards):
        parts = [member.rewards.get(name) for member in scored]
        std = deviation(parts)
        for i, (member, distance) in enumerate(zip(scored, center(parts), strict=True)):
            z = member.weights.get(name, 1.0) * distance / (std + EPS)
            totals[i], sizes[i] = totals[i] + z, sizes[i] + abs(z)
    known = iter(zip(totals, sizes, strict=True))
    return [(None, 0.0) if m.reward is None else next(known) for m in group]


def _rewards(group: Sequence[Scored]) -> list[float | None]:
    return [member.reward for member in group]


def deviation(values: Values) -> float:
    """Compute the unbiased standard deviation of the values that are known; 0.0 of fewer than two."""
    known = [v for v in values if v is not None]
    if len(known) < 2:
        return 0.0
    mean = sum(known) / len(known)
    return sqrt(sum((v - mean) ** 2 for v in known) / (len(known) - 1))


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "batch": batch, "rloo": rloo, "gdpo": gdpo}
