"""Calls that others write, in the form that the model reads: broken in their texts, in every form, and never read."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.renderer.call_formats.reader import LearntFormat
from agentrl.renderer.template import TemplateRenderer
from agentrl.types import JsonSchema, Message
from tests.helpers.families import NAMES, family
from tests.renderer.call_formats.test_choice import GRAMMARS, TOOLS, TURNS

MARKED = [*(grammar for grammar in GRAMMARS if grammar != "bare"), *(name for name in NAMES if name != "llama3.1")]
CALL = {"name": "search", "arguments": {"text": "x", "n": 1}}


@cache
def renderer(name: str) -> TemplateRenderer:
    if name in NAMES:
        return family(name).renderer()
    source = TURNS.replace("CALLS", GRAMMARS[name]).replace("[end]", "<|im_end|>")
    return TemplateRenderer(family("qwen2.5").tokenizer, source)


def opening(own: TemplateRenderer) -> str:
    form = own.call_format
    return form._opening if isinstance(form, LearntFormat) else "<tool_call>"


@cache
def forgeries(name: str) -> st.SearchStrategy[str]:
    """Calls, halves of calls, calls inside others' marks, marks in other letters."""
    written = renderer(name).call_format.format_call(CALL)
    mark = opening(renderer(name))
    whole = st.sampled_from([written, written.upper(), f"{mark}{written}", f"{mark[:2]}{written}{mark[2:]}"])
    part = st.builds(lambda a, b: written[a:b], st.integers(0, len(written)), st.integers(0, len(written)))
    odd = st.sampled_from(["\n", " ", "\u200b", "x", mark[:1], mark[-1:], mark.replace("<", "\uff1c")])
    return st.lists(whole | part | odd, min_size=1, max_size=6).map("".join)


def tool(description: str) -> JsonSchema:
    function: dict[str, object] = {"name": "search", "description": description, "parameters": {"type": "object"}}
    return {"type": "function", "function": function}


def read_others(own: TemplateRenderer, ids: list[int]) -> list[str]:
    """Return the names of the calls that the model's own reader finds in what was appended, if it is plain text."""
    text = own.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return [c.name for c in own.call_format.parse(text, tools=TOOLS).tool_calls if c.error is None]


def check(name: str, text: str) -> None:
    own = renderer(name)
    mark = own._added.get(opening(own))
    result: Message = {"role": "tool", "content": text, "tool_call_id": "1", "name": "search"}
    user: Message = {"role": "user", "content": text}
    plain: Message = {"role": "user", "content": "q"}
    for others, clean in (
        (own.bridge_to_next_turn([], [], [result], tools=TOOLS), []),
        (own.bridge_to_next_turn([], [], [user], tools=TOOLS), []),
        (own.render_ids([user], tools=TOOLS), own.render_ids([plain], tools=TOOLS)),
        (own.render_ids([plain], tools=[tool(text)]), own.render_ids([plain], tools=[tool("d")])),
    ):
        if mark is not None:
            assert others.count(mark) == clean.count(mark)
        else:
            assert read_others(own, others) == read_others(own, clean)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(forgeries("xml"))
def test_no_call_is_read_from_others(text: str) -> None:
    check("xml", text)


@pytest.mark.slow
@pytest.mark.parametrize("name", MARKED)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_call_is_read_from_others_in_any_form(name: str, data: st.DataObject) -> None:
    check(name, data.draw(forgeries(name)))
