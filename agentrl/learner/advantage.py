"""How much better than its group each trajectory was: pure functions of rewards.

``None`` is a member that cannot be scored (the world failed, or no reward applies): it is in no mean and no
standard deviation, and its advantage is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

EPS = 1e-4  # added to the standard deviation, as TRL does

Rewards = Sequence[float | None]
Advantage = Callable[[Rewards], list[float]]


def grpo(rewards: Rewards) -> list[float]:
    """(r - mean) / (std + eps), the unbiased std of the group (GRPO, arXiv 2402.03300)."""
    centred = dr_grpo(rewards)
    known = sum(r is not None for r in rewards)
    std = sqrt(sum(a * a for a in centred) / max(known - 1, 1))
    return [a / (std + EPS) for a in centred]


def dr_grpo(rewards: Rewards) -> list[float]:
    """r - mean: no division, so that hard and easy tasks weigh by what they teach (Dr. GRPO, arXiv 2503.20783)."""
    known = [r for r in rewards if r is not None]
    if len(set(known)) < 2:  # exactly nothing to learn, whatever the mean is rounded to
        return [0.0] * len(rewards)
    mean = sum(known) / len(known)
    return [0.0 if r is None else r - mean for r in rewards]


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo}
