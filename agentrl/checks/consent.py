"""The tools that an inspection may call: those that change nothing outside of an episode, and those named."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from agentrl.errors import ConfigError, nearest
from agentrl.inspection.finding import Finding, skip
from agentrl.tool import Tool


def select_allowed(tools: Sequence[Tool], allow_writes: Collection[str]) -> tuple[list[Tool], list[Finding]]:
    """Return the tools that may be called, and a finding for each that is left alone.

    Args:
        allow_writes: names of tools with ``writes=True`` that may be called all the same.

    Raises:
        ConfigError: a name is no tool's.
    """
    names = [t.name for t in tools]
    for name in allow_writes:
        if name not in names:
            raise ConfigError(f"allow_writes: there is no tool {name!r}{nearest(name, names)}")
    allowed = [t for t in tools if not t.writes or t.name in allow_writes]
    return allowed, [_left_alone(t) for t in tools if t not in allowed]


def _left_alone(tool: Tool) -> Finding:
    why = f"tool {tool.name!r} was not called: it may change what is outside of the episode"
    return skip("writes", f"{why}; where that is fine, --allow-writes {tool.name}")
