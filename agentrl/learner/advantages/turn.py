"""Advantages of *turns*, from the rewards of single steps: pure functions of the groups of a step.

A turn's return is what came after it: ``G_k = sum over j >= k of gamma^(j - k) r_j``. The part of an episode's score
beyond the sum of its steps' rewards belongs to its last turn, so the turns' rewards sum to the episode's reward. An
environment that rewards the outcome alone has all of it there.

Turns are never compared by their number: a policy decides itself when it stops, and late turns are those of its worst
episodes. They are compared with all turns of the group, with the group's first turns, or where they met the same
observation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from math import fsum
from typing import Annotated, Protocol

from pydantic import Field

from agentrl.learner.advantages.group import EPS, compute_std, grpo
from agentrl.settings.entries import advantage
from agentrl.spread import Scored, center, sum_magnitudes


class _SteppedEpisode(Scored, Protocol):
    """A scored trajectory, turn by turn."""

    @property
    def turns(self) -> int: ...
    @property
    def step_rewards(self) -> Sequence[float]: ...
    @property
    def in_time(self) -> Sequence[int]: ...
    @property
    def observed(self) -> Sequence[Hashable]:
        """List the observation that each turn answered."""
        ...


TurnValues = tuple[float, ...]  # of each turn
Gamma = Annotated[float, Field(gt=0, le=1)]


@advantage(explain="each turn's return, normalised over all turns of the group (gamma {gamma})")
def rebn(groups: Sequence[Sequence[_SteppedEpisode]], *, gamma: Gamma = 1.0) -> list[list[TurnValues]]:
    """Normalise each turn's return G over all turns of the group: (G - mean) / std.

    This is return batch normalisation, as Turn-PPO and RAGEN have it.

    Args:
        gamma: what a later turn's reward counts in a turn's return.
    """
    advantages = []
    for group, returns in zip(groups, _compute_returns(groups, gamma), strict=True):
        pool = [g for own in returns for g in own]
        advantages.append(_normalise(returns, pool, _magnitudes(group)))
    return advantages


@advantage(explain="each turn's return, normalised by the group's returns at the first turn (gamma {gamma})")
def first_turn(groups: Sequence[Sequence[_SteppedEpisode]], *, gamma: Gamma = 1.0) -> list[list[TurnValues]]:
    """Normalise each turn's return G by the mean and std of the group's returns at the first turn.

    With gamma = 1 and the outcome as the only reward this is GRPO.

    Args:
        gamma: what a later turn's reward counts in a turn's return.
    """
    advantages = []
    for group, returns in zip(groups, _compute_returns(groups, gamma), strict=True):
        pool = [own[member.in_time[0]] for member, own in zip(group, returns, strict=True) if own]
        advantages.append(_normalise(returns, pool, _magnitudes(group)))
    return advantages


@advantage(
    explain="GRPO's advantage of the episode, plus {step_weight} times that of the turn among turns that answered the "
    "same observation (gamma {gamma})"
)
def gigpo(
    groups: Sequence[Sequence[_SteppedEpisode]],
    *,
    gamma: Gamma = 1.0,
    step_weight: Annotated[float, Field(ge=0)] = 1.0,
) -> list[list[TurnValues]]:
    """Add to GRPO's advantage of the episode that of the turn among those that answered the same observation.

    Compared are all turns of the group (GiGPO, arXiv 2505.10978).

    Args:
        gamma: what a later turn's reward counts in a turn's return.
        step_weight: of the turn's part.
    """
    advantages = []
    for group, whole, returns in zip(groups, grpo(groups), _compute_returns(groups, gamma), strict=True):
        met: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        for i, own in enumerate(returns):
            for k in range(len(own)):
                met[group[i].observed[k]].append((i, k))
        steps = [[0.0] * len(own) for own in returns]
        for turns in met.values():
            values = [returns[i][k] for i, k in turns]
            scale = compute_std(values) + EPS
            for (i, k), a in zip(turns, center(values, _magnitudes(group)), strict=True):
                steps[i][k] = a / scale
        advantages.append([tuple(a + step_weight * s for s in own) for a, own in zip(whole, steps, strict=True)])
    return advantages


def split_reward(member: _SteppedEpisode) -> list[float]:
    """Split a reward over the turns; the last one in time gets what the score adds, and one cut short has no step."""
    if member.reward is None or not member.turns:
        return []
    rewards = [*member.step_rewards, *[0.0] * (member.turns - len(member.step_rewards))]
    rewards[member.in_time[-1]] += member.reward - sum(member.step_rewards)
    return rewards


def _compute_returns(groups: Sequence[Sequence[_SteppedEpisode]], gamma: float) -> list[list[list[float]]]:
    """Compute the return of each turn of each member; none for a member that is not scored."""
    returns_by_group = []
    for group in groups:
        members = []
        for member in group:
            total, returns = 0.0, split_reward(member)
            for place in reversed(member.in_time if returns else ()):
                returns[place] = total = returns[place] + gamma * total
            members.append(returns)
        returns_by_group.append(members)
    return returns_by_group


def _magnitudes(group: Sequence[_SteppedEpisode]) -> list[float]:
    """Sum the absolute terms of each member's returns: what their rounding is relative to."""
    scored = [m for m in group if m.reward is not None]
    return [sum_magnitudes(m) + fsum(map(abs, m.step_rewards)) for m in scored]


def _normalise(
    returns: Sequence[Sequence[float]], pool: Sequence[float], magnitudes: Sequence[float]
) -> list[TurnValues]:
    """Normalise each return by the mean and the standard deviation of the pool."""
    scale = compute_std(pool) + EPS
    return [tuple(a / scale for a in center(own, magnitudes, pool)) for own in returns]
