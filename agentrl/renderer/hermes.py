"""Tool calls in the Hermes form, which Qwen and many others were trained on: JSON between ``<tool_call>`` tags."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Sequence
from typing import Any

from agentrl.types import JsonSchema, Reply, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(re.escape(OPEN) + r"(.*?)(?:" + re.escape(CLOSE) + r"|(?=" + re.escape(OPEN) + r")|\Z)", re.S)
_ALPHABET = string.ascii_letters + string.digits


def parse(text: str) -> Reply:
    """Read one turn. Every ``<tool_call>`` becomes a call, each with its own verdict; a bad one spoils no other.

    What is wrong with a call is in ``ToolCall.error``, in words for the model: invalid JSON, an unclosed call, a
    missing name, arguments that are no object. Calls inside ``<think>`` are thoughts, not calls.
    """
    thought, end, said = text.rpartition("</think>")
    calls = tuple(_call(m.group(1), closed=m.group(0).endswith(CLOSE)) for m in _BLOCK.finditer(said))
    return Reply((thought + end + _BLOCK.sub("", said)).strip(), calls)


def call_id() -> str:
    """Nine letters and digits: the form that Mistral's templates insist on."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


def _call(body: str, closed: bool) -> ToolCall:
    try:
        call: Any = json.loads(body)
    except ValueError as error:
        why = f"invalid JSON in the tool call: {error}" if closed else f"the tool call was not closed with {CLOSE}"
        return ToolCall(call_id(), "", error=why)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(call_id(), "", error='a tool call must be an object with a "name"')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(call_id(), call["name"], error='"arguments" of a tool call must be an object')
    return ToolCall(call_id(), call["name"], arguments)


def instructions(tools: Sequence[JsonSchema]) -> tuple[str, str]:
    """What a model is told whose own template knows no such calls: the text before and after the list of tools."""
    before = "You may call tools. The tools, as JSON schemas, one a line:\n<tools>\n"
    after = (
        "\n</tools>\nTo call one, write a JSON object between tags:\n"
        f'{OPEN}\n{{"name": "<tool>", "arguments": {{"<argument>": "<value>"}}}}\n{CLOSE}\n'
        "The result comes between <tool_response> tags."
    )
    return before, after
