"""Probe conversations: what a template writes for calls that were made up here.

A template is a stranger's program. It gets sentinels for names, keys and values, and never what anybody wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.renderer.call_formats.grammar import Kind
from agentrl.types import JsonSchema

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[JsonSchema]], str]  # messages, tools: the text of all turns
Call = Mapping[str, Any]  # {"name": ..., "arguments": {...}}

NAMES = ("qzfirstq", "qzotherq")  # letters pass every filter of a template unchanged
IDS = ("qzcallid0", "qzcallid1")  # nine letters and digits, as Mistral's insist on
REPLY = "qzreplyq"
_RESULT = "qzresultq"
_USER: Mapping[str, Any] = {"role": "user", "content": "q"}

KINDS: Mapping[Kind, tuple[Any, Any]] = {  # two values of each, of which one is for learning and one is fresh
    "string": ("qzvalueq", "qzfreshq text"),
    "integer": (-4017, 93),
    "number": (-26.375, 0.0625),
    "boolean": (True, False),
    "null": (None, None),
    "array": ([71, "qzitemq", True], ["qza", [1.5, {"qzb": "c d"}], False]),
    "object": ({"qzinnerq": [82, "qzleafq"]}, {"qzd": {"qze": 6.5, "qzf": True}, "qzg": []}),
}
_TAG = re.compile(r"<[^<>\s]+>")
_INNER = {"array": {"items": {"type": "string"}}, "object": {"additionalProperties": {"type": "string"}}}
AWKWARD = (
    'say "qz"', "it's qz", "a\\b\\nqz", "two\nlines qz", "tab\tqz", "é東京🙂 qz", "{qz: [1]}", "a<b> & </qz> &amp;",
    "50% {{ qz }} {% x %}", "qz, qz=1)", "3", "true", "", " edges qz ", "\nlines qz\n",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Style:
    """The way in which a template takes calls: the arguments as JSON in a string; no content beside them."""

    text_arguments: bool = False
    no_content: bool = False

    def put(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Put the calls of a message as the template takes them."""
        if not (calls := message.get("tool_calls")):
            return dict(message)
        taken = {**message, "content": message.get("content") or (None if self.no_content else "")}
        if self.text_arguments:
            taken["tool_calls"] = [
                {
                    **c,
                    "function": {
                        **c["function"],
                        "arguments": json.dumps(c["function"]["arguments"], ensure_ascii=False),
                    },
                }
                for c in calls
            ]
        return taken


STYLES = (Style(), Style(text_arguments=True), Style(no_content=True), Style(text_arguments=True, no_content=True))


@dataclass(frozen=True, slots=True)
class CallTurn:
    """The text of a turn with calls, behind what begins every turn and before what closes it."""

    text: str
    has_content: bool
    is_closed: bool = True  # as any other turn; False if a token of its own may end it


def make_tools(*, names: Sequence[str] = NAMES, keys: Mapping[str, str]) -> list[JsonSchema]:
    """Make the schemas of tools that take arguments of these kinds, by key."""
    properties = {key: {"type": kind, "description": "d", **_INNER.get(kind, {})} for key, kind in keys.items()}
    parameters = {"type": "object", "properties": properties, "required": list(keys)}
    return [{"type": "function", "function": {"name": n, "description": "d", "parameters": parameters}} for n in names]


class Prober:
    """Renders probe calls in one style. Raises TemplateError where the template does."""

    def __init__(self, render: Render, style: Style) -> None:
        self._render, self.style = render, style
        self._closing = ""

    def render_turn(self, calls: Sequence[Call], tools: Sequence[JsonSchema], content: str = "") -> CallTurn:
        """Render a turn with calls, without what stands round every turn."""
        plain = self._render([_USER, {"role": "assistant", "content": REPLY}], tools)
        text = self._render([_USER, self.make_reply(calls, content)], tools)
        before, _, closing = plain.rpartition(REPLY)
        start = _common_prefix(before, text)
        tag = text.rfind("<", max(start - 40, 0), start)
        start = start if tag < 0 or ">" in text[tag:start] else tag  # not in the middle of a tag
        has_content = bool(content) and 0 <= text.find(content, start) < text.find(str(calls[0]["name"]), start)
        if has_content:
            start = text.index(content, start) + len(content)
        behind = text.rindex(name, start) if (name := str(calls[-1]["name"])) in text[start:] else start
        end, is_closed = _find_closing(text, closing, behind)
        return CallTurn(text[start:end], has_content, is_closed)

    def render_results(self, calls: Sequence[Call], tools: Sequence[JsonSchema]) -> str:
        """Render what the template writes behind the calls, up to the text of the first result."""
        results = [
            {"role": "tool", "content": _RESULT, "tool_call_id": IDS[i], "name": call["name"]}
            for i, call in enumerate(calls)
        ]
        return self._render([_USER, self.make_reply(calls), *results], tools).partition(_RESULT)[0]

    def make_reply(self, calls: Sequence[Call], content: str = "") -> dict[str, Any]:
        """Make the message of a turn with calls."""
        made = [{"id": IDS[i], "type": "function", "function": dict(call)} for i, call in enumerate(calls)]
        return self.style.put({"role": "assistant", "content": content, "tool_calls": made})


def is_shown(render: Render, tools: Sequence[JsonSchema]) -> bool:
    """Return True if the template shows the tools of `make_tools`. Raises TemplateError where it takes none."""
    return NAMES[0] in render([_USER], tools)


def _find_closing(text: str, closing: str, at: int) -> tuple[int, bool]:
    """Return where the text that closes a turn begins, or its last token does; and whether it is there."""
    if not closing.strip() or text.endswith(closing):
        return len(text) - (len(closing) if closing.strip() else 0), True
    tags = _TAG.findall(closing)
    place = text.find(tags[-1], at) if tags else -1
    return (place, True) if place >= 0 else (len(text), False)


def _common_prefix(one: str, other: str) -> int:
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)
