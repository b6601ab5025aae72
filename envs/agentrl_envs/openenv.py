"""openenv: an environment behind a server of OpenEnv's wire protocol; one socket, and so one session, an episode."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pydantic

from agentrl import ContractError, Env, InfraError, Reply, Secret, Step, Tool, ToolError, UserError
from agentrl.environments.task_sampler import task_index
from agentrl.environments.validation import ROLES
from agentrl.types import JsonSchema, Message, Observation, strip_thoughts

if TYPE_CHECKING:
    from agentrl_envs.openenv_wire import OpenEnvSession

_KEYS = ("messages", "prompt", "text", "observation", "message", "content")


class OpenEnv(Env):
    """An OpenEnv server: ``--env openenv:http://127.0.0.1:8000``. The reply is the action.

    Args:
        url: of the server (``http://`` or ``ws://``); ``/ws`` is added where there is no path.
        action_key: the action is ``{action_key: reply}``.
        action_schema: a JSON schema of the action; the model then acts by calling the tool ``act``.
        system_prompt: put before the first observation.
        max_turns: replies of an episode.
    """

    named_by = "url"
    needs = {"websockets": "openenv"}

    def __init__(
        self,
        url: str,
        action_key: str = "message",
        action_schema: JsonSchema | None = None,
        system_prompt: str = "",
        max_turns: int = 20,
    ) -> None:
        self.url, self.action_key, self.action_schema = url, action_key, action_schema
        self.system_prompt, self.max_turns = system_prompt, max_turns
        self.session: OpenEnvSession | None = None

    @classmethod
    @asynccontextmanager
    async def open_shared(cls, **settings: Any) -> AsyncIterator[None]:
        """Check that there is a server."""
        from agentrl_envs.openenv_wire import OpenEnvSession, socket_url

        try:
            await (await OpenEnvSession.connect(socket_url(settings["url"]))).close()
        except InfraError as fault:
            raise UserError(f"env 'openenv': {fault}; start the server first, or give its right address") from None
        yield

    @property
    def tool_list(self) -> Sequence[Tool]:
        return [_act(dict(self.action_schema))] if self.action_schema is not None else []

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        test = (options or {}).get("split", "train") == "test"
        from agentrl_envs.openenv_wire import OpenEnvSession, socket_url

        self.session = await OpenEnvSession.connect(socket_url(Secret(self.url).reveal()))
        data = await self.session.ask("reset", {"seed": 2 * task_index(seed) + test})  # no seed is in both splits
        system: list[Message] = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        told = _to_messages(data["observation"])
        return [*system, *told], {}

    async def step(self, action: Reply) -> Step:
        assert self.session is not None, "reset comes first"
        calls = action.tool_calls
        try:
            data = await self.session.ask("step", self._action(action))
        except ToolError as refusal:  # the model's mistake: it may try again
            data = {"observation": f"error: {refusal}", "reward": 0.0, "done": False}
        told = _to_messages(data["observation"])
        if calls and self.action_schema is not None:
            text = "\n\n".join(m["content"] for m in told)
            said = [text, *["error: one action a turn"] * (len(calls) - 1)]
            told = [
                {"role": "tool", "content": t, "tool_call_id": c.id, "name": c.name}
                for c, t in zip(calls, said, strict=True)
            ]
        return Step(told, float(data.get("reward") or 0.0), bool(data.get("done")), False, {})

    def _action(self, reply: Reply) -> dict[str, Any]:
        if self.action_schema is None:
            return {self.action_key: strip_thoughts(reply.content).strip()}
        if not reply.tool_calls:
            raise ToolError("act by calling the tool 'act'")
        first = reply.tool_calls[0]
        if first.error is not None or first.name != "act":
            raise ToolError(first.error or f"unknown tool {first.name!r}; the tool is 'act'")
        return dict(first.arguments)

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()


def _to_messages(observation: Any) -> list[Message]:
    """Convert text, messages, or a dict that holds one of them; anything else becomes JSON."""
    if isinstance(observation, Mapping):
        found = next((observation[k] for k in _KEYS if observation.get(k)), None)
        if found is not None:
            return _to_messages(found)
    if isinstance(observation, list) and observation and all(_is_message(m) for m in observation):
        return [{"role": m["role"], "content": m["content"]} for m in observation]
    text = observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False, default=str)
    return [{"role": "user", "content": text}]


def _is_message(part: Any) -> bool:
    return isinstance(part, dict) and part.get("role") in ROLES and isinstance(part.get("content"), str)


def _act(schema: JsonSchema) -> Tool:
    async def act(**_: Any) -> str:
        raise ContractError("the action goes to the server")

    return Tool("act", "Act in the environment.", schema, pydantic.BaseModel, act)
