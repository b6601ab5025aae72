"""A gate: what else an answer was worth counts only where one part of its reward is good enough."""

from __future__ import annotations

from collections.abc import Mapping


def gated(parts: Mapping[str, float | None], by: str, at_least: float = 1.0) -> dict[str, float | None]:
    """The parts, all but ``by`` at 0.0 where that is under ``at_least``. Parts that do not apply stay ``None``.

    A gate that does not apply is open.
    """
    gate = parts[by]
    if gate is None or gate >= at_least:
        return dict(parts)
    return {name: min(value, 0.0) if value is not None and name != by else value for name, value in parts.items()}
