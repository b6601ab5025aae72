"""The task that an agent's function is given: what to do, where the policy is, and the environment's tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2


@dataclass(frozen=True)
class Task:
    """A task, for ``async def solve(task)``.

    Args:
        messages: to begin with, in OpenAI's shape.
        tools: of the environment, in OpenAI's shape; empty where it has none.
        base_url, api_key: of the policy: for ``AsyncOpenAI(base_url=..., api_key=...)``, and any other client.
        mcp_url: of the tools, by MCP; empty where the package mcp is not installed.
        files, variables: of the task, by name; empty where the environment gives none.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    base_url: str
    api_key: str
    mcp_url: str
    http: httpx2.AsyncClient = field(repr=False, compare=False)
    files: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    async def call(self, name: str, arguments: Mapping[str, Any] | str) -> str:
        """Run a tool of the environment; return its answer, which may say what was wrong with the call.

        Args:
            arguments: by name; or the text that the model wrote, as it stands in its message.

        Raises:
            RuntimeError: the episode is over.
        """
        response = await self.http.post(
            f"{self.base_url}/agentrl/call",
            json={"name": name, "arguments": arguments if isinstance(arguments, str) else dict(arguments)},
            headers={"authorization": f"Bearer {self.api_key}"},
        )
        answer = response.json()
        if not response.is_success:
            raise RuntimeError(answer["error"]["message"])
        content: str = answer["content"]
        return content
