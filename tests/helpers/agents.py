"""Agents that tests write: functions of a task and a client of its endpoint, in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import httpx2

from agentrl import Env, EnvSpec, ToolEnv, Trajectory, tool
from agentrl.agents.agent import AgentEnding, AgentTask
from agentrl.agents.worker import describe_error
from agentrl.gateway.gateway import Gateway
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine


class Sums(ToolEnv):
    """Asks for a sum, and has a tool for it."""

    max_turns = 6

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return f"What is {seed} + 1?", {}

    @tool
    async def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"right": float(trajectory.answer == "right")}


class Client:
    """The endpoint, as an agent of a test uses it."""

    def __init__(self, task: AgentTask, http: httpx2.AsyncClient) -> None:
        self.task, self.http = task, http

    async def post(self, path: str, body: Mapping[str, Any], **headers: str) -> httpx2.Response:
        key = {"authorization": f"Bearer {self.task.api_key}"}
        return await self.http.post(self.task.base_url + path, json=body, headers=key | headers)

    async def chat(self, messages: Sequence[Any], tools: Any = ..., **more: Any) -> dict[str, Any]:
        """Ask for a turn, and return its message."""
        offered = list(self.task.tools) if tools is ... else tools
        body = {"model": "any", "messages": list(messages), **({"tools": offered} if offered else {}), **more}
        response = await self.post("/chat/completions", body)
        assert response.status_code == 200, response.text
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return message

    async def call(self, name: str, arguments: Any) -> str:
        response = await self.post("/agentrl/call", {"name": name, "arguments": arguments})
        assert response.status_code == 200, response.text
        content: str = response.json()["content"]
        return content


Plays = Callable[[AgentTask, Client], Awaitable[object]]


class PythonAgent:
    """An agent in this process."""

    def __init__(self, plays: Plays) -> None:
        self.plays = plays

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        async with httpx2.AsyncClient(timeout=60) as self.http:
            yield self

    async def run(self, task: AgentTask) -> AgentEnding:
        try:
            await self.plays(task, Client(task, self.http))
        except (AssertionError, ValueError, KeyError) as error:
            return AgentEnding(describe_error(error), str(error))
        return AgentEnding()


async def solve(task: AgentTask, client: Client) -> None:
    """Play as the environment itself does: a turn, its calls, a turn, until one has none."""
    messages: list[Any] = list(task.messages)
    while True:
        message = await client.chat(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            return
        for one in message["tool_calls"]:
            content = await client.call(one["function"]["name"], one["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": content})


@asynccontextmanager
async def rolling_out(
    plays: Plays,
    engine: Any,
    env: type[Env] = Sums,
    renderer: Any = None,
    says: list[str] | None = None,
    episodes: int = 128,
    **limits: Any,
) -> AsyncIterator[Rollout]:
    """Open a gateway before an engine, and yield a rollout that an agent plays."""
    spec, said = EnvSpec(env), [] if says is None else says
    async with spec.open(), Gateway(PythonAgent(plays), episodes, said.append).open() as gateway:
        rollout = Rollout(spec, engine, renderer or ByteRenderer(), EpisodeLimits(**limits))
        rollout.begin = gateway.begin
        yield rollout


async def play(plays: Plays, script: Any, seed: int = 0, **more: Any) -> Trajectory:
    """Play one episode of an agent, of an engine that says a script."""
    engine = script if isinstance(script, ScriptedEngine) else ScriptedEngine(script)
    async with rolling_out(plays, engine, **more) as rollout:
        return await rollout.episode(1, seed=seed)


def read_events(text: str) -> list[Any]:
    """Read server-sent events; the last is "[DONE]"."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def failing_engine() -> ScriptedEngine:
    """Return an engine that raises a FloatingPointError in the place of a turn."""

    async def fail(*_: Any, **__: Any) -> Any:
        raise FloatingPointError("the logits are no numbers")

    engine = ScriptedEngine([""])
    engine.generate = fail  # type: ignore[method-assign]
    return engine
