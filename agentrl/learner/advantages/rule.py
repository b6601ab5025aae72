"""The advantage of a run, applied to the groups of a step: what it returns is checked, whoever wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from agentrl.errors import ContractError
from agentrl.settings.catalogue import BoundEntry
from agentrl.types import AdvantageValue, Trajectory


def apply_advantage(bound: BoundEntry, groups: Sequence[Sequence[Trajectory]]) -> list[list[AdvantageValue]]:
    """Compute the advantage of each member of each group.

    Raises:
        ContractError: the function raised, or returned something else than a finite number, or one a turn, for each.
    """
    returned = bound.call_safely(groups)
    if not _has_length(returned, len(groups)):
        raise ContractError(f"{bound.what} returns a list for each of the {len(groups)} groups, not {returned!r:.80}")
    advantages = []
    for group, values in zip(groups, returned, strict=True):
        if not _has_length(values, len(group)):
            raise ContractError(
                f"{bound.what} returns an advantage for each of the {len(group)} episodes of a group, "
                f"not {values!r:.80}"
            )
        advantages.append([_convert(bound, t, value) for t, value in zip(group, values, strict=True)])
    return advantages


def _has_length(values: object, length: int) -> bool:
    try:
        return len(values) == length  # type: ignore[arg-type]
    except TypeError:
        return False


def _convert(bound: BoundEntry, t: Trajectory, value: object) -> AdvantageValue:
    """Return an advantage as plain numbers."""
    try:
        if isinstance(value, list | tuple):
            if len(value) != t.turns:
                raise ContractError(
                    f"{bound.what} returned {len(value)} advantages for an episode of {t.turns} turns; "
                    "it is one number, or one a turn"
                )
            numbers: tuple[float, ...] = tuple(float(v) for v in value)
        else:
            numbers = (float(value),)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ContractError(f"{bound.what} returned {value!r:.80}; an advantage is a number, or one a turn") from None
    if not all(map(isfinite, numbers)):
        raise ContractError(f"{bound.what} returned {value!r:.80}; an advantage is finite")
    return numbers if isinstance(value, list | tuple) else numbers[0]
