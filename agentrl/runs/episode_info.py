"""An episode's ``info`` as JSON of a bounded size, and short texts that identify it in a list."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite
from typing import Any

from agentrl.types import Message, Trajectory, to_utf8

# Keys of info that may hold the expected answer; the first that is set counts.
EXPECTED = ("expected", "answer", "answers", "solution", "target", "ground_truth")
MAX_INFO = 8_000  # characters of the JSON
MAX_TEXT = 2_000  # of a text in it
MAX_ITEMS = 64  # of a list or table in it
MAX_DEPTH = 4
LINE = 200  # characters of a text in a list
_ELLIPSIS = "\u2026"


def jsonable_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Make a copy of ``info`` that JSON can hold, of at most ``MAX_INFO`` characters.

    Long texts and lists end with an ellipsis; an object that is no JSON is the name of its type in angle brackets; a
    key whose value does not fit any more is left out.
    """
    plain: dict[str, Any] = {}
    left = MAX_INFO - 2
    for key, value in list(info.items())[:MAX_ITEMS]:
        entry = {_cut(str(key), LINE): _plain(value, MAX_DEPTH, [MAX_INFO])}
        size = len(json.dumps(entry, ensure_ascii=False))
        if size <= left:
            plain |= entry
            left -= size
    return plain


def _plain(value: Any, depth: int, room: list[int]) -> Any:
    """Copy a value as JSON can hold it; ``room`` holds the characters that are left for the whole."""
    if value is None or isinstance(value, bool | int | float):
        room[0] -= 8
        return _number(value)
    if isinstance(value, str):
        text = _cut(value, min(MAX_TEXT, max(room[0], 0)))
        room[0] -= len(text) + 8
        return text
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy or torch scalar
        return _plain(value.item(), depth, room)
    if isinstance(value, Mapping) and depth:
        kept = _while_room(value.items(), room)
        return {_cut(str(k), LINE): _plain(v, depth - 1, room) for k, v in kept}
    if isinstance(value, list | tuple) and depth:
        plain = [_plain(v, depth - 1, room) for v in _while_room(value, room)]
        return [*plain, _ELLIPSIS] if len(plain) < len(value) else plain
    name = f"<{type(value).__name__}>"
    room[0] -= len(name) + 2
    return name


def _while_room(items: Iterable[Any], room: list[int]) -> Iterator[Any]:
    for item in islice(items, MAX_ITEMS):
        if room[0] <= 0:
            return
        yield item


def _cut(text: str, limit: int) -> str:
    return to_utf8(text if len(text) <= limit else text[:limit] + _ELLIPSIS)


def _number(value: float | None) -> Any:
    """Return the number, or a text where readers of JSON know none such: nan, infinities, integers of over 64 bits."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, int) and value.bit_length() > 64:
        return str(value) if value.bit_length() < 4096 else f"<int of {value.bit_length()} bits>"
    return value


def find_expected_answer(info: Mapping[str, Any]) -> str | None:
    """Return the right answer that ``info`` names under one of the keys ``EXPECTED``; None if it names none."""
    for key in EXPECTED:
        value = info.get(key)
        if value is not None and value != "":
            plain = _plain(value, MAX_DEPTH, [MAX_INFO])
            return value if isinstance(value, str) else json.dumps(plain, ensure_ascii=False)
    return None


def find_question(messages: Sequence[Message], turns: int) -> str:
    """Return the last user message before the first of the model's ``turns``; empty if there is none."""
    replies = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    first = replies[-turns] if 0 < turns <= len(replies) else len(messages)
    questions = [m["content"] for m in messages[:first] if m["role"] == "user"]
    return _text(questions[-1]) if questions else ""


def find_last_answer(trajectory: Trajectory) -> str:
    """Return the model's last answer, without its thoughts; a turn of calls alone is an arrow and the tools' names."""
    answer = trajectory.answer.strip()
    last = next((m for m in reversed(trajectory.messages) if m["role"] == "assistant"), None)
    if answer or last is None or not trajectory.turns:
        return answer
    return "".join(f"\u2192 {c['function']['name'] or '?'} " for c in last.get("tool_calls", ())).strip()


def shorten_to_line(text: str | None, *, end: bool = False) -> str | None:
    """Return the text in one line of at most ``LINE`` characters: its beginning, or its ``end``."""
    if text is None:
        return None
    words = " ".join((text[-8 * LINE :] if end else text[: 8 * LINE]).split())
    if len(words) > LINE:
        words = _ELLIPSIS + words[-LINE:] if end else words[:LINE] + _ELLIPSIS
    return to_utf8(words)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
