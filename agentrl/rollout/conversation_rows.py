"""Rows of conversations in the forms that trainers know, as messages: OpenAI's, TRL's, ShareGPT's.

A sentence about what is wrong with a row ends one that names the row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import UserError
from agentrl.renderer.call_formats.hermes import make_call_id
from agentrl.types import JsonSchema, Message, join_thought

_ROLES = ("system", "user", "assistant", "tool")
_ALIASES = {"developer": "system", "function": "tool", "human": "user", "gpt": "assistant"}


def read_messages(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """Read the conversation of a row, its calls linked with their answers. Raises UserError."""
    given = row.get("messages", row.get("conversations"))
    if given is None and "prompt" in row and "completion" in row:
        given = [*_as_messages(row["prompt"], "user"), *_as_messages(row["completion"], "assistant")]
    if not isinstance(given, list | tuple) or not given:
        raise UserError("it has no messages; a row has `messages`, or `prompt` and `completion`")
    messages = [_read_message(number, m) for number, m in enumerate(given, 1)]
    if messages[0]["role"] == "assistant":
        raise UserError("its first message is the assistant's; a prompt comes before it")
    if not any(m["role"] == "assistant" for m in messages):
        raise UserError("it has no message of the assistant's, so there is nothing to learn from it")
    _link_calls(messages)
    return tuple(messages)


def _as_messages(value: object, role: str) -> list[Any]:
    return (
        [{"role": role, "content": value}] if isinstance(value, str) else list(value) if isinstance(value, list) else []
    )


def _read_message(number: int, given: object) -> Any:
    if not isinstance(given, Mapping):
        raise UserError(f"message {number} is {given!r:.60}; a message is an object with role and content")
    role = given.get("role", given.get("from"))
    role = _ALIASES.get(str(role), role)
    if role not in _ROLES:
        raise UserError(f"message {number} has the role {role!r:.40}; the roles are {', '.join(_ROLES)}")
    content = given.get("content", given.get("value"))
    if isinstance(content, list):  # parts, as OpenAI's API has them
        if not all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
            raise UserError(f"message {number} has parts that are no texts; a demonstration is text")
        content = "".join(p["text"] for p in content)
    if not isinstance(content, str | None):
        raise UserError(f"message {number} has the content {content!r:.60}; it is a text")
    thought = given.get("reasoning_content") or given.get("thinking")
    content = join_thought(thought, content or "") if isinstance(thought, str) and thought else content or ""
    message: dict[str, Any] = {"role": role, "content": content}
    message |= {n: given[n] for n in ("name", "tool_call_id", "is_error") if given.get(n) is not None}
    if calls := given.get("tool_calls"):
        if role != "assistant" or not isinstance(calls, list):
            raise UserError(f"message {number}: tool_calls are a list, of a message of the assistant's")
        message["tool_calls"] = [_read_call(number, i, c) for i, c in enumerate(calls)]
    return message


def _read_call(number: int, index: int, given: object) -> dict[str, Any]:
    function = given.get("function", given) if isinstance(given, Mapping) else {}
    name, arguments = function.get("name"), function.get("arguments", {})
    if isinstance(arguments, str):  # as OpenAI's API has them
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise UserError(f"message {number}: the arguments of {name!r:.40} are no JSON: {arguments!r:.60}") from None
    if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        raise UserError(f"message {number}: a call has a name and arguments, not {given!r:.80}")
    call_id = given.get("id") if isinstance(given, Mapping) else None
    own = call_id or make_call_id(json.dumps([number, name, dict(arguments)], sort_keys=True), index)
    return {"id": str(own), "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _link_calls(messages: Sequence[Any]) -> None:
    """Give each tool's answer the id and the name of its call, in their order, where it has none.

    Raises:
        UserError: an answer belongs to no call.
    """
    open_calls: list[dict[str, Any]] = []
    for number, message in enumerate(messages, 1):
        if message["role"] == "assistant":
            open_calls = list(message.get("tool_calls", ()))
        if message["role"] != "tool":
            continue
        own = next((c for c in open_calls if message.get("tool_call_id") in (None, c["id"])), None)
        if own is None:
            raise UserError(f"message {number} is a tool's, and answers no call of the turn before it")
        open_calls.remove(own)
        message["tool_call_id"], message["name"] = own["id"], own["function"]["name"]


def read_schemas(given: object) -> tuple[JsonSchema, ...]:
    """Read the tools of a row, as JSON schemas in OpenAI's form. Raises UserError."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise UserError(f"its tools are no JSON: {given!r:.60}") from None
    if not given:
        return ()
    if not isinstance(given, list | tuple) or not all(isinstance(t, Mapping) for t in given):
        raise UserError(f"its tools are {given!r:.60}; they are a list of JSON schemas")
    schemas = [dict(t) if "function" in t else {"type": "function", "function": dict(t)} for t in given]
    for schema in schemas:
        if not isinstance(schema["function"], Mapping) or not isinstance(schema["function"].get("name"), str):
            raise UserError(f"a tool of its is {schema!r:.80}; it has a function with a name and parameters")
    return tuple(schemas)
