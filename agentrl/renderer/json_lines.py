"""The renderer of endpoints that take messages and not tokens: a context is JSON lines, and its tokens are bytes.

    prompt      {"tools": [...]}  {"role": "system", ...}  {"role": "user", ...}      one JSON object a line
    model       {"role": "assistant", "content": ..., "tool_calls": [...]}            as the endpoint gave it
    env         {"role": "tool", "tool_call_id": ..., "content": ...}

So an endpoint plays by the same rollout as an engine does; only that nothing here can be trained on.

A server that takes no tools gets them in the system prompt, and calls are read from what its model wrote (see
`write_calls_in_text`): such a turn is marked ``"calls_in_text": true`` and is sent back as it was written.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrl.renderer import role_fallbacks
from agentrl.renderer.call_formats import hermes
from agentrl.types import JsonSchema, Message, Reply, ToolCall, to_utf8

IN_TEXT = "calls_in_text"  # of a turn whose calls stand in its text


class ChatRenderer:
    """A renderer whose context is JSON lines. No text can forge structure: it stands inside JSON strings."""

    def __init__(self) -> None:
        self.injection_attempts: Counter[str] = Counter()

    def render_ids(self, messages: Sequence[Message], *, tools: Sequence[JsonSchema] = ()) -> list[int]:
        return encode_lines([{"tools": list(tools)}, *map(_wire, messages)])

    def bridge_to_next_turn(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonSchema] = (),
    ) -> list[int]:
        return [*prompt_ids, *completion_ids, *encode_lines(map(_wire, messages))]

    def parse_response(self, token_ids: Sequence[int], *, prompt_ids: Sequence[int] | None = None) -> Reply:
        message = json.loads(bytes(token_ids))
        if message.get(IN_TEXT):
            return hermes.parse(message.get("content") or "")
        calls = tuple(_read_call(c) for c in message.get("tool_calls") or ())
        return Reply(to_utf8(message.get("content") or ""), calls)

    def get_stop_token_ids(self) -> list[int]:
        return []


def encode_lines(objects: Iterable[object]) -> list[int]:
    """Encode objects as JSON lines, whose bytes are the tokens."""
    return list("".join(json.dumps(o) + "\n" for o in objects).encode())


def decode_conversation(token_ids: Sequence[int]) -> tuple[list[JsonSchema], list[dict[str, Any]]]:
    """Decode a context into its tools and its messages."""
    first, *messages = (json.loads(line) for line in bytes(token_ids).splitlines())
    return first["tools"], messages


def write_calls_in_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[JsonSchema]) -> list[dict[str, Any]]:
    """Write a conversation for a server that takes no tools: their schemas, calls and results as Hermes writes them."""
    before, after = hermes.format_instructions()
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    turns = [_read_arguments(m) for m in messages]
    return role_fallbacks.append_system(role_fallbacks.fold_tools(turns), f"{before}{schemas}{after}")


def _read_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `_wire`: a call's arguments as an object, where they are one."""
    calls = message.get("tool_calls") or ()
    parsed = [{**c, "function": {**c["function"], "arguments": _parse_arguments(c)}} for c in calls]
    return {**message, **({"tool_calls": parsed} if parsed else {})}


def _parse_arguments(call: Mapping[str, Any]) -> Any:
    try:
        return json.loads(call["function"]["arguments"])
    except (TypeError, ValueError):
        return call["function"]["arguments"]


def _wire(message: Message) -> dict[str, Any]:
    """Convert a message to the API's form: a call's arguments are JSON in a string."""
    wire: dict[str, Any] = {k: v for k, v in message.items() if k != "is_error"}  # the verdict is ours
    if "tool_calls" not in message:
        return wire
    calls = [
        {**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])}}
        for c in message["tool_calls"]
    ]
    return {**wire, "tool_calls": calls}


def _read_call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function") or {}
    name, text = str(function.get("name") or ""), function.get("arguments") or "{}"
    try:
        arguments = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        return ToolCall(str(call.get("id")), name, error=f"invalid JSON in the tool call: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(str(call.get("id")), name, error='"arguments" of a tool call must be an object')
    return ToolCall(str(call.get("id")), name, arguments)
