"""A gate: the other parts of a reward count only where one part is good enough."""

from __future__ import annotations

from collections.abc import Mapping


def apply_gate(parts: Mapping[str, float | None], by: str, at_least: float = 1.0) -> dict[str, float | None]:
    """Set all parts but ``by`` to 0.0 where that is under ``at_least``. Parts that do not apply stay ``None``.

    A gate that does not apply is open.
    """
    gate = parts[by]
    if gate is None or gate >= at_least:
        return dict(parts)
    return {name: min(value, 0.0) if value is not None and name != by else value for name, value in parts.items()}
