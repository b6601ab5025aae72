"""Demonstrations: rows of every form that trainers know, and a sentence for each that is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl import UserError
from agentrl.models.policy import load_policy
from agentrl.renderer.template import TemplateRenderer
from agentrl.rollout.demonstration import NO_TASK, Demonstration
from agentrl.types import Stop, Trajectory

ASKED, ANSWERED = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is 2."}
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
RESULT = {"role": "tool", "content": "2"}
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [ASKED, ANSWERED]},
    "prompt and completion": {"prompt": [ASKED], "completion": [ANSWERED]},
    "texts": {"prompt": "1 + 1?", "completion": "It is 2."},
    "sharegpt": {"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "It is 2."}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}, ANSWERED]},
}


@pytest.fixture(scope="module")
def renderer() -> TemplateRenderer:
    policy = load_policy("nano")
    return TemplateRenderer(policy.tokenizer, None, policy.end_tokens)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_rows_of_all_forms_are_the_same_conversation(row: dict[str, Any]) -> None:
    read = Demonstration.parse(row)
    assert read.messages == (ASKED, ANSWERED)
    assert (read.task, read.reward, read.tools) == (NO_TASK, None, ())
    assert Demonstration.parse(json.loads(read.to_line())) == read


def test_calls_are_linked_with_their_answers() -> None:
    read = Demonstration.parse({"messages": [ASKED, CALLS, RESULT, ANSWERED], "tools": [FUNCTION], "reward": 1})
    call, result = read.messages[1]["tool_calls"][0], read.messages[2]
    assert call["function"] == {"name": "add", "arguments": {"a": 1}}
    assert (result["tool_call_id"], result["name"]) == (call["id"], "add")
    assert read.tools == ({"type": "function", "function": FUNCTION},)
    assert Demonstration.parse(json.loads(read.to_line())) == read


@pytest.mark.parametrize(("stop", "spoken"), [(Stop.TERMINATED, 2), (Stop.MAX_TOKENS, 1)])
def test_a_turn_that_ran_out_of_tokens_is_no_example_of_an_end(stop: Stop, spoken: int) -> None:
    whole = Demonstration.parse({"messages": [ASKED, CALLS, RESULT, ANSWERED]}).messages
    (read,) = Demonstration.list_of_trajectory(Trajectory(3, (), whole, stop, {"worth": 1.0}), ())
    assert sum(m["role"] == "assistant" for m in read.messages) == spoken


def test_an_episode_whose_only_turn_ran_out_of_tokens_is_no_demonstration() -> None:
    said = Demonstration.parse({"messages": [ASKED, ANSWERED]}).messages
    t = Trajectory(3, (), said, Stop.MAX_TOKENS, {"worth": 1.0})
    assert Demonstration.list_of_trajectory(t, ()) == []


def test_its_turns_are_trained_and_have_no_logprobs(renderer: TemplateRenderer) -> None:
    read = Demonstration.parse({"messages": [ASKED, CALLS, RESULT, ANSWERED], "tools": [FUNCTION], "reward": 0.5})
    t = read.to_trajectory(renderer, 1024)
    assert [s.author for s in t.segments] == ["prompt", "model", "env", "model"]
    assert all(s.logprobs is None for s in t.segments)
    assert (t.reward, t.turns, [c.name for c in t.calls]) == (0.5, 2, ["add"])
    assert t.is_demonstration
    unknown = Demonstration.parse({"messages": [ASKED, ANSWERED]}).to_trajectory(renderer, 1024)
    assert dict(unknown.rewards) == {"demonstration": 1.0}


def test_a_sum_of_weighted_rewards_stays_what_it_was(renderer: TemplateRenderer) -> None:
    row = {"messages": [ASKED, ANSWERED], "rewards": {"a": 1.0, "b": 1.0}, "reward": 0.75}
    assert Demonstration.parse(row).to_trajectory(renderer, 1024).reward == 0.75


def test_what_is_too_long_is_said(renderer: TemplateRenderer) -> None:
    with pytest.raises(UserError, match=r"it has \d+ tokens, and the model takes 10"):
        Demonstration.parse({"messages": [ASKED, ANSWERED]}).to_trajectory(renderer, 10)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({}, "it has no messages; a row has `messages`, or `prompt` and `completion`"),
        ({"messages": []}, "it has no messages"),
        ({"messages": ["hello"]}, "message 1 is 'hello'; a message is an object with role and content"),
        (
            {"messages": [{"role": "robot", "content": ""}]},
            "message 1 has the role 'robot'; the roles are system, user",
        ),
        ({"messages": [ANSWERED]}, "its first message is the assistant's"),
        ({"messages": [ASKED]}, "no message of the assistant's, so there is nothing to learn"),
        ({"messages": [ASKED, {"role": "assistant", "content": 7}]}, "message 2 has the content 7; it is a text"),
        ({"messages": [ASKED, ANSWERED, RESULT]}, "message 3 is a tool's, and answers no call"),
        (
            {"messages": [ASKED, {**CALLS, "tool_calls": [{"function": {"name": "add", "arguments": "{a"}}]}]},
            "message 2: the arguments of 'add' are no JSON",
        ),
        ({"messages": [ASKED, {**CALLS, "tool_calls": [{}]}]}, "message 2: a call has a name and arguments"),
        ({"messages": [ASKED, ANSWERED], "reward": True}, "its reward is True, no number"),
        ({"messages": [ASKED, ANSWERED], "tools": "{"}, "its tools are no JSON"),
        ({"messages": [ASKED, ANSWERED], "tools": [7]}, "they are a list of JSON schemas"),
        ({"messages": [ASKED, ANSWERED], "tools": [{"function": {}}]}, "it has a function with a name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWERED]},
            "message 1 has parts that are no texts",
        ),
    ],
)
def test_a_row_that_is_no_conversation_is_one_sentence(row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as told:
        Demonstration.parse(row)
    assert sentence in str(told.value)
