"""Which turn a request goes on from: what clients change of a history, and what makes it another one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.threads import conversation
from agentrl.rollout.threads.conversation import TurnEnd, TurnTree, same_arguments, to_message

USER: dict[str, Any] = {"role": "user", "content": "hi"}


def reply(content: str | None = "so", **arguments: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": content, **({"tool_calls": [call]} if arguments else {})}


@pytest.mark.parametrize(
    "drifted",
    [
        reply(" so\n", a=[1], b={"x": 2, "y": 3}),
        reply("<think>hm</think>\n\nso", a=[1], b={"y": 3, "x": 2}),
        {**reply("so", a=[1], b={"x": 2, "y": 3}), "reasoning_content": "hm", "refusal": None, "name": "me"},
        {**reply("so", a=[1], b={"x": 2, "y": 3}), "content": [{"type": "text", "text": "so"}]},
    ],
)
def test_the_same_turn_as_clients_write_it(drifted: dict[str, Any]) -> None:
    tree, turn = TurnTree(), TurnEnd(0, 0, 9, 2, 3, 1)
    tree.add(tree.digest([USER])[-1], reply("so", a=[1], b={"x": 2, "y": 3}), turn)
    assert tree.find(tree.digest([USER, drifted, USER])) == (turn, 2)


@pytest.mark.parametrize(
    "other",
    [reply("not so", a=1), reply("so"), reply("so", a=2), {**reply("so", a=1), "role": "user"}],
)
def test_another_turn_is_another(other: dict[str, Any]) -> None:
    tree = TurnTree()
    tree.add(tree.digest([USER])[-1], reply("so", a=1), TurnEnd(0, 0, 9, 2, 3, 1))
    assert tree.find(tree.digest([USER, other, USER])) == (None, 0)


def test_the_deepest_turn_is_gone_on_from_and_never_the_end_itself() -> None:
    tree, first, second = TurnTree(), TurnEnd(0, 0, 5, 2, 3, 1), TurnEnd(0, 1, 9, 4, 2, 2)
    tree.add(tree.digest([USER])[-1], reply("one"), first)
    whole = [USER, reply("one"), USER, reply("two")]
    tree.add(tree.digest(whole[:3])[-1], whole[3], second)
    assert tree.find(tree.digest([*whole, USER])) == (second, 4)
    assert tree.find(tree.digest(whole)) == (first, 2)
    assert tree.find(tree.digest([USER])) == (None, 0)


def test_a_text_in_parts_or_marked_for_a_cache_is_the_same_text() -> None:
    tree, turn = TurnTree(), TurnEnd(0, 0, 9, 3, 3, 1)
    system = {"role": "system", "content": "be"}
    tree.add(tree.digest([system, USER])[-1], reply("so"), turn)
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i", "cache_control": {"type": "ephemeral"}}]
    again: list[Any] = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}, reply("so"), USER]
    assert tree.find(tree.digest(again)) == (turn, 3)
    image: list[Any] = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "image"}]},
        reply("so"),
        USER,
    ]
    assert tree.find(tree.digest(image)) == (None, 0)


def test_arguments_too_deep_to_read_are_their_text() -> None:
    deep = "[" * 100_000
    assert same_arguments(deep, f" {deep}")
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}
    assert to_message(message, {})["tool_calls"][0]["function"]["arguments"] == {"arguments": deep}


MESSAGES = st.sampled_from([USER, {"role": "user", "content": "ho"}, reply("so"), reply("so", a=1)])


@given(st.lists(st.lists(MESSAGES, max_size=5), max_size=12))
def test_what_earlier_requests_began_with_does_not_change_a_digest(requests: list[list[dict[str, Any]]]) -> None:
    tree = TurnTree()
    for messages in requests:
        assert tree.digest(messages) == TurnTree().digest(messages)


def test_the_messages_of_earlier_requests_are_not_digested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []

    def canonicalize(message: Any) -> str:
        read.append(message)
        return str(message)

    monkeypatch.setattr(conversation, "_canonicalize", canonicalize)
    tree, agents = TurnTree(), [[{"role": "user", "content": f"agent {number}"}] for number in range(3)]
    for turn in range(20):  # of sub-agents that take turns
        for messages in agents:
            messages += [reply(f"turn {turn}"), USER]
            tree.digest(list(messages))
    assert len(read) == sum(len(messages) for messages in agents)


@given(st.dictionaries(st.text(), st.one_of(st.integers(), st.text(), st.lists(st.booleans()))))
def test_arguments_are_the_same_however_they_are_written(arguments: dict[str, Any]) -> None:
    text = json.dumps(arguments)
    assert same_arguments(text, arguments)
    assert same_arguments(json.dumps(arguments, indent=2, ensure_ascii=False), text)
    assert not same_arguments({**arguments, "one more": 1}, text) or "one more" in arguments


def test_numbers_are_the_same_as_javascript_writes_them() -> None:
    assert same_arguments('{"a": 1.0, "b": [-0.0, 1e3, 1e21]}', {"a": 1, "b": [0, 1000, 1e21]})
    assert same_arguments({"a": 2.0}, '{"a": 2}')
    assert not same_arguments('{"a": 1.5}', '{"a": 1}')
    assert same_arguments('{"a": 1e999}', '{"a": 1e999}')


def test_what_nobody_can_read_is_the_same_as_itself() -> None:
    assert same_arguments("{broken", " {broken ")
    assert not same_arguments("{broken", "{other")
    assert same_arguments("", {})


def test_a_message_as_a_renderer_takes_it() -> None:
    assert to_message(
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}, {}
    ) == {
        "role": "system",
        "content": "ab",
    }
    told = to_message({"role": "tool", "tool_call_id": "7", "content": None}, {"7": "f"})
    assert told == {"role": "tool", "content": "", "tool_call_id": "7", "name": "f"}
    called = to_message(reply(None, a=1), {})
    assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    with pytest.raises(ValueError, match="a content part of type 'image_url'; this policy reads text alone"):
        to_message({"role": "user", "content": [{"type": "image_url"}]}, {})
    with pytest.raises(ValueError, match="a message of role 'function'"):
        to_message({"role": "function", "content": ""}, {})
