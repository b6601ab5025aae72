"""Which record belongs to which call of a message. Records stand in the order in which the calls ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def asked(message: Mapping[str, Any]) -> list[tuple[Any, str, Any]]:
    """The calls of a message: id, name, arguments."""
    calls = [c for c in message.get("tool_calls") or [] if isinstance(c, dict)]
    functions = [(c.get("id"), c.get("function")) for c in calls]
    return [(i, str(f.get("name") or ""), f.get("arguments", {})) for i, f in functions if isinstance(f, dict)]


def matched(
    calls: Sequence[tuple[Any, str, Any]], refused: Collection[Any], records: Sequence[Record]
) -> list[Record | None]:
    """Return a record for each call, of its name; None where none is left.

    Args:
        refused: ids of the calls that were refused.
    """
    left = list(records)
    found: list[Record | None] = [None] * len(calls)
    for sure in (True, False):  # first those that agree in everything
        for i, (call_id, name, _) in enumerate(calls):
            verdict = call_id in refused
            fits = [r for r in left if r["name"] == name and (not sure or (r["status"] == "refused") == verdict)]
            if found[i] is None and fits:
                found[i] = fits[0]
                left.remove(fits[0])
    return found
