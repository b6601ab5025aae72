"""The grammar of a template's tool calls, as it was read off the template, and the writing of calls by it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.renderer.call_formats.hermes import make_call_id
from agentrl.renderer.call_formats.values import write_literal

Kind = Literal["string", "integer", "number", "boolean", "null", "array", "object"]
_LONGEST_NAME = 240  # characters of a form's description
NAME_MARK = "\0"
_TAG = re.compile(r"<[^<>\n]+|\[/?[A-Z][A-Z_]+\]|\w{2,}")


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a name, an id, a number or the arguments in a call; ``first`` is the number of the first call."""

    what: Literal["name", "id", "index", "arguments"]
    first: int = 0


@dataclass(frozen=True, slots=True)
class ValueForm:
    """One way to write a value: what stands before and behind it, and how it is written.

    ``bare``: a text as it is, other values typed by the schema. ``literal``: as Python does, or between ``quote``.
    """

    before: str
    after: str
    encoding: Literal["bare", "json", "literal"]
    kinds: frozenset[Kind]
    quote: str = ""


@dataclass(frozen=True, slots=True)
class ObjectArguments:
    """All arguments as one JSON object; ``as_text``: inside a JSON string."""

    as_text: bool = False


@dataclass(frozen=True, slots=True)
class PairArguments:
    """Arguments one by one: each a key and a value between literals."""

    key_open: str
    values: tuple[ValueForm, ...]
    close: str
    separator: str


@dataclass(frozen=True, slots=True)
class TaggedBody:
    """A call whose name and arguments stand between literals; ``lead`` goes to where the arguments begin."""

    lead: tuple[str | Slot, ...]
    arguments: ObjectArguments | PairArguments


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A call that is a JSON object with slots; the paths lead to the name and the arguments.

    ``name_path`` is None where the name is the key of the arguments: ``{"search": {...}}``.
    """

    skeleton: Mapping[str, Any]
    name_path: tuple[str, ...] | None
    arguments_path: tuple[str, ...]
    as_text: bool


@dataclass(frozen=True, slots=True)
class Grammar:
    """The literals round calls, from the outermost to a call's own; ``in_list``: the calls are items of a JSON list.

    What opens the section and stands between calls may hold ``NAME_MARK``: the name of the call that follows.
    """

    section_open: str
    call_open: str
    body: TaggedBody | JsonBody
    call_close: str
    separator: str
    section_close: str
    in_list: bool = False
    stop: str = ""  # a control token that ends a turn behind its calls, and no other turn

    @property
    def is_marked(self) -> bool:
        """Return True if what opens a call tells it from other text, wherever it stands."""
        return is_mark(self.call_open)

    def describe(self) -> str:
        """Describe the form in a few characters, for verdicts: ``<tool_call>{JSON}</tool_call>``."""
        if isinstance(self.body, JsonBody):
            inner = "[{JSON}, ...]" if self.in_list else "{JSON}"
        else:
            lead = "".join(p if isinstance(p, str) else p.what.upper() for p in self.body.lead)
            arguments = self.body.arguments
            if isinstance(arguments, ObjectArguments):
                inner = lead + "{JSON}"
            else:
                form = arguments.values[0]
                inner = f"{lead}{arguments.key_open}KEY{form.before}VALUE{form.after}{arguments.close}"
        outer = "".join((self.section_open, self.call_open, inner, self.call_close, self.section_close))
        described = " ".join(outer.replace(NAME_MARK, "NAME").split())
        return described if len(described) <= _LONGEST_NAME else f"{described[:_LONGEST_NAME]}..."


def is_mark(literal: str) -> bool:
    """Return True if a literal is a tag or a word beside signs, and not JSON's punctuation alone."""
    core = literal.strip()
    return len(core) >= 3 and not core.startswith(("{", '"')) and bool(_TAG.search(core)) and not core.isalnum()


def write_calls(grammar: Grammar, calls: Sequence[Mapping[str, Any]]) -> str:
    """Write calls, each ``{"name": ..., "arguments": {...}}``. Raises ValueError if the form cannot hold a value."""
    written = ""
    for number, call in enumerate(calls):
        lead = (grammar.separator if number else grammar.section_open).replace(NAME_MARK, str(call["name"]))
        body = grammar.call_open + _write_body(grammar.body, call, number) + grammar.call_close
        written += lead + ("[" if grammar.in_list and not number else "") + body
    return (written + ("]" if grammar.in_list else "") + grammar.section_close).strip()


def _write_body(body: TaggedBody | JsonBody, call: Mapping[str, Any], index: int) -> str:
    arguments = call.get("arguments", {})
    slots = {"name": str(call["name"]), "id": str(call.get("id") or _make_id(call, index)), "arguments": arguments}
    if isinstance(body, JsonBody):
        slots["arguments"] = json.dumps(arguments, ensure_ascii=False) if body.as_text else arguments
        if body.name_path is None:
            return json.dumps({slots["name"]: slots["arguments"]}, ensure_ascii=False)
        return json.dumps(_fill(body.skeleton, slots, index), ensure_ascii=False)
    lead = "".join(p if isinstance(p, str) else str(_fill(p, slots, index)) for p in body.lead)
    if isinstance(body.arguments, ObjectArguments):
        text = json.dumps(arguments, ensure_ascii=False)
        return lead + (json.dumps(text, ensure_ascii=False) if body.arguments.as_text else text)
    pairs = body.arguments
    written = [pairs.key_open + key + _write_value(pairs, value) + pairs.close for key, value in arguments.items()]
    return lead + pairs.separator.join(written)


def _make_id(call: Mapping[str, Any], index: int) -> str:
    return make_call_id(json.dumps([call["name"], call.get("arguments")], ensure_ascii=False), index)


def _fill(node: Any, slots: Mapping[str, Any], index: int) -> Any:
    """Fill the slots of a JSON value."""
    if isinstance(node, Slot):
        return node.first + index if node.what == "index" else slots[node.what]
    if isinstance(node, Mapping):
        return {key: _fill(value, slots, index) for key, value in node.items()}
    return [_fill(value, slots, index) for value in node] if isinstance(node, list) else node


def find_kind(value: Any) -> Kind:
    """Return JSON schema's word for a value."""
    if isinstance(value, bool):
        return "boolean"
    kinds: tuple[tuple[type | tuple[type, ...], Kind], ...] = (
        (str, "string"), (int, "integer"), (float, "number"), (type(None), "null"), ((list, tuple), "array"),
    )  # fmt: skip
    return next((kind for types, kind in kinds if isinstance(value, types)), "object")


def _write_value(pairs: PairArguments, value: Any) -> str:
    kind = find_kind(value)
    form = next((f for f in pairs.values if kind in f.kinds), pairs.values[0])
    if form.encoding == "json":
        text = json.dumps(value, ensure_ascii=False)
    elif form.encoding == "literal":
        text = write_literal(value, form.quote)
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        mark = (form.after + pairs.close).strip()
        if mark in text:
            raise ValueError(f"a value of this form cannot hold {mark}")
    return form.before + text + form.after
