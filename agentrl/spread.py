"""Distances of values from their mean, rounding left out.

A reward is a weighted sum of components, and a sum of floats depends on their order: ``.1 + .2`` is not ``.3``. A
distance within ``ROUNDING`` times the magnitude of the components is no difference: the same answer for advantages,
dynamic sampling, metrics and the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any, Protocol

ROUNDING = 1e-12  # some 4,500 roundings of a double: more than sums of rewards have, less than any reward means


class Scored(Protocol):
    """An episode's reward: named components, weights (1 by default), the weighted sum; None where not scored."""

    @property
    def rewards(self) -> Mapping[str, float | None]: ...
    @property
    def weights(self) -> Mapping[str, float]: ...
    @property
    def reward(self) -> float | None: ...


Values = Sequence[float | None]


def is_rounding(difference: Any, magnitude: Any) -> Any:
    """Return True where a difference is no more than rounding, of floats or arrays."""
    return difference <= ROUNDING * magnitude


def center(values: Values, magnitudes: Sequence[float] = (), pool: Values | None = None) -> list[float]:
    """Subtract the mean of ``pool``, the values themselves by default. None is in no mean, and becomes 0.0.

    Args:
        magnitudes: sums of the absolute terms that values are sums of; the values' own by default. A distance from the
            mean that is within their rounding becomes exactly 0.0.
    """
    scored = [v for v in (values if pool is None else pool) if v is not None]
    if not scored:
        return [0.0] * len(values)
    mean = fsum(scored) / len(scored)
    largest = max([*map(abs, scored), *magnitudes])
    return [0.0 if v is None or is_rounding(abs(v - mean), largest) else v - mean for v in values]


def sum_magnitudes(member: Scored) -> float:
    """Sum the absolute weighted components of a reward: what its rounding is relative to."""
    return fsum(abs(member.weights.get(n, 1.0) * r) for n, r in member.rewards.items() if r is not None)


def center_rewards(members: Sequence[Scored]) -> list[float]:
    """Subtract the mean reward of a group from each member's; 0.0 for a member that is not scored."""
    return center([m.reward for m in members], [sum_magnitudes(m) for m in members if m.reward is not None])


def has_zero_variance(members: Sequence[Scored]) -> bool:
    """Return True if the scored members of a group all have the same reward, so that none was better."""
    return not any(center_rewards(members))
