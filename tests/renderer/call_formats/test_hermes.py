import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.renderer.call_formats import hermes
from agentrl.types import Reply

quick = settings(max_examples=50, deadline=None, derandomize=True)
TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "a"', "}", "[", '"', "\\"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text() | st.lists(st.sampled_from(TAGS), max_size=3).map("".join),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
calls = st.tuples(st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=8), json_values, max_size=3))


def block(name: str, arguments: Any, **style: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, **style)}\n</tool_call>"


def found(reply: Reply) -> list[Any]:
    return [c.error or (c.name, dict(c.arguments)) for c in reply.tool_calls]


@quick
@given(st.lists(calls, max_size=3), st.booleans())
def test_calls_come_back(asked: list[tuple[str, dict[str, Any]]], ascii_only: bool) -> None:
    text = "before\n" + "\nbetween\n".join(block(n, a, ensure_ascii=ascii_only) for n, a in asked) + "\nafter"
    reply = hermes.parse(text)
    assert found(reply) == asked
    assert "<tool_call>" not in reply.content
    assert reply.content.startswith("before")
    assert reply.content.endswith("after")
    assert len({c.id for c in reply.tool_calls}) == len(asked)


@quick
@given(st.lists(st.sampled_from(TAGS) | st.text(max_size=3), max_size=12).map("".join), st.booleans())
def test_no_text_breaks_the_parser(text: str, thinking: bool) -> None:
    reply = hermes.parse(text, thinking=thinking)
    assert isinstance(reply.content, str)
    json.dumps(reply.message())


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("<tool_call>{oops}</tool_call>", "invalid JSON in the tool call: Expecting property name"),
        ("<tool_call></tool_call>", "invalid JSON in the tool call: Expecting value at character 0"),
        ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "invalid JSON in the tool call: NaN"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "invalid JSON in the tool call: nested too deeply"),
        ("<tool_call>" + "9" * 5000 + "</tool_call>", "invalid JSON in the tool call: "),
        ('<tool_call>{"name": "a"}{"name": "b"}</tool_call>', "more than one JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'must be an object with a "name"'),
        ('<tool_call>{"name": 7}</tool_call>', 'must be an object with a "name"'),
        ('<tool_call>["a"]</tool_call>', 'must be an object with a "name"'),
        ('<tool_call>{"name": "a", "arguments": "x"}</tool_call>', '"arguments" of a tool call must be an object'),
        ('<tool_call>{"name": "a", "arguments": null}</tool_call>', '"arguments" of a tool call must be an object'),
    ],
)
def test_a_bad_call_says_why_and_spoils_no_other(call: str, error: str) -> None:
    reply = hermes.parse(f"x {block('good', {})} y {call} z {block('fine', {'a': 1})}")
    assert found(reply)[0] == ("good", {})
    assert error in found(reply)[1]
    assert found(reply)[2:] == [("fine", {"a": 1})]
    assert [word for word in reply.content.split() if word.isalpha()] == ["x", "y", "z"]


def test_unclosed_calls() -> None:
    unclosed = "the tool call was not closed"
    assert found(hermes.parse('<tool_call>{"name": "a", "argu')) == [unclosed]
    assert found(hermes.parse('<tool_call>{"name": "a"}')) == [unclosed]
    assert found(hermes.parse('<tool_call>{"name": "a"} <tool_call>{"name": "b"}</tool_call>')) == [unclosed, ("b", {})]
    assert found(hermes.parse("<tool_call>")) == [unclosed]


def test_a_call_without_arguments() -> None:
    assert found(hermes.parse('<tool_call>{"name": "a"}</tool_call>')) == [("a", {})]


def test_the_name_is_kept_where_the_arguments_are_wrong() -> None:
    assert hermes.parse('<tool_call>{"name": "a", "arguments": 1}</tool_call>').tool_calls[0].name == "a"


def test_calls_in_thoughts_are_thoughts() -> None:
    call = block("a", {})
    reply = hermes.parse(f"<think>I could {call}</think>done {block('b', {})}")
    assert found(reply) == [("b", {})]
    assert reply.content == f"<think>I could {call}</think>done"
    assert found(hermes.parse(f"<think>cut short {call}")) == []
    assert found(hermes.parse(f"thoughts {call}</think>{block('b', {})}", thinking=True)) == [("b", {})]
    assert found(hermes.parse(f"cut short {call}", thinking=True)) == []


def test_tags_in_strings_are_text() -> None:
    arguments = {"code": "print('</tool_call>') # <tool_call> </think>"}
    assert found(hermes.parse(block("run", arguments))) == [("run", arguments)]


def test_ids_suit_mistral() -> None:
    ids = [hermes.make_call_id(turn, number) for turn in ("a", "b\ud800") for number in range(50)]
    assert all(len(i) == 9 and i.isalnum() for i in ids)
    assert len(set(ids)) == 100
    assert ids[0] == hermes.make_call_id("a", 0)


def test_many_tags_are_read_quickly() -> None:
    assert len(hermes.parse("<tool_call>" * 5000).tool_calls) == 5000
