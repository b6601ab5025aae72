"""A form that cannot be learnt, read by the ``response_template`` that the tokenizer brings."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from agentrl.renderer.call_formats.response_template import ResponseTemplateFormat
from agentrl.renderer.shown_conversation import show_conversation
from agentrl.renderer.template import TemplateRenderer
from tests.helpers.families import family
from tests.renderer.call_formats.test_choice import PAIRS, TOOLS, show

PAIR = PAIRS.replace("PAIR", "{{ k }} {{ v if v is string else v | tojson }}\n")
LINES = (  # nothing but a space between a key and its value
    "{{ tools | tojson if tools else '' }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}{% set f = c.function %}<tool_call>{{ f.name }}\n"
    + PAIR
    + "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RESPONSES: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<tool_call>(?P<name>\w+)\n",
            "close": "</tool_call>",
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"kv_sep": " "},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}
CALL = "<tool_call>search\ntext a word\nn 7\n</tool_call>"


def make_renderer(responses: Any) -> TemplateRenderer:
    tokenizer = copy.deepcopy(family("qwen2.5").tokenizer)
    tokenizer.chat_template, tokenizer.response_template = LINES, responses
    return TemplateRenderer(tokenizer)


def test_it_is_taken_where_the_template_s_form_cannot_be_learnt() -> None:
    assert not make_renderer(None).takes_tools
    own = make_renderer(RESPONSES)
    assert own.takes_tools
    assert "the tokenizer's response_template" in own.verdict()
    reply = own.parse_response(own.encode_turn(f"<think>So.</think>I look.{CALL}{CALL}<|im_end|>"), tools=TOOLS)
    assert show(reply.tool_calls) == [("search", {"text": "a word", "n": 7})] * 2
    assert (reply.thought, reply.text) == ("So.", "I look.")
    assert len({c.id for c in reply.tool_calls}) == 2
    assert show_conversation(own).problem == ""


def test_a_form_that_can_be_learnt_is_learnt() -> None:
    own = make_renderer(RESPONSES)
    own.tokenizer.chat_template = LINES.replace(PAIR, "{{ f.arguments | tojson }}")
    assert "learnt" in TemplateRenderer(own.tokenizer).verdict()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("<tool_call>search\nn 1", "not closed"),
        ("<tool_call>search\n</tool_call>", ""),
        ("<tool_call>?</tool_call>", ""),
    ],
)
def test_a_bad_call_spoils_no_neighbour(bad: str, why: str) -> None:
    form = ResponseTemplateFormat(RESPONSES)
    calls = form.parse(f"{CALL}{bad}", tools=TOOLS).tool_calls
    assert show(calls)[0] == ("search", {"text": "a word", "n": 7})
    assert all(why in str(c.error) for c in calls[1:] if why)


def test_a_region_that_is_no_json_is_a_call_with_its_error() -> None:
    responses = copy.deepcopy(RESPONSES)
    responses["fields"]["tool_calls"] |= {"content": "json", "content_args": {}}
    good, bad = '<tool_call>search\n{"n": 1}</tool_call>', "<tool_call>search\n{oops}</tool_call>"
    first, second, third = ResponseTemplateFormat(responses).parse(good + bad + good).tool_calls
    assert first.error is third.error is None
    assert "cannot be read" in str(second.error)
    assert second.span == (len(good), len(good + bad))


@pytest.mark.parametrize("responses", [{"fields": {}}, {"fields": {"content": {"content": "text"}}}, {"version": 9}])
def test_what_is_no_response_template_is_said(responses: Any) -> None:
    with pytest.raises(ValueError, match=r"response_template|call begins"):
        ResponseTemplateFormat(responses)
    own = make_renderer(responses)
    assert not own.takes_tools
    assert "response_template" in own.verdict()
