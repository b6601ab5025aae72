"""Placeholders for text in a rendering.

A template never sees what somebody wrote, only placeholders, so it cannot be steered by it. What it did to a
placeholder (trimmed it, wrote it as JSON) is read off the rendering and done to the text later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import TemplateError
from agentrl.renderer.call_formats.hermes import CALL_ID
from agentrl.renderer.control_tokens import Piece
from agentrl.renderer.thoughts import find_space, split_thought

Rendering = dict[str, Any]  # a message, or a tool's schema, as a template gets it

_OPEN, _CLOSE = "qzslot{}q", "qzendq"
_EDGE = "\v"  # white space that no template writes: gone where the template trims
_PROBE = '"\\\té<'  # differs in every usual escaping
_WRITERS: Mapping[str, Callable[[str], str]] = {  # how a template may write a text
    "text": lambda text: text,
    "json": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "ascii": lambda text: json.dumps(text)[1:-1],
    "python": lambda text: repr('"' + text)[2:-1],  # between single quotes
}
_ID = re.compile(r"call([0-9]{5})")
_SLOT = re.compile(rf"(\v|\\u000b|\\x0b)?{_OPEN.format('([0-9]+)')}(.*?){_CLOSE}(\v|\\u000b|\\x0b)?", re.S)

# The words that templates read to decide on structure. Everything else in a schema is somebody's text.
_TYPES = {"function", "string", "number", "integer", "boolean", "array", "object", "null"}
_KEYWORDS = {
    *("type", "function", "name", "description", "parameters", "properties", "required", "return", "default", "enum"),
    *("items", "anyOf", "oneOf", "allOf", "nullable", "additionalProperties", "$ref", "$defs"),
}


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The position of a text in a rendering, and the changes that the template makes to it."""

    index: int
    form: str = "text"  # of `_WRITERS`
    lstrip: bool = False
    rstrip: bool = False

    def fill(self, text: str) -> str:
        text = text.lstrip() if self.lstrip else text
        text = text.rstrip() if self.rstrip else text
        return _WRITERS[self.form](text)


Part = str | Placeholder


def format_placeholder(index: int) -> str:
    """Format the placeholder of text ``index``, as the template gets it."""
    return f"{_EDGE}{_OPEN.format(f'{index:05d}')}{_PROBE}{_CLOSE}{_EDGE}"  # a template may sort them


def split_rendering(rendered: str) -> list[Part]:
    """Split a rendering at its placeholders: the template's own texts, and `Placeholder`."""
    parts: list[Part] = []
    last = 0
    for match in _SLOT.finditer(rendered):
        left, index, probe, right = match.groups()
        form = next((form for form, write in _WRITERS.items() if probe == write(_PROBE)), None)
        if form is None:
            raise TemplateError("it alters a message's text in a way that cannot be followed")
        parts += rendered[last : match.start()], Placeholder(int(index), form, left is None, right is None)
        last = match.end()
    return [*parts, rendered[last:]]


def split_ids(parts: Sequence[Part], messages: Sequence[Any]) -> list[Part]:
    """Split what stands round the texts of messages at the ids of the calls that they answer; see `collect_ids`."""
    answers = [i for i, m in enumerate(messages) if m["role"] == "tool"]
    split: list[Part] = []
    for part in parts:
        words = [part] if isinstance(part, Placeholder) else _ID.split(part)
        for number, word in enumerate(words):
            if not number % 2 or isinstance(word, Placeholder):
                split.append(word)
            elif int(word) >= len(answers):
                raise TemplateError("it writes the id of a call that nobody made")
            else:
                split.append(Placeholder(2 * len(messages) + answers[int(word)]))
    return split


def collect_ids(messages: Sequence[Any], added: Collection[str]) -> list[Piece]:
    """Collect the ids of the calls that messages answer, which may be the model's own. One that could spell anything
    else becomes a number. ``added``: the tokenizer's added tokens.
    """
    ids = [str(m.get("tool_call_id", "")) for m in messages]
    sound = [CALL_ID.fullmatch(i) is not None and not any(token in i for token in added) for i in ids]
    return [Piece(i if kept else f"call{n:05d}") for n, (i, kept) in enumerate(zip(ids, sound, strict=True))]


def fill_placeholders(parts: Sequence[Part], texts: Sequence[Piece]) -> list[Piece]:
    """Put the texts into the parts; each piece keeps its author."""
    return [
        Piece(part) if isinstance(part, str) else Piece(part.fill(texts[part.index].text), texts[part.index].source)
        for part in parts
    ]


def collect_texts(messages: Sequence[Any]) -> list[Piece]:
    """Collect two texts of each message: its content, and the name of the tool it comes from."""
    texts: list[Piece] = []
    for message in messages:
        name = message.get("name") or ""
        texts += Piece(message["content"] or "", name or message["role"]), Piece(name, name)
    return texts


class TemplatedMessages:
    """Messages and schemas with placeholders instead of texts; ``texts`` holds what they stand for.

    A message's thought is a text of its own, in the field ``thought``; the white space behind it is in ``space``.
    """

    def __init__(self, messages: Sequence[Any]) -> None:
        split = [split_thought(m) if m["role"] == "assistant" else ("", m["content"] or "") for m in messages]
        spaces = [find_space(m["content"] or "") for m in messages]
        messages = [{**m, "content": text} for m, (_, text) in zip(messages, split, strict=True)]
        self.texts = collect_texts(messages)
        self._known: dict[Piece, str] = {}
        self._ids: dict[str, str] = {}
        self.messages = [self._message(m, i) for i, m in enumerate(messages)]
        for hidden, (thought, _), space in zip(self.messages, split, spaces, strict=True):
            if thought:
                hidden |= {"thought": self.text(thought, "assistant"), "space": space}

    def text(self, text: str, source: str) -> str:
        """Return a text's placeholder; equal texts get equal ones, so that a template can still compare names."""
        piece = Piece(text, source)
        if text and piece not in self._known:
            self.texts.append(piece)
            self._known[piece] = format_placeholder(len(self.texts) - 1)
        return self._known.get(piece, "")

    def schemas(self, tools: Sequence[Any]) -> list[Any]:
        """Replace the texts of tools' schemas. Keys are numbered in their order, for templates that sort them."""
        for key in sorted({k for tool in tools for k in _list_keys(tool)}, key=lambda k: (k.lower(), k)):
            self.text(key, "schema")
        return [self.value(tool) for tool in tools]

    def value(self, value: Any, source: str = "schema", key: str = "") -> Any:
        """Replace the texts of a JSON value by placeholders, and the keys that are no words of JSON schema too."""
        if isinstance(value, dict):
            named = key in ("properties", "$defs")  # here the keys are names that somebody chose
            return {
                k if k in _KEYWORDS and not named else self.text(k, source): self.value(v, source, "" if named else k)
                for k, v in value.items()
            }
        if isinstance(value, list):
            return [self.value(v, source, key) for v in value]
        if isinstance(value, str) and not (key == "type" and value in _TYPES):
            return self.text(value, source)
        return value

    def _message(self, message: Any, index: int) -> Rendering:
        hidden: Rendering = {"role": message["role"]}
        for field, at in (("content", 2 * index), ("name", 2 * index + 1)):
            if self.texts[at].text or field == "content":
                hidden[field] = format_placeholder(at) if self.texts[at].text else ""
        if message["role"] == "tool":
            hidden["tool_call_id"] = self._id(message.get("tool_call_id") or f"#{index}")
        if message.get("tool_calls"):
            hidden["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return hidden

    def _call(self, call: Any) -> Rendering:
        function = call["function"]
        name, arguments = self.text(function["name"], "assistant"), function["arguments"]
        hidden = {"name": name, "arguments": self.value(arguments, "assistant", "properties")}
        return {"id": self._id(call["id"]), "type": "function", "function": hidden}

    def _id(self, call_id: str) -> str:
        """Number an id: nine letters and digits, as Mistral wants them, and the same in every run."""
        return self._ids.setdefault(call_id, f"call{len(self._ids):05d}")


def _list_keys(value: Any, key: str = "") -> Iterator[str]:
    """Yield the keys that somebody chose in a schema."""
    if isinstance(value, dict):
        named = key in ("properties", "$defs")
        for k, inner in value.items():
            if named or k not in _KEYWORDS:
                yield k
            yield from _list_keys(inner, "" if named else k)
    elif isinstance(value, list):
        for inner in value:
            yield from _list_keys(inner, key)


def check_kept(parts: Sequence[Part], messages: Sequence[Any]) -> None:
    """Raise TemplateError if a message's text is lost, but for texts beside a call, which some templates leave out."""
    kept = {part.index for part in parts if isinstance(part, Placeholder)}
    for index, message in enumerate(messages):
        if message["content"] and 2 * index not in kept and not message.get("tool_calls"):
            raise TemplateError(f"it loses the text of the role {message['role']!r}")
