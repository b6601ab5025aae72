"""The tools that the checks may call: those that change nothing outside of an episode, and those that are named."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from agentrl.checks.finding import Finding, skip
from agentrl.errors import ConfigError, suggest
from agentrl.tools.tool import Tool


def select_allowed(tools: Sequence[Tool], allow_writes: Collection[str]) -> tuple[list[Tool], list[Finding]]:
    """Return the tools that may be called, and a finding for each that is skipped.

    Args:
        allow_writes: names of tools with ``writes=True`` that may be called all the same.

    Raises:
        ConfigError: a name is no tool's.
    """
    names = [t.name for t in tools]
    for name in allow_writes:
        if name not in names:
            raise ConfigError(f"allow_writes: there is no tool {name!r}{suggest(name, names)}")
    allowed = [t for t in tools if not t.writes or t.name in allow_writes]
    return allowed, [_skip_tool(t) for t in tools if t not in allowed]


def _skip_tool(tool: Tool) -> Finding:
    why = f"tool {tool.name!r} was not called: it may change what is outside of the episode"
    return skip("writes", f"{why}; where that is fine, --allow_writes {tool.name}")
