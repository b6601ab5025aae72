"""The provenance of a fault that ended an episode: its own request's doing, or the world's; and what it earns then.

An episode that *provoked* its fault earns the floor: failing on purpose is worth no more than the worst answer. A fault
before the model's first turn, in the engine, or in what belongs to the whole group is the world's. Of any other, the
evidence is, in this order:

    the environment's health check    it passes: provoked; it fails: the world's
    the other members of its group    all of them ended in faults too: the task's, so the world's
    nearly no episode faults          one in fifty, of fifty at least: the world's, a hiccup
    the other episodes' ends          some ended well, and not ``DOWN`` in a row around it in faults: provoked
    nothing is known                  the world's
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import fsum

from agentrl.tools.provenance import DOWN
from agentrl.types import Fault, Trajectory

KEPT = 200  # ends of episodes
PROVOKED = "provoked by its own request, as others do well"
HICCUPS = 0.02  # share of the episodes whose faults are nobody's


@dataclass
class EndedEpisodes:
    """The last episodes of a run in the order in which they ended: each one's fault, or None."""

    _ends: deque[Fault | None] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, fault: Fault | None) -> None:
        self._ends.append(fault)

    def is_provoked(self, fault: Fault) -> bool:
        """Return True if an episode's fault was its own, as far as the others tell."""
        if fault.provoked is not None:
            return fault.provoked
        ends = list(self._ends)
        place = next((i for i, end in enumerate(ends) if end is fault), None)
        if place is None or all(end is not None for end in ends):
            return False
        around = [*takewhile(_is_fault, reversed(ends[:place])), *takewhile(_is_fault, ends[place:])]
        return len(around) < DOWN and sum(map(_is_fault, ends)) > HICCUPS * len(ends)


def _is_fault(end: Fault | None) -> bool:
    return end is not None


def settle_faults(trajectories: Sequence[Trajectory], ended: EndedEpisodes, worst: float) -> list[Trajectory]:
    """Return a group's members with every fault settled; those that provoked theirs earn the floor.

    Args:
        worst: ``Env.worst_reward``, the sum of the floor's components at most.
    """
    valid = [t for t in trajectories if t.fault is None]
    alone = len(trajectories) == 1

    def settle(t: Trajectory, fault: Fault) -> Trajectory:
        of_task = fault.provoked is None and not valid and not alone
        if of_task or not ended.is_provoked(fault):
            return replace(t, fault=replace(fault, provoked=False))
        own = replace(fault, message=f"{PROVOKED}: {fault.message}", provoked=True)
        return _put_at_floor(replace(t, fault=own), valid, worst)

    return [t if t.fault is None else settle(t, t.fault) for t in trajectories]


def _put_at_floor(t: Trajectory, valid: Sequence[Trajectory], worst: float) -> Trajectory:
    weights = {name: weight for member in (*valid, t) for name, weight in member.weights.items()}
    return replace(t, rewards=_make_floor(valid, weights, worst), weights=weights)


def _make_floor(valid: Sequence[Trajectory], weights: Mapping[str, float], worst: float) -> dict[str, float | None]:
    """Make the rewards of the floor: each component's lowest in the group, and in sum no more than ``worst``."""
    floor: dict[str, float | None] = {}
    for name in dict.fromkeys(name for t in valid for name in t.rewards):
        values = [r for t in valid if (r := t.rewards.get(name)) is not None]
        if values:
            floor[name] = min(values) if weights.get(name, 1.0) >= 0 else max(values)
    total = fsum(weights.get(name, 1.0) * r for name, r in floor.items() if r is not None)
    counted = next((name for name in floor if weights.get(name, 1.0)), None)
    if counted is None:
        return {**floor, "floor": worst}
    floor[counted] = (floor[counted] or 0.0) - max(total - worst, 0.0) / weights.get(counted, 1.0)
    return floor
