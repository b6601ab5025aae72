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
from agentrl.renderer.control_tokens import Piece
from agentrl.renderer.plain_fences import PlainFences
from agentrl.renderer.stop_strings import cut_at_stop
from agentrl.types import JsonSchema, Message, Reply, ToolCall, to_utf8

_FENCES = PlainFences([f"<{slash}{name}>" for name in ("tools", "tool_call", "tool_response") for slash in ("", "/")])
WORDS = "chat_template_kwargs"  # as vLLM, SGLang and TRL call them
IN_TEXT = "calls_in_text"  # of a turn whose calls stand in its text


class ChatRenderer:
    """A renderer whose context is JSON lines. No text can forge structure: it stands inside JSON strings."""

    def __init__(self, words: Mapping[str, Any] = {}) -> None:
        self.injection_attempts: Counter[str] = Counter()
        self.words = dict(words)  # for the server's chat template

    def render_ids(self, messages: Sequence[Message], *, tools: Sequence[JsonSchema] = ()) -> list[int]:
        words = {WORDS: self.words} if self.words else {}
        return encode_lines([{"tools": list(tools), **words}, *map(_wire, messages)])

    def bridge_to_next_turn(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonSchema] = (),
    ) -> list[int]:
        return [*prompt_ids, *completion_ids, *self.render_appended(completion_ids, messages, tools=tools)]

    def render_appended(
        self, completion_ids: Sequence[int], messages: Sequence[Message], *, tools: Sequence[JsonSchema] = ()
    ) -> list[int]:
        return encode_lines(map(_wire, messages))

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] | None = None,
        tools: Sequence[JsonSchema] = (),
        stop: Sequence[str] = (),
    ) -> Reply:
        message = json.loads(bytes(token_ids))
        content = cut_at_stop(message.get("content") or "", stop)
        if message.get(IN_TEXT):
            return hermes.parse(content)
        calls = tuple(_read_call(c) for c in message.get("tool_calls") or ())
        return Reply(to_utf8(content), calls)

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""  # a server ends its turns itself

    def with_words(self, words: Mapping[str, Any]) -> ChatRenderer:
        other = ChatRenderer({**self.words, **words})
        other.injection_attempts = self.injection_attempts
        return other

    def get_stop_token_ids(self) -> list[int]:
        return []


def encode_lines(objects: Iterable[object]) -> list[int]:
    """Encode objects as JSON lines, whose bytes are the tokens."""
    return list("".join(json.dumps(o) + "\n" for o in objects).encode())


def decode_words(token_ids: Sequence[int]) -> dict[str, Any]:
    """Decode the words that a context has for the server's chat template."""
    first, _, _ = bytes(token_ids).partition(b"\n")
    words: dict[str, Any] = json.loads(first).get(WORDS, {})
    return words


def decode_conversation(token_ids: Sequence[int]) -> tuple[list[JsonSchema], list[dict[str, Any]]]:
    """Decode a context into its tools and its messages."""
    first, *messages = (json.loads(line) for line in bytes(token_ids).splitlines())
    return first["tools"], messages


def write_calls_in_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[JsonSchema]) -> list[dict[str, Any]]:
    """Write a conversation for a server that takes no tools: their schemas, calls and results as Hermes writes them.

    Fences that others' text spells are broken, as `PlainFences` does.
    """
    before, after = hermes.format_instructions()
    schemas = _break_fences("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    turns = [_read_arguments(m if m["role"] == "assistant" else _break_in_content(m)) for m in messages]
    return role_fallbacks.append_system(role_fallbacks.fold_tools(turns), f"{before}{schemas}{after}")


def _break_in_content(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": _break_fences(message.get("content") or "")}


def _break_fences(text: str) -> str:
    pieces, _ = _FENCES.break_in([Piece(text, "others")])
    return "".join(piece.text for piece in pieces)


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
