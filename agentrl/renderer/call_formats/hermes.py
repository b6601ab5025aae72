"""Tool calls in the Hermes form, which Qwen and many others were trained on: JSON between ``<tool_call>`` tags."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from agentrl.types import JsonSchema, Reply, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_THOUGHT_OR_CALL = re.compile(rf"(?P<thought><think>)|{OPEN}\s*")
_CLOSED = re.compile(rf"\s*{CLOSE}")
CALL_ID = re.compile(r"[\w.:\-]{4,64}", re.ASCII)  # an id that a model may choose itself
_ALPHABET = string.ascii_letters + string.digits


name = "hermes"


def parse(text: str, *, tools: Sequence[JsonSchema] = (), thinking: bool = False) -> Reply:
    """Read one turn. Every ``<tool_call>`` becomes a call, each with its own verdict; a bad one spoils no other.

    What is wrong with a call is in ``ToolCall.error``, in words for the model: invalid JSON, an unclosed call, a
    missing name, arguments that are no object. Calls inside ``<think>`` are thoughts, not calls. ``thinking``: the
    prompt has opened a thought already.
    """
    calls: list[ToolCall] = []
    seed = make_call_id(text, 0)  # a turn is hashed once
    at = _thought_end(text, 0) if thinking else 0
    content = [text[:at]]
    while mark := _THOUGHT_OR_CALL.search(text, at):
        content.append(text[at : mark.start()])
        if mark["thought"]:
            at = _thought_end(text, mark.end())
            content.append(text[mark.start() : at])
        else:
            call, at = _read_call(text, mark.end())
            calls.append(replace(call, id=make_call_id(seed, len(calls)), span=(mark.start(), at)))
    return Reply("".join([*content, text[at:]]).strip(), tuple(calls))


def make_call_id(turn: str, number: int) -> str:
    """Make an id of nine letters and digits, the form that Mistral's templates insist on.

    A turn always gets the same ids, so that an episode played again is the same.
    """
    digest = hashlib.blake2b(f"{number} {turn}".encode("utf-8", "replace"), digest_size=9).digest()
    return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest)


def format_call(call: Mapping[str, object]) -> str:
    """Write a call, ``{"name": ..., "arguments": {...}}``, between its tags."""
    return f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}"


def format_instructions() -> tuple[str, str]:
    """Return the text before and after the list of tools, for a model whose template knows no such calls."""
    before = "You may call tools. The tools, as JSON schemas, one a line:\n<tools>\n"
    after = (
        "\n</tools>\nTo call one, write a JSON object between tags:\n"
        f'{OPEN}\n{{"name": "<tool>", "arguments": {{"<argument>": "<value>"}}}}\n{CLOSE}\n'
        "The result comes between <tool_response> tags."
    )
    return before, after


def _thought_end(text: str, start: int) -> int:
    end = text.find("</think>", start)
    return len(text) if end < 0 else end + len("</think>")


def _read_call(text: str, start: int) -> tuple[ToolCall, int]:
    """Read the call whose JSON begins at ``start``; return it and its end."""
    try:
        call, end = _DECODER.scan_once(text, start)  # type: ignore[attr-defined]  # tags in a string are its own
        if closed := _CLOSED.match(text, end):
            return _checked(call), closed.end()
        why = "more than one JSON object in one tool call"
    except (StopIteration, ValueError, RecursionError) as error:
        why = f"invalid JSON in the tool call: {_where(error, start)}"
    following = text.find(OPEN, start)  # first: it is near in a turn of nothing but opening tags
    close = text.find(CLOSE, start, None if following < 0 else following)
    if close < 0:
        unclosed = ToolCall("", "", error="the tool call was not closed", kind="unclosed")
        return unclosed, following if following >= 0 else len(text)
    return _refused(why), close + len(CLOSE)


def _checked(call: Any) -> ToolCall:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return _refused('a tool call must be an object with a "name"')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return _refused('"arguments" of a tool call must be an object', call["name"])
    return ToolCall("", call["name"], arguments)


def _refused(why: str, name: str = "") -> ToolCall:
    return ToolCall("", name, error=why, kind="invalid")


def _where(error: Exception, start: int) -> str:
    if isinstance(error, StopIteration):  # nothing of JSON begins there
        return f"Expecting value at character {error.value - start}"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos - start}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
