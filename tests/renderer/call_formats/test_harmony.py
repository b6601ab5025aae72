from __future__ import annotations

import pytest

from agentrl.renderer.call_formats import harmony

CALL = "<|channel|>commentary to=functions.search <|constrain|>json<|message|>"


def test_a_thought_a_call_and_a_text() -> None:
    text = (
        "<|channel|>analysis<|message|>I must look.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment."
        f'<|end|><|start|>assistant{CALL}{{"q": "x <|y|>"}}<|call|>'
    )
    reply = harmony.parse(text)
    assert [(c.name, dict(c.arguments), c.error) for c in reply.tool_calls] == [("search", {"q": "x <|y|>"}, None)]
    assert (reply.thought, reply.text) == ("I must look.", "One moment.")


def test_the_template_s_own_order_is_read_too() -> None:
    (call,) = harmony.parse(' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>').tool_calls
    assert (call.name, call.arguments, call.error) == ("add", {"a": 1}, None)


def test_an_answer_is_text() -> None:
    reply = harmony.parse("<|channel|>final<|message|>42<|return|>")
    assert (reply.content, reply.tool_calls, reply.thought) == ("42", (), "")


@pytest.mark.parametrize(
    ("body", "error", "kind"),
    [
        ("{oops}<|call|>", "invalid JSON", "invalid"),
        ('{"a": ', "was not closed", "unclosed"),
        ("1<|call|>", "must be an object", "invalid"),
    ],
)
def test_a_bad_call_says_why(body: str, error: str, kind: str) -> None:
    (call,) = harmony.parse(CALL + body).tool_calls
    assert error in str(call.error)
    assert call.kind == kind


def test_what_is_written_is_read() -> None:
    call = {"name": "search", "arguments": {"q": 'a "b" \n é'}}
    (read,) = harmony.parse(harmony.format_call(call)).tool_calls
    assert (read.name, read.arguments) == ("search", call["arguments"])


def test_many_marks_are_read_quickly() -> None:
    for piece in ("<|start|>", "<|channel|>", "<|message|>", CALL, "<|end|>x"):
        harmony.parse(piece * (100_000 // len(piece)))
