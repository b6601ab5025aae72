"""What a template writes in a turn round the model's words is sampled by the model, and is none of its words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl.renderer.headers import Headers
from tests.helpers.histories import TOOLS, History, compare_history

# A header says whom a message is for; a thought is a message of its own.
RECIPIENTS = """\
{%- if tools %}<|im_start|>tools{{ tools | tojson }}<|im_end|>{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if m.reasoning_content %}<|im_start|>assistant to=self<|say|><|think|>{{ m.reasoning_content }}<|done|>{% endif -%}
{%- for c in m.tool_calls or [] %}<|im_start|>assistant to={{ c.function.name }}<|say|><tool_call>{{ c.function | tojson
 }}</tool_call>{% endfor -%}
{%- if m.content %}<|im_start|>assistant to=user<|say|>{{ m.content }}{% endif %}<|im_end|>
{%- else -%}<|im_start|>{{ m.role }}<|say|>{{ m.content }}<|im_end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant{% endif -%}
"""


@pytest.fixture(scope="module")
def history() -> History:
    return History(RECIPIENTS)


def read(history: History, text: str) -> Any:
    renderer = history.renderer
    prompt = renderer.render_ids([{"role": "user", "content": "q"}], tools=TOOLS)
    return renderer.parse_response(renderer.encode_turn(text), prompt_ids=prompt, tools=TOOLS)


def test_headers_are_no_part_of_what_is_said(history: History) -> None:
    assert read(history, " to=user<|say|>It is six.<|im_end|>").text == "It is six."
    call = json.dumps({"name": "weather", "arguments": {"city": "Lima"}})
    reply = read(history, f" to=weather<|say|><tool_call>{call}</tool_call><|im_end|>")  # the probe had another name
    assert (reply.text, [c.name for c in reply.tool_calls]) == ("", ["weather"])


def test_what_only_looks_like_one_is_said(history: History) -> None:
    for said in ("Write to=user<|say|>, then the text.", "It is six."):
        assert read(history, f"{said}<|im_end|>").text == said


def test_a_whole_conversation_is_told_as_the_template_tells_it() -> None:
    assert compare_history(RECIPIENTS)[0].reasons == []


def test_a_template_without_headers_has_none() -> None:
    assert Headers().cut("  as it is \n") == "  as it is \n"
