"""The calls of a model's message: matched with their records, and as the model wrote them where they were unreadable.

Records stand in the order in which the calls ended, which need not be that of the message.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from agentrl.types import TOOL_ERRORS

Record = Mapping[str, Any]
LONGEST = 4_000  # characters of a call as it was written
_OPEN = "<tool_call>"
_CALL = re.compile(rf"{_OPEN}(?:(?!{_OPEN}).)*?(?:</tool_call>|(?={_OPEN})|\Z)", re.S)


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
    left = list(records)
    matches: list[Record | None] = [None] * len(calls)
    for exact in (True, False):  # first those that agree in everything
        for i, call in enumerate(calls):
            is_failed, own = call.id in failed, [r for r in left if r["name"] == call.name]
            fits = [r for r in own if not exact or (r["status"] in TOOL_ERRORS) == is_failed]
            if matches[i] is None and fits:
                matches[i] = fits[0]
                left.remove(fits[0])
    return matches


def split_calls(turn: str, count: int) -> list[str]:
    """Return the text of each of a turn's ``count`` calls; the whole turn for each if they cannot be told apart.

    Args:
        turn: the text of all tokens of the turn, special ones too.
    """
    thought = turn.rfind("</think>")
    calls = _CALL.findall(turn, max(thought, 0))
    return [text.strip() for text in (calls if len(calls) == count else [turn] * count)]
