"""The dialects: each reads what its clients send, and the same conversation is the same thread in all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai import AsyncOpenAI

from agentrl.agents.agent import AgentTask
from agentrl.gateway.dialects.chat_completions import ChatCompletions
from agentrl.gateway.dialects.dialect import read_list
from agentrl.gateway.dialects.messages import Messages
from agentrl.gateway.dialects.responses import Responses
from agentrl.rollout.threads.conversation import TurnTree
from agentrl.rollout.threads.forest import SampledTurn
from agentrl.testing import call, decode_text
from tests.helpers.agents import Client, play, read_events, solve

ADD = call("add", a=1, b=1)
SCRIPT = ["let me see " + ADD, "<tool_call>{broken</tool_call>", "right"]


def read_names(text: str) -> list[str]:
    """Read the names of events."""
    return [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]


async def speak_responses(task: AgentTask, client: Client) -> None:
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as openai:
        tools: Any = [{"type": "function", **tool["function"]} for tool in task.tools]
        items: Any = list(task.messages)
        for _ in range(3):
            answer = await openai.responses.create(model="m", input=items, tools=tools)
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            for one in answer.output:
                if one.type == "function_call":
                    told = await client.call(one.name, one.arguments)
                    items.append({"type": "function_call_output", "call_id": one.call_id, "output": told})


async def speak_responses_by_id(task: AgentTask, client: Client) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in task.tools]
    body: dict[str, Any] = {"model": "m", "tools": tools, "input": list(task.messages)}
    for _ in range(3):
        answer = (await client.post("/responses", body)).json()
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        told = [
            {
                "type": "function_call_output",
                "call_id": c["call_id"],
                "output": await client.call(c["name"], c["arguments"]),
            }
            for c in calls
        ]
        body = {"model": "m", "tools": tools, "input": told, "previous_response_id": answer["id"]}


async def speak_messages(task: AgentTask, client: Client) -> None:
    tools = [
        {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
        for f in (tool["function"] for tool in task.tools)
    ]
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": str(task.messages[0]["content"])}]}]
    for _ in range(3):
        body = {"model": "m", "max_tokens": 100, "tools": tools, "messages": messages}
        response = await client.http.post(task.base_url + "/messages", json=body, headers={"x-api-key": task.api_key})
        answer = response.json()
        messages.append({"role": "assistant", "content": answer["content"]})
        told = []
        for block in answer["content"]:
            if block["type"] == "tool_use":
                given = block["input"]
                text = await client.call(block["name"], given.get("invalid_arguments", given))
                told.append({"type": "tool_result", "tool_use_id": block["id"], "content": text})
        messages.append({"role": "user", "content": told or "?"})


@pytest.mark.anyio
@pytest.mark.parametrize("speak", [speak_responses, speak_responses_by_id, speak_messages])
async def test_an_episode_in_a_dialect_is_one_thread_of_the_same_tokens(speak: Any) -> None:
    plain = await play(solve, SCRIPT)
    own = await play(speak, SCRIPT)
    assert own.segments == plain.segments
    assert own.reward == 1.0
    assert [(c.name, c.status) for c in own.calls] == [(c.name, c.status) for c in plain.calls]


@pytest.mark.anyio
async def test_streams_say_the_same_in_pieces() -> None:
    seen: dict[str, Any] = {}

    async def ask(task: AgentTask, client: Client) -> None:
        async with (
            AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as openai,
            openai.responses.stream(model="m", input="hi") as stream,
        ):
            seen["responses"] = await stream.get_final_response()
        body = {"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        seen["messages"] = (await client.post("/messages", body)).text

    await play(ask, ["so it is " + ADD])
    said, called = seen["responses"].output
    assert (said.content[0].text, json.loads(called.arguments)) == ("so it is", {"a": 1, "b": 1})
    names = read_names(seen["messages"])
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert names == ["message_start", *block, *block, "message_delta", "message_stop"]
    events = read_events("\n".join(x for x in seen["messages"].splitlines() if x.startswith("data")))
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert deltas[0] == {"type": "text_delta", "text": "so it is"}
    assert json.loads(deltas[1]["partial_json"]) == {"a": 1, "b": 1}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.anyio
async def test_errors_have_the_dialects_shape() -> None:
    async def ask(task: AgentTask, client: Client) -> None:
        image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
        wrong = await client.post("/messages", {"messages": image})
        assert wrong.status_code == 400
        assert wrong.json()["type"] == "error"
        assert "a content part of type 'image'" in wrong.json()["error"]["message"]
        lost = await client.post("/responses", {"input": "hi", "previous_response_id": "resp_77"})
        assert "'resp_77' is no answer of this episode" in lost.json()["error"]["message"]
        other = await client.post("/responses", {"input": [{"type": "computer_call"}]})
        assert "an item of type 'computer_call'" in other.json()["error"]["message"]
        await client.chat(task.messages)

    done = await play(ask, ["right"])
    assert done.reward == 1.0
    assert decode_text(done.segments[-1].token_ids) == "right"


def test_instructions_are_of_one_request_and_a_system_message_of_the_conversation() -> None:
    rule, said = {"role": "system", "content": "a rule"}, {"role": "assistant", "content": "so"}
    past: dict[str, Any] = {}
    first = Responses({"instructions": "one", "input": [rule, {"role": "user", "content": "hi"}]}, past)
    first.format_answer(7, "m", [SampledTurn(said, "stop", 1, [], [])], str)
    (answer,) = past
    asked = {"input": "and?", "previous_response_id": answer}
    rest = [rule, {"role": "user", "content": "hi"}, said, {"role": "user", "content": "and?"}]
    assert Responses({**asked, "instructions": "two"}, past).messages == [{"role": "system", "content": "two"}, *rest]
    assert Responses(asked, past).messages == rest


def sampled(text: str, *, finish: str = "stop", prompt: int = 5, calls: Sequence[Any] = ()) -> SampledTurn:
    message: dict[str, Any] = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
    return SampledTurn(message, finish, prompt, text.encode() or b"<>", [-0.5] * (len(text) or 2))


def test_several_turns_of_a_request_have_one_prompt() -> None:
    asked = ChatCompletions({"messages": [], "n": 3}, {})
    usage = asked.format_answer(1, "m", [sampled("four")] * 3, decode_text)["usage"]
    assert usage == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}


@pytest.mark.parametrize("text", ["said", ""])
def test_logprobs_are_told_once_in_a_stream_of_calls_too(text: str) -> None:
    calls = [{"id": str(n), "type": "function", "function": {"name": "add", "arguments": "{}"}} for n in range(2)]
    asked = ChatCompletions({"messages": [], "logprobs": True}, {})
    events = asked.format_events(1, "m", [sampled(text, finish="tool_calls", calls=calls)], decode_text)
    choices = [e["choices"][0] for e in read_events(b"".join(events).decode())[:-1]]
    (told,) = [c["logprobs"]["content"] for c in choices if c["logprobs"]]
    assert [one["logprob"] for one in told] == [-0.5] * (len(text) or 2)


def test_a_turn_that_a_text_of_the_request_ended_says_which() -> None:
    def ask(text: str, finish: str = "stop", **body: Any) -> tuple[object, object]:
        asked = Messages({"messages": [], **body}, {})
        given: Any = (1, "m", [sampled(text, finish=finish)], decode_text)
        answer, events = asked.format_answer(*given), b"".join(asked.format_events(*given)).decode()
        told = answer["stop_reason"], answer["stop_sequence"]
        *_, ended, _ = read_events("\n".join(x for x in events.splitlines() if x.startswith("data")))
        assert tuple(ended["delta"].values()) == told
        return told

    stops: Any = {"stop_sequences": ["END", "D"]}
    assert ask("one END", **stops) == ("stop_sequence", "END")
    assert ask("one END more", **stops) == ask("one END") == ("end_turn", None)
    assert ask("one END", "length", **stops) == ("max_tokens", None)


def test_what_is_thought_is_shown_where_it_is_asked_for() -> None:
    asked = Messages({"thinking": {"type": "enabled"}, "messages": []}, {})
    assert asked.overridden == ["thinking"]
    system = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert Messages({"system": system, "messages": []}, {}).messages == [{"role": "system", "content": "a\nb"}]


def test_what_is_no_list_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="input: a list of objects"):
        Responses({"input": [1]}, {})
    with pytest.raises(ValueError, match="tools: one of type 'web_search'; there are functions alone"):
        Responses({"input": "hi", "tools": [{"type": "web_search"}]}, {})
    assert read_list({}, "nothing") == []


def test_marks_for_a_cache_which_move_on_with_each_request_change_no_conversation() -> None:
    """Clients of Anthropic's mark the last messages: the history is the same without, and so the thread is."""

    def read(*texts: Any) -> list[bytes]:
        messages = [
            {"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=False)
        ]
        return TurnTree().digest(Messages({"messages": messages}, {}).messages)

    def mark(text: str, **more: Any) -> list[dict[str, Any]]:
        return [{"type": "text", "text": text, **more}]

    marked = {"cache_control": {"type": "ephemeral"}}
    first = read(mark("hi", **marked), "so")
    assert read("hi", mark("so"), mark("and?", **marked))[:2] == first
    assert read(mark("hi"), mark("so", **marked), "and?")[:2] == first
