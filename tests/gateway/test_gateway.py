"""The endpoint before the engine: keys, errors in OpenAI's shape, streams, tools by MCP, and no leaks."""

from __future__ import annotations

import gc
from typing import Any

import anyio
import httpx2
import pytest
from openai import AsyncOpenAI

from agentrl.agents.agent import AgentTask
from agentrl.testing import ScriptedEngine, call, decode_text
from tests.helpers.agents import Client, play, read_events, rolling_out, solve

pytestmark = pytest.mark.anyio
ADD = call("add", a=1, b=1)


async def test_the_sdk_of_openai_reads_what_is_answered() -> None:
    seen: list[Any] = []

    async def ask(task: AgentTask, client: Client) -> None:
        async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as openai:
            models = await openai.models.list()
            messages: Any = task.messages
            tools: Any = task.tools
            whole = await openai.chat.completions.create(model="m", messages=messages, tools=tools, logprobs=True)
            parts = await openai.chat.completions.create(
                model="m", messages=messages, tools=tools, stream=True, stream_options={"include_usage": True}
            )
            seen.extend([models.data[0].id, whole, [part async for part in parts]])

    done = await play(ask, ["let me see " + ADD])
    model, whole, parts = seen
    assert model == "policy"
    message = whole.choices[0].message
    assert (message.content, message.tool_calls[0].function.name) == ("let me see", "add")
    assert whole.choices[0].finish_reason == "tool_calls"
    logprobs = whole.choices[0].logprobs.content
    sampled = next(s for s in done.segments if s.author == "model")
    assert [one.logprob for one in logprobs] == list(sampled.logprobs or ())
    assert whole.usage.completion_tokens == len(sampled.token_ids) == len(logprobs)
    assert whole.usage.prompt_tokens == len(done.segments[0].token_ids)
    said = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    calls = [c for p in parts if p.choices for c in p.choices[0].delta.tool_calls or ()]
    assert (said, calls[0].function.arguments) == ("let me see", message.tool_calls[0].function.arguments)
    assert parts[-1].usage == whole.usage
    assert [p.choices[0].finish_reason for p in parts if p.choices][-1] == "tool_calls"


async def test_what_is_wrong_with_a_request_is_told_in_openais_shape() -> None:
    answers: list[tuple[int, str]] = []

    async def ask(task: AgentTask, client: Client) -> None:
        async def post(path: str, body: Any, **headers: str) -> None:
            response = await client.post(path, body, **headers)
            answers.append((response.status_code, response.json()["error"]["message"]))

        await post("/chat/completions", {"messages": []}, authorization="Bearer sk-agentrl-other")
        await post("/chat/completions", {"messages": "hi"})
        await post("/chat/completions", {"messages": []})
        await post("/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
        await post("/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{}]}]})
        await post("/chat/completions", {"messages": list(task.messages), "tools": [{"name": "f"}]})
        await post("/chat/completions", {"messages": list(task.messages), "n": 0})
        await post("/agentrl/call", {"name": "add"})
        await client.chat(task.messages)

    done = await play(ask, ["right"])
    assert done.fault is None
    assert done.turns == 1
    assert answers == [
        (401, "this key is of no episode that runs: use the task's api_key"),
        (400, "messages: a list of objects, each with a role"),
        (400, "messages: there is none to answer"),
        (400, "messages: a content part of type 'image_url'; this policy reads text alone"),
        (400, "messages: one is not in the dialect's shape (KeyError: 'function')"),
        (400, "tools: each is {'type': 'function', 'function': {...}}"),
        (400, "n: 0 is no number from 1 to 128"),
        (400, "a call has a name, and arguments: an object, or its text"),
    ]


async def test_the_runs_sampling_stands_and_that_is_said_once() -> None:
    says: list[str] = []

    async def ask(task: AgentTask, client: Client) -> None:
        for _ in range(2):
            await client.chat(task.messages, temperature=0.1, max_tokens=1)

    done = await play(ask, ["right"], says=says)
    assert {len(s.token_ids) for s in done.segments if s.author == "model"} == {6}
    assert says == ["the agent asks for temperature, max_tokens: the run's own sampling stands (rollout)"]


async def test_a_call_that_cannot_be_read_is_the_agents_to_answer() -> None:
    calls: list[Any] = []

    async def ask(task: AgentTask, client: Client) -> None:
        messages: list[Any] = list(task.messages)
        for _ in range(2):
            message = await client.chat(messages)
            (one,) = message["tool_calls"]
            calls.append(one["function"])
            messages += [message, {"role": "tool", "tool_call_id": one["id"], "content": "that was no JSON"}]
        await client.chat(messages)

    wrong = '<tool_call>\n{"name": "add", "arguments": "no object"}\n</tool_call>'
    done = await play(ask, ["<tool_call>{broken</tool_call>", wrong, "right"])
    assert calls[0]["name"] == "invalid_tool_call"
    assert "{broken" in calls[0]["arguments"]
    assert calls[1]["name"] == "add"
    assert "no object" in calls[1]["arguments"]
    assert len(done.contexts) == 1
    assert done.metrics["agent/invalid_calls"] == 2


async def test_the_environments_tools_by_mcp() -> None:
    from mcp import Client as McpClient

    found: list[Any] = []

    async def ask(task: AgentTask, client: Client) -> None:
        async with McpClient(task.mcp_url) as tools:
            found.append([t.name for t in (await tools.list_tools()).tools])
            await client.chat(task.messages)
            for arguments in ({"a": 1, "b": 1}, {"a": 1}):
                answer = await tools.call_tool("add", arguments)
                found.append((answer.content[0].text, bool(answer.is_error)))  # type: ignore[union-attr]

    done = await play(ask, [ADD])
    assert found[0] == ["add"]
    assert found[1] == ("2", False)
    assert found[2][1]
    assert found[2][0].startswith("error: ")
    assert [(c.name, c.status) for c in done.calls] == [("add", "ok"), ("add", "arguments")]


async def test_the_tools_answer_a_client_that_follows_no_redirection() -> None:
    found: list[Any] = []

    async def ask(task: AgentTask, client: Client) -> None:
        await client.chat(task.messages)
        wanted = {"name": "add", "arguments": {"a": 1, "b": 1}}
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": wanted}
        accepted = {"accept": "application/json, text/event-stream"}
        async with httpx2.AsyncClient(follow_redirects=False) as plain:
            found.append((await plain.post(task.mcp_url, json=call, headers=accepted)).json())

    await play(ask, [ADD])
    assert found[0]["result"]["content"][0]["text"] == "2"


async def test_many_episodes_of_which_many_are_killed_leave_nothing() -> None:
    async def ask(task: AgentTask, client: Client) -> None:
        if is_killed(str(task.messages[0]["content"])):
            with anyio.move_on_after(0.05):
                await client.chat(task.messages)
            raise ValueError("killed")
        await solve(task, client)

    def is_killed(text: str) -> bool:
        return int(text.split()[2]) % 3 == 0

    async def generate(token_ids: Any, params: Any, *, session: str) -> Any:
        await anyio.sleep(600 if is_killed(decode_text(token_ids)) else 0.0)
        return await sampled(token_ids, params, session=session)

    engine = ScriptedEngine([ADD, "right"])
    sampled, engine.generate = engine.generate, generate  # type: ignore[method-assign]
    async with rolling_out(ask, engine, episodes=10_000) as rollout:
        gateway: Any = rollout.begin.__self__  # type: ignore[union-attr]
        groups = await rollout.batch(range(60), 2)
        assert gateway._playing == {}
    trajectories = [t for g in groups for t in g.trajectories]
    assert {t.reward for t in trajectories if t.fault is None} == {1.0}
    assert sum(t.fault is not None for t in trajectories) == 40
    assert set(engine.turns) <= set(engine.ended)
    gc.collect()
    left = [t for t in anyio.get_running_tasks() if "gateway" in str(t.coro)]
    assert left == []


def test_events_are_read() -> None:
    assert read_events('data: {"a": 1}\n\ndata: [DONE]\n\n') == [{"a": 1}, "[DONE]"]
