"""Advantages of imitation: 1 for what is imitated, 0 for what is not, whatever others of its group earned.

With the loss ``sft`` that is supervised fine-tuning: of demonstrations, or of what the policy itself did well.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.settings.entries import advantage
from agentrl.spread import Scored


@advantage(explain="1 for each demonstration")
def demonstrated(groups: Sequence[Sequence[Scored]]) -> list[list[float]]:
    """Give each episode 1: all are demonstrations, chosen before (`agentrl sft`)."""
    return [[1.0 for _ in group] for group in groups]


@advantage(explain="1 for a reward of {min_reward} or more, otherwise 0")
def rejection_sampling(groups: Sequence[Sequence[Scored]], *, min_reward: float = 1.0) -> list[list[float]]:
    """Give each episode that earned enough 1, and others 0: the policy's own best is imitated (RAFT,
    arXiv 2304.06767).

    Args:
        min_reward: the least reward of an episode that is kept.
    """
    return [[float(m.reward is not None and m.reward >= min_reward) for m in group] for group in groups]
