"""Which of vLLM's parsers reads the calls that a template writes."""

from __future__ import annotations

import pytest

from agentrl.engines.vllm.tool_parsers import find_tool_parser
from agentrl.models import policy


def test_nano_s_calls_are_read_by_hermes() -> None:
    assert find_tool_parser(policy.load_tokenizer("nano").chat_template) == "hermes"


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<tool_call>\n<function={{ name }}>", "qwen3_coder"),
        ({"default": "", "tool_use": "<|python_tag|>"}, "llama3_json"),
        ("{{ content }}", None),
        (None, None),
    ],
)
def test_a_template_s_own_marks_name_the_parser(template: str | dict[str, str] | None, parser: str | None) -> None:
    assert find_tool_parser(template) == parser
