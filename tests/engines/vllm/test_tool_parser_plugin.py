"""agentrl's parser as vLLM calls it: whole turns, streams, calls that cannot be read. `make vllm`."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from agentrl.engines.vllm import launch
from agentrl.models import policy

pytestmark = pytest.mark.vllm
REQUEST: Any = SimpleNamespace(tools=[], tool_choice="auto")
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'


@pytest.fixture
def parser() -> Any:
    launch.import_vllm()
    with launch.use_environment(None), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own business
        from agentrl.engines.vllm.tool_parser_plugin import AgentrlToolParser

        return AgentrlToolParser(policy.load_tokenizer("nano"))


def test_a_turn_is_read_as_the_training_reads_it(parser: Any) -> None:
    read = parser.extract_tool_calls(f"First.\n{CALL}\n{CALL}<|im_end|>", REQUEST)
    assert [json.loads(call.function.arguments) for call in read.tool_calls] == [{"expression": "6*7"}] * 2
    assert (read.tools_called, read.content) == (True, "First.")
    plain = parser.extract_tool_calls("The answer is 42.<|im_end|>", REQUEST)
    assert (plain.tools_called, plain.content) == (False, "The answer is 42.")


def test_a_call_that_cannot_be_read_stays_as_it_was_written(parser: Any) -> None:
    for text in ('<tool_call>\n{"name": "calculator", "argum\n</tool_call>', '<tool_call>\n{"name"'):
        read = parser.extract_tool_calls(f"{text}<|im_end|>", REQUEST)
        assert (read.tools_called, read.content) == (False, text)


def test_a_stream_gives_text_and_then_whole_calls(parser: Any) -> None:
    text, content, calls = f"Let me see.\n{CALL}", "", []
    for end in range(1, len(text) + 1):
        delta = parser.extract_tool_calls_streaming(text[: end - 1], text[:end], text[end - 1], [], [], [], REQUEST)
        if delta is not None:
            content += delta.content or ""
            calls += delta.tool_calls
    assert content.strip() == "Let me see."
    assert [(call.index, call.function.name) for call in calls] == [(0, "calculator")]
    assert json.loads(calls[0].function.arguments) == {"expression": "6*7"}
