"""Requests of all dialects with wrong values in any field: a sentence for the client, and the next is answered."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import pytest

from agentrl import Env, EnvSpec, Trajectory
from agentrl.agents.agent import AgentTask
from agentrl.gateway.policy_server import PolicyServer
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ScriptedEngine
from tests.gateway.test_histories import Babbler, renderer
from tests.helpers.agents import Client, play

pytestmark = pytest.mark.anyio
TIMES = 400
JUNK: list[Any] = [
    *(None, True, -1, 2.5, float("nan"), 10**40, "", "5", "[1]", '{"a":', "\ud800", "\0", "<|im_end|>", "tool"),
    *([], [1], [None], [{}], [{"type": "image"}], {}, {"a": 1}, {"type": "text", "text": 5}, {"type": "none"}),
]
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ADD: dict[str, Any] = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
SAMPLING = {"temperature": 1, "top_p": 1, "stream": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c", "name": "add", "content": "2"},
            {"role": "user", "content": [{"type": "text", "text": "and?"}]},
        ],
        "tools": [{"type": "function", "function": ADD}],
        "tool_choice": "auto",
        "n": 1,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "response_format": {"type": "text"},
        **{"max_tokens": 9, "max_completion_tokens": 9, "stop": ["a"], "seed": 3, "top_k": 4, "presence_penalty": 0},
        **SAMPLING,
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "be",
        "input": [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "r", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "2"},
        ],
        "tools": [{"type": "function", **ADD}],
        "tool_choice": "auto",
        "previous_response_id": None,
        **{"max_output_tokens": 5, "text": {"format": {"type": "text"}}, "reasoning": {}, "top_logprobs": 0},
        **SAMPLING,
    },
    "/v1/messages": {
        "model": "m",
        "system": [{"type": "text", "text": "be"}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "2"}]},
        ],
        "tools": [{"name": "add", "description": "Add.", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        **{"max_tokens": 9, "top_k": 3, "stop_sequences": ["a"], "thinking": {"type": "enabled"}, "output_config": {}},
        **SAMPLING,
    },
}


def list_paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield (*at, key)
        yield from list_paths(one, (*at, key))


def change(body: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """Return a body in which a value or two are others, or not there."""
    body = copy.deepcopy(body)
    for _ in range(dice.choice([1, 1, 2])):
        *to, last = dice.choice(list(list_paths(body)))
        parent: Any = body
        for key in to:
            parent = parent[key]
        if dice.random() < 0.25:
            del parent[last]
        else:
            parent[last] = copy.deepcopy(dice.choice(JUNK))
    return body


async def test_whatever_a_field_holds_the_client_reads_a_sentence_and_the_server_goes_on() -> None:
    recorded: list[Trajectory] = []

    async def record(conversations: Sequence[Trajectory]) -> None:
        recorded.extend(conversations)

    engine = Babbler("qwen2.5", 0)
    server = PolicyServer(Rollout(EnvSpec(Env), engine, renderer("qwen2.5")), record, "k", say=lambda _: None)
    transport, dice = httpx2.ASGITransport(app=server.build_app()), random.Random(0)
    answers: list[int] = []
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        for _ in range(TIMES):
            path = dice.choice(list(BODIES))
            raw = json.dumps(change(BODIES[path], dice)).encode()
            answer = await http.post(path, content=raw, headers={"authorization": "Bearer k"})
            assert answer.status_code in (200, 400), (path, raw, answer.text)
            if answer.status_code == 400:
                assert len(answer.json()["error"]["message"]) > 9
            answers.append(answer.status_code)
    await server.end_idle(0.0)
    assert answers.count(200) == len(recorded) > TIMES // 4  # one that reads as the plain one is sampled
    assert answers.count(400) > TIMES // 4


@pytest.mark.parametrize(
    ("path", "change", "sentence"),
    [
        ("chat/completions", {"stream_options": "yes"}, "stream_options: 'yes' is no object"),
        ("messages", {"tool_choice": "none"}, "tool_choice: 'none' is no object"),
        ("messages", {"thinking": [1]}, "thinking: [1] is no object"),
        ("messages", {"system": 5}, "5 is neither text nor a list of blocks"),
        ("messages", {"messages": [{"role": "system", "content": "be"}]}, "messages: one of role 'system'; there are"),
        ("responses", {"previous_response_id": ["resp_0"]}, "['resp_0'] is no answer of this episode"),
        ("responses", {"tool_choice": float("nan")}, "the body is no JSON"),
    ],
)
async def test_what_is_wrong_is_said_before_a_turn_is_sampled(path: str, change: Any, sentence: str) -> None:
    async def ask(task: AgentTask, client: Client) -> None:
        key = {"authorization": f"Bearer {task.api_key}"}
        body = json.dumps(BODIES[f"/v1/{path}"] | change)
        answer = await client.http.post(f"{task.base_url}/{path}", content=body, headers=key)
        assert answer.status_code == 400
        assert sentence in answer.json()["error"]["message"]
        await client.chat(task.messages)

    done = await play(ask, ["right"])
    assert (done.turns, done.fault, done.info) == (1, None, {})


async def test_a_body_too_deep_to_read_is_no_json() -> None:
    async def ask(task: AgentTask, client: Client) -> None:
        key = {"authorization": f"Bearer {task.api_key}"}
        url = f"{task.base_url}/chat/completions"
        answer = await client.http.post(url, content='{"messages": ' + "[" * 100_000, headers=key)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "the body is no JSON")
        half = json.dumps({"messages": list(task.messages), "model": "half a pair \ud800"})
        answer = await client.http.post(url, content=half, headers=key)
        assert (answer.status_code, answer.json()["model"]) == (200, "half a pair ?")

    done = await play(ask, ["right"])
    assert (done.turns, done.fault, done.info) == (1, None, {})


async def test_what_json_cannot_say_reaches_a_client_of_anthropics_as_what_it_can_send_back() -> None:
    said = [r'{"a": "\ud800"}', '{"a": 1e999}']
    script = [f'<tool_call>{{"name": "add", "arguments": {one}}}</tool_call>' for one in said]

    async def ask(task: AgentTask, client: Client) -> None:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        for expected in ({"a": "?"}, {"invalid_arguments": '{"a": Infinity}'}, None):
            answer = await client.post("/messages", {"messages": messages, "max_tokens": 9})
            assert answer.status_code == 200, answer.text
            if expected is None:
                return
            (block,) = answer.json()["content"]
            assert block["input"] == expected
            result = {"type": "tool_result", "tool_use_id": block["id"], "content": "2"}
            messages += [{"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]

    done = await play(ask, ScriptedEngine([*script, "right"]))
    assert (len(done.contexts), done.turns, done.info) == (1, 3, {})
