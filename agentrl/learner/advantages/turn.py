"""How much better each *turn* was: advantages from the rewards of single steps. Pure functions of the groups of a step.

A turn's return is what came after it: ``G_k = sum over j >= k of gamma^(j - k) r_j``. What an episode's score says
beyond the sum of its steps' rewards is earned by its last turn, so that the turns' rewards sum to the episode's reward;
an environment that rewards the outcome alone has all of it there.

Turns are never compared by their number: a policy decides itself when it stops, and late turns are those of its worst
episodes. They are compared with all turns of the group, with the group's first turns, or where they met the same
observation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from math import fsum
from typing import Protocol

from agentrl.learner.advantage import EPS, deviation, grpo
from agentrl.spread import Scored, center, magnitude


class Played(Scored, Protocol):
    """A trajectory as it went, turn by turn."""

    @property
    def turns(self) -> int: ...
    @property
    def step_rewards(self) -> Sequence[float]: ...
    @property
    def observed(self) -> Sequence[Hashable]:
        """List what each turn answered."""
        ...


TurnCredit = tuple[float, ...]  # of each turn
TurnAdvantage = Callable[..., list[list[TurnCredit]]]


def rebn(groups: Sequence[Sequence[Played]], gamma: float = 1.0) -> list[list[TurnCredit]]:
    """Normalise each turn's return G over all turns of the group: (G - mean) / std.

    This is return batch normalisation, as Turn-PPO and RAGEN have it.
    """
    found = []
    for group, returns in zip(groups, _returns(groups, gamma), strict=True):
        pool = [g for own in returns for g in own]
        found.append(_against(returns, pool, _magnitudes(group)))
    return found


def first_turn(groups: Sequence[Sequence[Played]], gamma: float = 1.0) -> list[list[TurnCredit]]:
    """Normalise each turn's return G by the mean and std of the group's returns at the first turn.

    With gamma = 1 and the outcome as the only reward this is GRPO.
    """
    return [
        _against(returns, [own[0] for own in returns if own], _magnitudes(group))
        for group, returns in zip(groups, _returns(groups, gamma), strict=True)
    ]


def gigpo(groups: Sequence[Sequence[Played]], gamma: float = 1.0, step_weight: float = 1.0) -> list[list[TurnCredit]]:
    """Add to GRPO's advantage of the episode that of the turn among those that answered the same observation.

    Compared are all turns of the group (GiGPO, arXiv 2505.10978).
    """
    found = []
    for group, whole, returns in zip(groups, grpo(groups), _returns(groups, gamma), strict=True):
        met: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        for i, own in enumerate(returns):
            for k in range(len(own)):
                met[group[i].observed[k]].append((i, k))
        steps = [[0.0] * len(own) for own in returns]
        for places in met.values():
            values = [returns[i][k] for i, k in places]
            scale = deviation(values) + EPS
            for (i, k), a in zip(places, center(values, _magnitudes(group)), strict=True):
                steps[i][k] = a / scale
        found.append([tuple(a + step_weight * s for s in own) for a, own in zip(whole, steps, strict=True)])
    return found


def turn_rewards(member: Played) -> list[float]:
    """List a reward for each turn. One that was cut short has no step; it earns what the score has beyond the steps."""
    if member.reward is None or not member.turns:
        return []
    rewards = [*member.step_rewards, *[0.0] * (member.turns - len(member.step_rewards))]
    rewards[-1] += member.reward - sum(member.step_rewards)
    return rewards


def _returns(groups: Sequence[Sequence[Played]], gamma: float) -> list[list[list[float]]]:
    """Compute the return of each turn of each member; none for whoever is not scored."""
    found = []
    for group in groups:
        members = []
        for member in group:
            total, returns = 0.0, []
            for reward in reversed(turn_rewards(member)):
                total = reward + gamma * total
                returns.append(total)
            members.append(returns[::-1])
        found.append(members)
    return found


def _magnitudes(group: Sequence[Played]) -> list[float]:
    """Sum the absolute terms of each member's returns: what their rounding is relative to."""
    scored = [m for m in group if m.reward is not None]
    return [magnitude(m) + fsum(map(abs, m.step_rewards)) for m in scored]


def _against(
    returns: Sequence[Sequence[float]], pool: Sequence[float], magnitudes: Sequence[float]
) -> list[TurnCredit]:
    """Normalise each return by the mean and the standard deviation of the pool."""
    scale = deviation(pool) + EPS
    return [tuple(a / scale for a in center(own, magnitudes, pool)) for own in returns]


CREDITS: dict[str, TurnAdvantage] = {"rebn": rebn, "first_turn": first_turn, "gigpo": gigpo}
