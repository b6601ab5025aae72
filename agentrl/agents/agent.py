"""An agent that somebody wrote, which plays episodes through an endpoint: its contract, and the task that it is given.

Three forms are known by the text that names them (`parse_agent`):

    my_agent.py:solve       an async function, called for each episode in worker processes
    python my_agent.py      a process for each episode
    http://HOST/run         a service, to which each task is posted
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from agentrl.types import JsonSchema, Message


@dataclass(frozen=True)
class AgentTask:
    """The task of an episode, as an agent is given it.

    Args:
        messages: that the environment begins with, in OpenAI's shape.
        tools: of the environment, in OpenAI's shape: schemas of functions.
        base_url: of the endpoint that is the policy, ``.../v1``.
        api_key: of this episode.
        mcp_url: of the tools, by MCP; empty where the package mcp is not installed.
        files: contents by name, which a command finds in a folder of its own; None: the environment gives none, and
            commands work where the run does.
        variables: of a command's environment.
    """

    messages: Sequence[Message]
    tools: Sequence[JsonSchema]
    base_url: str
    api_key: str
    mcp_url: str = ""
    files: Mapping[str, str] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the task as JSON."""
        return {
            "messages": list(self.messages),
            "tools": list(self.tools),
            "base_url": self.base_url,
            "api_key": self.api_key,
            "mcp_url": self.mcp_url,
            **self.files_to_json(),
        }

    def files_to_json(self) -> dict[str, Any]:
        """Return the files and variables as JSON; nothing where the environment gives none."""
        return {} if self.files is None else {"files": dict(self.files), "variables": dict(self.variables)}


@dataclass(frozen=True)
class AgentEnding:
    """The end of an agent in an episode.

    Args:
        error: what went wrong, in a line that is the same for the same mistake; empty where nothing did.
        trace: of it, for a person.
        killed: from outside: it is the world's fault.
        counted: among those that end by the same error. Of the episodes that one death ends, one is.
        folder: that it worked in, which the caller removes; empty where it had none of its own.
    """

    error: str = ""
    trace: str = ""
    killed: bool = False
    counted: bool = True
    folder: str = ""


class Agent(Protocol):
    """Plays episodes. Any number of ``run`` calls go on at once; each may be cancelled, and leaves nothing behind."""

    def open(self) -> AbstractAsyncContextManager[Self]:
        """Start what plays; leaving the block ends it."""
        ...

    async def run(self, task: AgentTask) -> AgentEnding:
        """Play an episode to its end."""
        ...
