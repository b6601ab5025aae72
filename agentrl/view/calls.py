"""Which record belongs to which call of a message. Records stand in the order in which the calls ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
REFUSAL = "error: "  # with which the answer to a refused call begins


def asked(message: Mapping[str, Any]) -> list[tuple[Any, str, Any]]:
    """The calls of a message: id, name, arguments."""
    calls = [c for c in message.get("tool_calls") or [] if isinstance(c, dict)]
    functions = [(c.get("id"), c.get("function")) for c in calls]
    return [(i, str(f.get("name") or ""), f.get("arguments", {})) for i, f in functions if isinstance(f, dict)]


def matched(
    calls: Sequence[tuple[Any, str, Any]], answers: Mapping[Any, str], records: Sequence[Record]
) -> list[Record | None]:
    """A record for each call: of its name, and refused if its answer says so; None where none is left."""
    left = list(records)
    found: list[Record | None] = [None] * len(calls)
    for sure in (True, False):  # first those that agree in everything
        for i, (call_id, name, _) in enumerate(calls):
            refused = answers.get(call_id, "").startswith(REFUSAL)
            fits = [r for r in left if r["name"] == name and (not sure or (r["status"] == "refused") == refused)]
            if found[i] is None and fits:
                found[i] = fits[0]
                left.remove(fits[0])
    return found
