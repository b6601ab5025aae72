"""The calls of a model's message, matched with their records, which stand in the order in which the calls ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from agentrl.types import TOOL_ERRORS

Record = Mapping[str, Any]


class MessageCall(NamedTuple):
    """One call of a message."""

    id: object
    name: str
    arguments: object

    @property
    def may_be_unread(self) -> bool:
        """True for a call without name or arguments, as one is that could not be read."""
        return not self.name or not self.arguments


def list_calls(message: Mapping[str, Any]) -> list[MessageCall]:
    """List the calls of a message."""
    calls = [c for c in message.get("tool_calls") or [] if isinstance(c, dict)]
    functions = [(c.get("id"), f) for c in calls if isinstance(f := c.get("function"), dict)]
    return [MessageCall(i, str(f.get("name") or ""), f.get("arguments", {})) for i, f in functions]


def match_records(
    calls: Sequence[MessageCall], failed: Collection[Any], records: Sequence[Record]
) -> list[Record | None]:
    """Return the record of each call, by its name; None if none is left.

    Args:
        failed: ids of the calls that failed.
    """
    left = sorted(records, key=lambda r: r.get("start") or 0)  # as the model wrote them, where that is known
    matches: list[Record | None] = [None] * len(calls)
    for exact in (True, False):  # first those that agree in everything
        for i, call in enumerate(calls):
            is_failed, own = call.id in failed, [r for r in left if r["name"] == call.name]
            fits = [r for r in own if not exact or (r["status"] in TOOL_ERRORS) == is_failed]
            if matches[i] is None and fits:
                matches[i] = fits[0]
                left.remove(fits[0])
    return matches
