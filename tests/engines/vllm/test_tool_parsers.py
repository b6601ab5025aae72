"""A server reads calls as the training does, where the chat template has calls."""

from __future__ import annotations

from agentrl.engines.vllm.tool_parsers import OWN, find_tool_parser
from agentrl.models import policy

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def test_a_template_with_calls_gets_agentrl_s_own_parser() -> None:
    assert find_tool_parser(policy.load_tokenizer("nano")) == OWN


def test_a_template_without_calls_and_a_tokenizer_without_a_template_get_none() -> None:
    tokenizer = policy.load_tokenizer("nano")
    tokenizer.chat_template = PLAIN
    assert find_tool_parser(tokenizer) is None
    tokenizer.chat_template = None
    assert find_tool_parser(tokenizer) is None
