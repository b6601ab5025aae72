"""How much better than its group each trajectory was: pure functions of the groups of a step.

``None`` is a member that cannot be scored (the world failed, or no reward applies): it is in no mean and no
standard deviation, and its advantage is 0. Standard deviations are unbiased.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Protocol

EPS = 1e-4  # added to a standard deviation, as TRL does


class Scored(Protocol):
    """What a trajectory is worth: named parts, their weights (1 by default), and the weighted sum."""

    @property
    def rewards(self) -> Mapping[str, float | None]: ...
    @property
    def weights(self) -> Mapping[str, float]: ...
    @property
    def reward(self) -> float | None: ...


Values = Sequence[float | None]
Advantage = Callable[[Sequence[Sequence[Scored]]], list[list[float]]]  # groups to groups


def grpo(groups: Sequence[Sequence[Scored]]) -> list[list[float]]:
    """(r - mean) / std of the group (GRPO, arXiv 2402.03300)."""
    return [[a / (deviation(rewards) + EPS) for a in centred(rewards)] for rewards in map(_rewards, groups)]


def dr_grpo(groups: Sequence[Sequence[Scored]]) -> list[list[float]]:
    """r - mean: no division, so that hard and easy tasks weigh by what they teach (Dr. GRPO, arXiv 2503.20783)."""
    return [centred(_rewards(group)) for group in groups]


def batch(groups: Sequence[Sequence[Scored]]) -> list[list[float]]:
    """(r - the group's mean) / the std of all rewards of the step (REINFORCE++-baseline, arXiv 2501.03262)."""
    rewards = [_rewards(group) for group in groups]
    std = deviation([r for own in rewards for r in own])
    return [[a / (std + EPS) for a in centred(own)] for own in rewards]


def rloo(groups: Sequence[Sequence[Scored]]) -> list[list[float]]:
    """r - the mean of the others (RLOO, arXiv 2402.14740)."""
    found = []
    for rewards in map(_rewards, groups):
        others = sum(r is not None for r in rewards) - 1
        found.append([a * (others + 1) / max(others, 1) for a in centred(rewards)])
    return found


def gdpo(groups: Sequence[Sequence[Scored]]) -> list[list[float]]:
    """Each part of the reward normalised by itself, in its group; the weighted sum again, over the step (GDPO,
    arXiv 2601.05242): parts of different scale do not drown each other."""
    sums = [_summed(group) for group in groups]
    known = [s for own in sums for s in own if s is not None]
    mean, std = sum(known) / max(len(known), 1), deviation(known)
    return [[0.0 if s is None else (s - mean) / (std + EPS) for s in own] for own in sums]


def _summed(group: Sequence[Scored]) -> list[float | None]:
    names = list(dict.fromkeys(name for member in group for name in member.rewards))
    total = [0.0] * len(group)
    for name in names:
        parts = [member.rewards.get(name) for member in group]
        std = deviation(parts)
        for i, (member, z) in enumerate(zip(group, centred(parts), strict=True)):
            total[i] += member.weights.get(name, 1.0) * z / (std + EPS)
    return [None if m.reward is None else t for m, t in zip(group, total, strict=True)]


def _rewards(group: Sequence[Scored]) -> list[float | None]:
    return [member.reward for member in group]


def centred(values: Values) -> list[float]:
    """Less their mean; all 0.0 where they do not differ."""
    known = [v for v in values if v is not None]
    if len(set(known)) < 2:  # exactly nothing to learn, whatever the mean is rounded to
        return [0.0] * len(values)
    mean = sum(known) / len(known)
    return [0.0 if v is None else v - mean for v in values]


def deviation(values: Values) -> float:
    known = [v for v in values if v is not None]
    if len(known) < 2:
        return 0.0
    mean = sum(known) / len(known)
    return sqrt(sum((v - mean) ** 2 for v in known) / (len(known) - 1))


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "batch": batch, "rloo": rloo, "gdpo": gdpo}
