"""A harness for verifiers: the conversation of its `null` harness, in this process and not in one for each episode.

The model is asked until a turn has no call; calls go to the MCP servers of the task. Its program would cost a second of
CPU an episode to start, and a further venv.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["AgentrlChatHarness"]

_OVER = 410  # the status of a request when the episode has had all its turns or tokens


class AgentrlChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Plays a seat: a conversation with the model, and the calls that it makes."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    _http: httpx.AsyncClient | None = None

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Play to the turn that has no call; where the endpoint has no more turns, to there."""
        if self._http is None:
            self._http = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        async with AsyncExitStack() as held:
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, held)
            body: dict[str, Any] = {"model": ctx.model, "messages": self._begin(data)}
            body |= {"tools": tools} if tools else {}
            while (message := await self._ask(f"{endpoint}/chat/completions", secret, body)) is not None:
                body["messages"].append(message)
                if not message.get("tool_calls"):
                    break
                for call in message["tool_calls"]:
                    body["messages"].append(await _answer_call(call, dispatch, connections))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    def _begin(self, data: vf.TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *map(message_to_wire, prompt or ())]

    async def _ask(self, url: str, secret: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Ask for a turn. Return None if there are no more of them."""
        assert self._http is not None
        response = await self._http.post(url, json=body, headers={"authorization": f"Bearer {secret}"})
        if response.status_code == _OVER or (response.status_code == 400 and _is_overflow(response.text)):
            return None
        if not response.is_success:
            raise RuntimeError(f"the endpoint answered {response.status_code}: {response.text[:400]}")
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return {name: value for name, value in message.items() if value is not None}


def _is_overflow(text: str) -> bool:
    return any(marker in text.casefold() for marker in (*CONTEXT_OVERFLOW_MARKERS, "context_length_exceeded"))


async def _answer_call(call: dict[str, Any], dispatch: Any, connections: Any) -> dict[str, Any]:
    """Run a call; return its message. What is wrong with it is said as the `null` harness says it."""
    name, text = call["function"]["name"], call["function"].get("arguments") or "{}"
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "", "name": name}
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        return answer | {"content": f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"}
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return answer | {"content": f"error: tool arguments must be a JSON object, got {kind}; resend as an object"}
    if name not in dispatch:
        return answer | {"content": f"error: unknown tool {name!r}"}
    return answer | {"content": await call_mcp(connections, dispatch, name, arguments)}
