"""The reading of calls by a grammar: each gets a verdict of its own, in time linear in the text."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from agentrl.renderer.call_formats.grammar import (
    Grammar,
    JsonBody,
    PairArguments,
    Slot,
    TaggedBody,
    ValueForm,
    is_mark,
    write_calls,
)
from agentrl.renderer.call_formats.hermes import CALL_ID, make_call_id
from agentrl.renderer.call_formats.values import get_parameters, read_typed, scan_json, scan_literal
from agentrl.types import THOUGHT_MARKS, JsonSchema, Reply, ToolCall

_LONGEST_NAME = 256
_UNCLOSED = "the tool call was not closed"
_NO_NAME = re.compile(r"[\s{}\"<>]")
_SPACE = re.compile(r"\s*")
_ID_START = re.compile(r"[\w.]*\Z")


class _Refusal(Exception):
    """A call cannot be read; ``why`` is in words for the model."""

    def __init__(self, why: str, kind: str = "invalid", name: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.kind, self.name = kind, name


class _Text:
    """A text, in which the next place of a mark is looked for once."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._places: dict[str, list[int]] = {}

    def find(self, mark: str, at: int) -> int:
        """Return the next place of a mark, or the text's length."""
        if mark not in self._places:
            self._places[mark] = [m.start() for m in _pattern_of(mark).finditer(self.text)]
        places = self._places[mark]
        number = bisect_left(places, at)
        return places[number] if number < len(places) else len(self.text)

    def skip(self, mark: str, at: int) -> int:
        """Return the end of a mark that stands here, behind white space; -1 if it does not. An empty one does."""
        found = _pattern_of(mark).match(self.text, _skip_space(self.text, at))
        return found.end() if found else -1


class LearntFormat:
    """The call format of a grammar that was read off a template.

    Args:
        grammar: of the calls.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.grammar, self.stops = grammar, (grammar.stop,) if grammar.stop else ()
        self.name = f"learnt: {grammar.describe()}"
        self._opening = (grammar.call_open if grammar.is_marked else grammar.section_open).strip()
        self.marks = (self._opening,) if is_mark(self._opening) else ()

    def parse(self, text: str, *, tools: Sequence[JsonSchema] = (), thinking: bool = False) -> Reply:
        """Read one turn. Calls inside a thought are thoughts."""
        return _Reading(self.grammar, self._opening, text, tools).read(thinking=thinking)

    def format_instructions(self) -> tuple[str, str]:
        """Return the text before and after the list of tools, with a call as an example."""
        example = self.format_call({"name": "TOOL", "arguments": {"ARGUMENT": "VALUE"}})
        before = "You may call tools. The tools, as JSON schemas, one a line:\n<tools>\n"
        return before, f"\n</tools>\nTo call one, write:\n{example}"

    def format_call(self, call: Mapping[str, object]) -> str:
        """Write one call. Raises ValueError if the form cannot hold a value."""
        return self.format_calls([call])

    def format_calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Write the calls of a turn. Raises ValueError if the form cannot hold a value."""
        return write_calls(self.grammar, calls)


class _Read(NamedTuple):
    name: str
    arguments: dict[str, Any]
    end: int
    own_id: str = ""  # that the model wrote


class _Reading:
    """The reading of one turn."""

    def __init__(self, grammar: Grammar, opening: str, text: str, tools: Sequence[JsonSchema]) -> None:
        self._grammar, self._opening, self._tools = grammar, opening, tools
        self._text, self._marks = text, _Text(text)
        self._seed = make_call_id(text, 0)  # a turn is hashed once
        self._call_close, self._separator = grammar.call_close.strip(), grammar.separator.strip()
        self._section_open, self._section_close = grammar.section_open.strip(), grammar.section_close.strip()
        self._calls: list[ToolCall] = []
        self._content: list[str] = []

    def read(self, *, thinking: bool) -> Reply:
        at = self._end_of_thought(0) if thinking else 0
        self._content.append(self._text[:at])
        if not self._opening:
            at = self._read_bare(at)
        while self._opening and at < len(self._text):
            thought, call = self._marks.find(THOUGHT_MARKS[0], at), self._marks.find(self._opening, at)
            if thought < call:
                end = self._end_of_thought(thought)
                self._content.append(self._text[at:end])
                at = end
                continue
            self._content.append(self._before(at, call))
            if call == len(self._text):
                at = call
                break
            at = self._read_one(call) if self._grammar.is_marked else self._read_section(call)
        self._content.append(self._text[at:])
        return Reply("".join(self._content).strip(), tuple(self._calls))

    def _end_of_thought(self, at: int) -> int:
        end = self._marks.find(THOUGHT_MARKS[1], at)
        return min(end + len(THOUGHT_MARKS[1]), len(self._text))

    def _before(self, at: int, call: int) -> str:
        """Return the text before a call, without what opens the section and stands between calls."""
        before = self._text[at:call]
        if call == len(self._text):
            return before
        if self._grammar.is_marked and self._section_open and before.rstrip().endswith(self._section_open):
            before = before.rstrip().removesuffix(self._section_open)
        return "" if self._calls and self._separator and before.strip() == self._separator else before

    # -- the places of calls ---------------------------------------------------------------------------------------

    def _read_one(self, start: int) -> int:
        """Read the call whose opening mark stands at ``start``; return the end of what belongs to it."""
        at = self._marks.skip(self._opening, start)
        bound = self._marks.find(self._opening, at)
        end = self._record(start, at, bound)
        if self._section_close and (closed := self._marks.skip(self._section_close, end)) >= 0:
            return closed
        return end

    def _read_section(self, start: int) -> int:
        """Read the calls of a section; return its end."""
        at = self._marks.skip(self._opening, start)
        bound = self._marks.find(self._opening, at)
        if self._grammar.in_list:
            at = max(self._marks.skip("[", at), at)
        closing = ("]" if self._grammar.in_list else "") + self._section_close
        first = True
        while True:
            closed = self._close_section(at)
            if closed >= 0:
                return closed
            at = _skip_space(self._text, at)
            if at >= bound:
                if first or (closing and self._calls[-1].error is None):
                    self._add(start if first else min(at, bound), bound, _Refusal(_UNCLOSED, "unclosed"))
                return bound
            if not first:
                separator = self._marks.skip(self._separator or ("," if self._grammar.in_list else ""), at)
                at = _skip_space(self._text, max(separator, at))
            before, failed = at, len(self._calls)
            at = self._record(at, at, bound)
            first = False
            if self._calls[failed].error is not None and at <= before:
                return bound

    def _close_section(self, at: int) -> int:
        """Return the end of the section if it is closed here; -1 if not."""
        if self._grammar.in_list:
            listed = self._marks.skip("]", at)
            if listed < 0:
                return -1
            return max(self._marks.skip(self._section_close, listed), listed)
        return self._marks.skip(self._section_close, at) if self._section_close else -1

    def _read_bare(self, at: int) -> int:
        """Read a turn that is a call and nothing else, in a form that no mark opens; return its end."""
        start = _skip_space(self._text, at)
        if not _head(self._grammar).match(self._text, start):
            return at
        if self._grammar.in_list:
            return self._read_section(start)
        while _head(self._grammar).match(self._text, start):
            at = self._record(start, start, len(self._text))
            start = _skip_space(self._text, at)
            start = _skip_space(self._text, start + 1) if self._text[start : start + 1] in (";", ",") else start
        return at

    def _record(self, start: int, at: int, bound: int) -> int:
        """Read a call, record it or what is wrong with it, and return its end."""
        try:
            read = self._read_body(at, bound)
        except _Refusal as refusal:
            end = self._resume(at, bound, refusal)
            self._add(start, end, refusal)
            return end
        call_id = read.own_id if CALL_ID.fullmatch(read.own_id) else ""
        if not call_id or any(c.id == call_id for c in self._calls):
            call_id = make_call_id(self._seed, len(self._calls))
        self._calls.append(ToolCall(call_id, read.name, read.arguments, span=(start, read.end)))
        return read.end

    def _add(self, start: int, end: int, refusal: _Refusal) -> None:
        call_id = make_call_id(self._seed, len(self._calls))
        self._calls.append(ToolCall(call_id, refusal.name, error=refusal.why, kind=refusal.kind, span=(start, end)))

    def _resume(self, at: int, bound: int, refusal: _Refusal) -> int:
        """Return the place where reading goes on behind a call that cannot be read."""
        grammar = self._grammar
        if grammar.is_marked:
            closing = self._call_close or self._section_close
            if closing and (close := self._marks.find(closing, at)) < bound:
                return max(self._marks.skip(self._call_close, close), close)
            if self._call_close:
                refusal.why, refusal.kind = _UNCLOSED, "unclosed"
            return bound
        limit = min(self._marks.find(self._section_close, at), bound) if self._section_close else bound
        head = _next_head(grammar, tuple(sorted(_names(self._tools))))
        if head is not None and (following := head.search(self._text, at + 1, limit)):
            return following.start()
        if self._section_close and limit == bound:
            refusal.why, refusal.kind = _UNCLOSED, "unclosed"
        return limit

    # -- a call ----------------------------------------------------------------------------------------------------

    def _read_body(self, at: int, bound: int) -> _Read:
        body = self._grammar.body
        read = self._read_json(body, at) if isinstance(body, JsonBody) else self._read_tagged(body, at, bound)
        if not self._call_close:
            return read
        closed = self._marks.skip(self._call_close, read.end)
        if closed < 0:
            raise _Refusal(self._explain_rest(read.end, bound), "invalid", read.name)
        return read._replace(end=closed)

    def _explain_rest(self, at: int, bound: int) -> str:
        if self._marks.find(self._call_close, at) >= bound:
            return _UNCLOSED
        rest = self._text[_skip_space(self._text, at) :][:20]
        return f"expected {self._call_close} behind the arguments instead of {rest!r}"

    def _read_json(self, body: JsonBody, at: int) -> _Read:
        try:
            call, end = scan_json(self._text, _skip_space(self._text, at))
        except ValueError as error:
            raise _Refusal(f"invalid JSON in the tool call: {error}") from None
        if not isinstance(call, dict):
            raise _Refusal("a tool call must be an object")
        if body.name_path is None:
            if len(call) != 1:
                raise _Refusal("a tool call must be an object with one key, the tool's name")
            ((name, arguments),) = call.items()
        else:
            name = _follow(call, body.name_path)
            if not isinstance(name, str):
                raise _Refusal(f'a tool call must be an object with a "{body.name_path[-1]}"')
            arguments = _follow(call, body.arguments_path, {})
        own_ids = (call.get(key) for key, slot in body.skeleton.items() if slot == Slot("id"))
        own_id = next((i for i in own_ids if isinstance(i, str)), "")
        return _Read(name, self._check_arguments(arguments, name, as_text=body.as_text), end, own_id)

    def _check_arguments(self, arguments: Any, name: str, *, as_text: bool) -> dict[str, Any]:
        if as_text and isinstance(arguments, str):
            try:
                arguments, end = scan_json(text := arguments.strip() or "{}", 0)
            except ValueError as error:
                raise _Refusal(f"invalid JSON in the arguments: {error}", name=name) from None
            if end != len(text):
                raise _Refusal("more than one JSON value in the arguments", name=name)
        if not isinstance(arguments, dict):
            raise _Refusal("the arguments of a tool call must be an object", name=name)
        return arguments

    def _read_tagged(self, body: TaggedBody, at: int, bound: int) -> _Read:
        name, own_id, begun = "", "", at
        for number, part in enumerate(body.lead):
            if isinstance(part, Slot):
                start, at = at, self._end_of_slot(body, number, at, bound)
                name = self._text[start:at].strip() if part.what == "name" else name
                own_id = self._text[start:at].strip() if part.what == "id" else own_id
                if part.what == "index" and name:  # functions.NAME:0 is an id, too
                    own_id = _ID_START.findall(self._grammar.call_open)[0] + self._text[begun:at].strip()
            elif part.strip():
                found = self._marks.skip(part.strip(), at)
                if found < 0:
                    raise _Refusal(f"expected {part.strip()} in the tool call", name=name)
                at = found
        if not name or _NO_NAME.search(name):
            raise _Refusal("a tool call must have a name")
        if isinstance(body.arguments, PairArguments):
            arguments, at = self._read_pairs(body.arguments, name, at, bound)
            return _Read(name, arguments, at, own_id)
        try:
            value, at = scan_json(self._text, _skip_space(self._text, at))
        except ValueError as error:
            raise _Refusal(f"invalid JSON in the arguments: {error}", name=name) from None
        arguments = self._check_arguments(value, name, as_text=body.arguments.as_text)
        return _Read(name, arguments, at, own_id)

    def _end_of_slot(self, body: TaggedBody, number: int, at: int, bound: int) -> int:
        """Return the end of the name, id or number that begins here."""
        following = body.lead[number + 1] if number + 1 < len(body.lead) else ""
        literal = following if isinstance(following, str) else ""
        ends = [literal.strip()]
        if not ends[0]:
            opening = body.arguments.key_open.strip() if isinstance(body.arguments, PairArguments) else "{"
            ends = [end for end in (opening, self._call_close, "\n" if "\n" in literal else "") if end]
        end = min((self._marks.find(e, at) for e in ends), default=bound)
        if end >= bound or end - at > _LONGEST_NAME:
            raise _Refusal(_UNCLOSED if end >= bound else "a tool call must have a name", "invalid")
        return end

    # -- arguments one by one --------------------------------------------------------------------------------------

    def _read_pairs(self, pairs: PairArguments, name: str, at: int, bound: int) -> tuple[dict[str, Any], int]:
        arguments: dict[str, Any] = {}
        whole = get_parameters(self._tools, name)
        properties = whole.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        opening, separator = pairs.key_open.strip(), pairs.separator.strip()
        while True:
            here = _skip_space(self._text, at)
            if opening:
                if (opened := self._marks.skip(opening, here)) < 0:
                    return arguments, at
                here = opened
            elif self._closes(here, bound):
                return arguments, at
            key, here, form = self._read_key(pairs, here, bound, name)
            schema = properties.get(key)
            schema = schema if isinstance(schema, Mapping) else {}
            value, at = self._read_value(pairs, form, here, bound, (dict(schema), whole), name, key)
            if key in arguments:
                raise _Refusal(f"the argument {key!r} is given twice", name=name)
            arguments[key] = value
            if separator:
                behind = self._marks.skip(separator, at)
                if behind < 0:
                    return arguments, at
                at = behind

    def _closes(self, at: int, bound: int) -> bool:
        return at >= bound or not self._call_close or self._marks.skip(self._call_close, at) >= 0

    def _read_key(self, pairs: PairArguments, at: int, bound: int, name: str) -> tuple[str, int, ValueForm]:
        """Read a key and what stands before its value; return both, and the form of the value."""
        marks = {form.before.strip(): form for form in pairs.values}
        places = [(self._marks.find(mark, at), -len(mark), form) for mark, form in marks.items()]
        place = min((p[0] for p in places), default=bound)
        if place >= bound or place - at > _LONGEST_NAME:
            raise _Refusal("an argument has no value", name=name)
        _, _, form = min((p for p in places if p[0] == place), key=lambda p: p[1])
        return self._text[at:place].strip(), self._marks.skip(form.before.strip(), place), form

    def _read_value(
        self, pairs: PairArguments, form: ValueForm, at: int, bound: int, schemas: tuple[JsonSchema, JsonSchema],
        name: str, key: str,
    ) -> tuple[Any, int]:  # fmt: skip
        closing = (form.after + pairs.close).strip()
        if form.encoding == "bare":
            end = self._end_of_bare(pairs, closing, at, bound)
            if end < 0:
                why = f"the argument {key!r} is not closed by {closing}, or holds that mark, which this form cannot"
                raise _Refusal(why, name=name)
            text = _strip_edges(self._text[at:end], form.before, form.after + pairs.close)
            only = form.kinds == {"string"}
            return text if only else read_typed(text, *schemas), self._marks.skip(closing, end)
        here = _skip_space(self._text, at)
        try:
            if form.encoding == "json":
                value, end = scan_json(self._text, here)
            else:
                value, end = scan_literal(self._text, here, form.quote)
        except (ValueError, RecursionError) as error:
            raise _Refusal(f"the argument {key!r} has no value that can be read: {error}", name=name) from None
        closed = self._marks.skip(closing, end)
        if closed < 0:
            raise _Refusal(f"expected {closing} behind the argument {key!r}", name=name)
        return value, closed if closing else end

    def _end_of_bare(self, pairs: PairArguments, closing: str, at: int, bound: int) -> int:
        """Return the place of the first closing mark behind which the call goes on or ends; -1 if there is none."""
        following = [f for f in (pairs.key_open.strip(), self._call_close) if f]
        place = self._marks.find(closing, at)
        while place < bound:
            here = self._marks.skip(closing, place)
            separated = self._marks.skip(pairs.separator.strip(), here)
            behind = [here, separated] if separated >= 0 else [here]
            if not following or any(self._marks.skip(f, b) >= 0 for f in following for b in behind):
                return place
            place = self._marks.find(closing, place + 1)
        return -1


def _skip_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _strip_edges(value: str, before: str, after: str) -> str:
    """Remove the white space that the form writes beside a value, and no more."""
    leading = before[len(before.rstrip()) :]
    trailing = after[: len(after) - len(after.lstrip())]
    value = value.removeprefix(leading) if leading else value
    return value.removesuffix(trailing) if trailing else value


def _follow(node: Any, path: Sequence[str], missing: Any = None) -> Any:
    for step in path:
        if not isinstance(node, dict) or step not in node:
            return missing
        node = node[step]
    return node


def _names(tools: Sequence[JsonSchema]) -> set[str]:
    return {str(function.get("name")) for t in tools if isinstance(function := t.get("function", t), Mapping)}


@lru_cache(256)
def _pattern_of(mark: str) -> re.Pattern[str]:
    """Return the pattern of a mark, in which white space may be more or less."""
    return re.compile(r"\s*".join(map(re.escape, mark.split())) if mark.strip() else re.escape(mark))


@lru_cache(64)
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text)


def _head(grammar: Grammar) -> re.Pattern[str]:
    """Return the pattern by which a call begins in a form that no mark opens."""
    if isinstance(grammar.body, JsonBody):
        keys = "|".join(re.escape(key) for key in grammar.body.skeleton)
        return _pattern((r"\[\s*" if grammar.in_list else "") + rf'\{{\s*"(?:{keys})"\s*:')
    return _pattern(re.escape(grammar.call_open.strip()) + r"\w+" + _second(grammar.body))


def _next_head(grammar: Grammar, names: tuple[str, ...]) -> re.Pattern[str] | None:
    """Return the pattern of a call's beginning inside a section, behind one that cannot be read."""
    if isinstance(grammar.body, JsonBody):
        if not grammar.body.skeleton:
            return None
        key = re.escape(next(iter(grammar.body.skeleton)))
        return _pattern(rf'\{{\s*"{key}"\s*:\s*(?=["{{])')
    if not names:
        return None
    opening = re.escape(grammar.call_open.strip())
    return _pattern(rf"{opening}\b(?:{'|'.join(map(re.escape, names))})" + _second(grammar.body))


def _second(body: TaggedBody) -> str:
    """Return the pattern of what stands behind a name."""
    literal = body.lead[1] if len(body.lead) > 1 else ""
    return r"\s*" + re.escape(literal.strip()) if isinstance(literal, str) else ""
