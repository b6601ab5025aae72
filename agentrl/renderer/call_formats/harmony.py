"""Tool calls in the harmony form of gpt-oss: messages on channels, of which one thinks, one calls and one answers.

<|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant<|channel|>final<|message|>TEXT
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{JSON}<|call|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.renderer.call_formats.hermes import make_call_id
from agentrl.renderer.call_formats.values import scan_json
from agentrl.types import JsonSchema, Reply, Span, ToolCall

name = "harmony"
owns_thoughts = True
stops = ("<|call|>",)

_ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([\w.\-]{1,256})")
_HEADER = re.compile(
    r"(?:<\|start\|>\s*assistant)?(?P<head>(?:(?!<\|(?:message|end|call|return|start)\|>).)*)<\|message\|>", re.S
)


def parse(text: str, *, tools: Sequence[JsonSchema] = (), thinking: bool = False) -> Reply:
    """Read one turn: its messages by their channels. A message to a function is a call, with a verdict of its own."""
    calls: list[ToolCall] = []
    said: list[str] = []
    thoughts: list[str] = []
    spans: dict[str, list[Span]] = {"analysis": [], "text": []}
    at, seed = 0, make_call_id(text, 0)
    while at < len(text):
        header = _HEADER.match(text, at)
        start = header.end() if header else at
        end_mark = _ENDS.search(text, start)
        end, behind = (end_mark.start(), end_mark.end()) if end_mark else (len(text), len(text))
        if end_mark and end_mark[0] == "<|start|>":
            behind = end if end > at else end_mark.end()
        head = header["head"] if header else ""
        body = text[start:end]
        if recipient := _RECIPIENT.search(head):
            call_id = make_call_id(seed, len(calls))
            calls.append(_read_call(call_id, recipient[1], body, (at, behind), closed=end_mark is not None))
        elif ((channel := _CHANNEL.search(head)) and channel[1] == "analysis") or (thinking and not at and not header):
            thoughts.append(body)
            spans["analysis"].append((start, end))
        else:
            said.append(body)
            spans["text"].append((start, end))
        at = max(behind, at + 1)
    thought, answer = "\n".join(thoughts).strip(), "\n".join(s for s in said if s.strip()).strip()
    return Reply(
        answer, tuple(calls), thought, answer,
        thought_spans=tuple(spans["analysis"]), text_spans=tuple(spans["text"]),
    )  # fmt: skip


def format_call(call: Mapping[str, Any]) -> str:
    """Write a call as the model does, behind the beginning of its turn."""
    arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False)
    return f"<|channel|>commentary to=functions.{call['name']} <|constrain|>json<|message|>{arguments}<|call|>"


def format_instructions() -> tuple[str, str]:
    """Return the text before and after the list of tools, for a template that shows none."""
    return "# Tools\nThe tools, as JSON schemas, one a line:\n", "\nCalls to these tools go to the commentary channel."


def _read_call(call_id: str, name: str, body: str, span: Span, *, closed: bool) -> ToolCall:
    kind = "invalid" if closed else "unclosed"
    try:
        arguments, end = scan_json(text := body.strip(), 0)
    except ValueError as error:
        why = f"invalid JSON in the tool call: {error}" if closed else "the tool call was not closed"
        return ToolCall(call_id, name, error=why, kind=kind, span=span)
    if end != len(text):
        return ToolCall(call_id, name, error="more than one JSON value in one tool call", kind="invalid", span=span)
    if not isinstance(arguments, dict):
        return ToolCall(
            call_id, name, error="the arguments of a tool call must be an object", kind="invalid", span=span
        )
    return ToolCall(call_id, name, arguments, span=span)
