"""The learning of a template's call format: probe calls are rendered, the grammar is read off, and proven on others."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import takewhile
from typing import Any

from agentrl.errors import TemplateError
from agentrl.renderer.call_formats.grammar import (
    NAME_MARK,
    Grammar,
    JsonBody,
    Kind,
    ObjectArguments,
    PairArguments,
    Slot,
    TaggedBody,
    ValueForm,
)
from agentrl.renderer.call_formats.probes import IDS, KINDS, NAMES, REPLY, Call, CallTurn, Prober, make_tools
from agentrl.renderer.call_formats.values import scan_json, scan_literal

_KEYS = ("qzkeyq", "qzwordq")
_VALUES = (("qzoneq", "qztwoq"), ("qzthreeq", "qzfourq"))
_LEXEMES = re.compile(r"<[^<>\n]{1,80}>|\[/?[A-Z][A-Z_]+\]|\w+|\s|.", re.S)
_STRINGS = make_tools(keys=dict.fromkeys(_KEYS, "string"))


class NotLearnt(Exception):
    """The grammar cannot be read off; the message says why, for the verdict."""


@dataclass(frozen=True, slots=True)
class _CallPlaces:
    """The places of a call: its first slot, its arguments, their end; of keys and values if they are not an object."""

    start: int
    arguments: int
    end: int
    document: ObjectArguments | None
    words: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _ValueSpan:
    """The text before and behind a value."""

    before: str
    after: str
    is_json: bool


def learn_grammar(prober: Prober, marks: Collection[str] = ()) -> Grammar:
    """Read the grammar of calls off what a template writes.

    Args:
        prober: renders probe calls.
        marks: the tokenizer's added tokens, which are not taken apart.

    Raises:
        NotLearnt: it writes no calls, or in a way that cannot be followed.
        TemplateError: it refuses them.
    """
    try:
        return _Learner(prober, marks).learn()
    except (ValueError, KeyError, IndexError):  # a word is not where any form has it
        raise NotLearnt("it writes calls in a way that cannot be followed") from None


class _Learner:
    def __init__(self, prober: Prober, marks: Collection[str]) -> None:
        self._prober = prober
        self._marks = sorted((m for m in marks if len(m) > 1), key=len, reverse=True)
        tokens = "|".join(map(re.escape, self._marks))
        self._lexer = re.compile(f"{tokens}|{_LEXEMES.pattern}", re.S) if tokens else _LEXEMES

    def learn(self) -> Grammar:
        calls: list[Call] = [
            {"name": n, "arguments": dict(zip(_KEYS, v, strict=True))} for n, v in zip(NAMES, _VALUES, strict=True)
        ]
        try:
            turn = self._render(calls)
            if NAMES[1] not in turn.text:
                raise NotLearnt("it leaves out all calls but the first")
        except (TemplateError, NotLearnt):
            turn = self._render(calls := calls[:1])
        text = turn.text
        places = [self._places(text, i) for i in range(len(calls))]
        if any(not all(found) for found in places):
            raise NotLearnt("it leaves out names or arguments of calls")
        grammar = self._learn_json(turn, calls) or self._learn_tagged(turn, calls)
        return grammar if turn.is_closed else self._find_stop(grammar)

    def _render(self, calls: Sequence[Call]) -> CallTurn:
        """Render the calls beside a text, where the template has one; what stands before them is the same without."""
        bare = self._prober.render_turn(calls, _STRINGS)
        if NAMES[0] not in bare.text:
            raise NotLearnt("it writes no tool calls")
        try:
            beside = self._prober.render_turn(calls, _STRINGS, REPLY)
        except TemplateError:
            return bare
        if not beside.has_content or NAMES[0] not in beside.text:
            return bare
        at, behind = bare.text.index(NAMES[0]), beside.text.index(NAMES[0])
        lead = self._suffix(bare.text[:at], beside.text[:behind])
        return CallTurn(lead + bare.text[at:], has_content=True, is_closed=bare.is_closed)

    def _find_stop(self, grammar: Grammar) -> Grammar:
        """Tell the token that ends a turn with calls from what closes the calls."""
        closing = grammar.section_close.rstrip()
        stop = next((m for m in self._marks if closing.endswith(m)), "")
        return replace(grammar, section_close=closing.removesuffix(stop), stop=stop) if stop else grammar

    def _places(self, text: str, number: int) -> list[bool]:
        return [word in text for word in (NAMES[number], *_KEYS, *_VALUES[number])]

    # -- a JSON object, or a list of them --------------------------------------------------------------------------

    def _learn_json(self, turn: CallTurn, calls: Sequence[Call]) -> Grammar | None:
        text = turn.text
        first = text.index(NAMES[0])
        for start in (m.start() for m in re.finditer(r"[\[{]", text[:first])):
            try:
                document, end = scan_json(text, start)
            except ValueError:
                continue
            items = document if isinstance(document, list) else [document]
            if not all(isinstance(item, dict) for item in items):
                continue
            body = _find_body(items[0], calls[0])
            if body is None:
                continue
            if isinstance(document, list):
                if len(items) != len(calls):
                    return None
                body = _add_slots(body, items)
                return Grammar(text[:start], "", body, "", ", ", text[end:], in_list=True)
            return self._frame_objects(text, start, end, calls, (document, body))
        return None

    def _frame_objects(
        self, text: str, start: int, end: int, calls: Sequence[Call], first: tuple[Any, JsonBody]
    ) -> Grammar | None:
        item, body = first
        if len(calls) == 1:
            return Grammar("", text[:start], _add_slots(body, [item]), text[end:], "\n", "")
        other = text.index(NAMES[1])
        for following in (m.start() for m in re.finditer(r"\{", text[:other]) if m.start() >= end):
            try:
                document, last = scan_json(text, following)
            except ValueError:
                continue
            if isinstance(document, dict) and _find_body(document, calls[1]) is not None:
                frame = self._frame(text[:start], text[end:following], text[last:])
                section_open, call_open, call_close, separator, section_close = frame
                body = _add_slots(body, [item, document])
                return Grammar(section_open, call_open, body, call_close, separator, section_close)
        return None

    # -- names and arguments between literals ----------------------------------------------------------------------

    def _learn_tagged(self, turn: CallTurn, calls: Sequence[Call]) -> Grammar:
        text = turn.text
        first = self._find_call(text, 0, 0)
        if first.document is not None:
            return self._learn_object(text, first, calls)
        return self._learn_pairs(text, first, calls)

    def _find_call(self, text: str, number: int, since: int) -> _CallPlaces:
        name = NAMES[number]
        key = min(text.find(k, text.index(name, since)) for k in _KEYS)
        if key < 0:
            raise NotLearnt("it writes arguments before the name of their tool")
        name_at = text.rindex(name, since, key)  # a channel may say it too, before
        id_at = text.find(IDS[number], since, name_at)
        start = min(name_at, id_at if id_at >= 0 else name_at)
        arguments = dict(zip(_KEYS, _VALUES[number], strict=True))
        for opening in (m.start() for m in re.finditer(r'[{"]', text[:key]) if m.start() >= name_at + len(name)):
            try:
                document, end = scan_json(text, opening)
            except ValueError:
                continue
            if document == arguments:
                return _CallPlaces(start, opening, end, ObjectArguments())
            if isinstance(document, str) and _load(document) == arguments:
                return _CallPlaces(start, opening, end, ObjectArguments(as_text=True))
        words = sorted((text.index(w, name_at), w) for w in (*_KEYS, *_VALUES[number]))
        if [w in _KEYS for _, w in words] != [True, False, True, False]:
            raise NotLearnt("it writes arguments in an order that cannot be followed")
        return _CallPlaces(start, words[0][0], words[-1][0] + len(words[-1][1]), None, tuple(p for p, _ in words))

    def _learn_object(self, text: str, first: _CallPlaces, calls: Sequence[Call]) -> Grammar:
        assert first.document is not None
        segments, between, tail = [text[first.start : first.arguments]], None, text[first.end :]
        if len(calls) > 1:
            other = self._find_call(text, 1, first.end)
            segments.append(text[other.start : other.arguments])
            between, tail = text[first.end : other.start], text[other.end :]
        body = TaggedBody(self._read_lead(segments), first.document)
        return self._make(text[: first.start], between, tail, body)

    def _learn_pairs(self, text: str, first: _CallPlaces, calls: Sequence[Call]) -> Grammar:
        forms, after = self._learn_values()
        key, value, next_key, next_value = first.words
        length = {p: len(w) for w in (*_KEYS, *_VALUES[0]) for p in first.words if text.startswith(w, p)}
        inner = text[value + length[value] : next_key]
        segments, between, tail = [text[first.start : key]], None, text[next_value + length[next_value] :]
        if len(calls) > 1:
            other = self._find_call(text, 1, first.end)
            segments.append(text[other.start : other.words[0]])
            between, tail = text[first.end : other.start].removeprefix(after), text[other.end :]
        inner, tail = inner.removeprefix(after), tail.removeprefix(after)
        key_open = self._suffix(segments[0], inner)
        key_open = key_open[max(key_open.rfind(NAMES[0]) + len(NAMES[0]), 0) :] if NAMES[0] in key_open else key_open
        segments = [s[: len(s) - len(key_open)] for s in segments]
        inner = inner[: len(inner) - len(key_open)]
        close = self._prefix(inner, tail if between is None else between)
        pairs = PairArguments(key_open, forms, close, inner[len(close) :])
        for form in forms:
            if form.encoding == "bare" and not (form.after + close).strip():
                raise NotLearnt("nothing but white space ends a value")
            if not form.before.strip():
                raise NotLearnt("nothing but white space stands between a key and its value")
        between = between[len(close) :] if between is not None else None
        return self._make(
            text[: first.start], between, tail[len(close) :], TaggedBody(self._read_lead(segments), pairs)
        )

    def _make(self, lead: str, between: str | None, tail: str, body: TaggedBody) -> Grammar:
        if between is None:
            return Grammar("", lead, body, tail, "\n", "")
        section_open, call_open, call_close, separator, section_close = self._frame(lead, between, tail)
        return Grammar(section_open, call_open, body, call_close, separator, section_close)

    def _read_lead(self, segments: Sequence[str]) -> tuple[str | Slot, ...]:
        """Cut what stands before the arguments into literals, name, id and number."""
        lexed = [[self._to_slot(lexeme) for lexeme in self._split_words(s)] for s in segments]
        parts: list[str | Slot] = []
        for number, lexeme in enumerate(lexed[0]):
            others = {str(line[number]) if number < len(line) else "" for line in lexed[1:]}
            if isinstance(lexeme, str) and lexeme.isdigit() and others - {lexeme}:
                lexeme = Slot("index", int(lexeme))
            if isinstance(lexeme, str) and parts and isinstance(parts[-1], str):
                parts[-1] += lexeme
            else:
                parts.append(lexeme)
        if Slot("name") not in parts:
            raise NotLearnt("it writes the name of a tool where it cannot be followed")
        return tuple(parts)

    def _split_words(self, segment: str) -> list[str]:
        words = re.split("(" + "|".join((*NAMES, *IDS)) + ")", segment)
        return [lexeme for w in words for lexeme in ([w] if w in NAMES or w in IDS else self._lex(w))]

    def _to_slot(self, word: str) -> str | Slot:
        return Slot("name") if word in NAMES else Slot("id") if word in IDS else word

    # -- values ----------------------------------------------------------------------------------------------------

    def _learn_values(self) -> tuple[tuple[ValueForm, ...], str]:
        """Read off how values of each kind are written; also what stands behind a text and behind no other value."""
        rests: dict[Kind, str] = {}
        for kind, (value, _) in KINDS.items():
            with suppress(TemplateError, NotLearnt):
                rests[kind] = self._render_value(value, kind)
        if "string" not in rests or "integer" not in rests:
            raise NotLearnt("it does not write texts and numbers")
        end = reduce(self._suffix, rests.values())
        spans = {k: _find_value(r[: len(r) - len(end)], KINDS[k][0]) for k, r in rests.items()}
        if (text := spans["string"]) is None or (number := spans["integer"]) is None:
            raise NotLearnt("it writes values in a way that cannot be followed")
        known = {k: span for k, span in spans.items() if span is not None}
        quote = text.before.removeprefix(number.before) if text.before.startswith(number.before) else ""
        alike = frozenset(k for k, s in known.items() if (s.before, s.after) == (number.before, number.after))
        if quote and text.after.startswith(quote):
            is_json = quote == '"' and all(s.is_json for s in known.values())
            own = quote if quote not in ("'", '"') else ""
            form = ValueForm(number.before, number.after, "json" if is_json else "literal", alike | {"string"}, own)
            return (form,), quote
        special = self._learn_special(end)
        groups: dict[tuple[str, str], set[Kind]] = {}
        for kind, span in known.items():
            groups.setdefault((span.before, span.after), set()).add(kind)
        is_typed = "string" in alike
        forms = [
            ValueForm(b, a, "bare" if is_typed or kinds == {"string"} else "json", frozenset(kinds))
            for (b, a), kinds in groups.items()
        ]
        if special is not None and (special.before, special.after) != (text.before, text.after):
            forms.insert(0, ValueForm(special.before, special.after, "bare", frozenset({"string"})))
        return tuple(forms), text.after

    def _learn_special(self, end: str) -> _ValueSpan | None:
        """Find how a text with signs is written, which some templates mark as such."""
        value = 'qz <&> "q" \n qz'
        try:
            rest = self._render_value(value, "string")
        except (TemplateError, NotLearnt):
            return None
        at = rest.find(value)
        if at < 0 or not rest.endswith(end):
            return None
        return _ValueSpan(rest[:at], rest[at + len(value) : len(rest) - len(end)], False)

    def _render_value(self, value: Any, kind: Kind) -> str:
        """Render a call with one argument; return the text behind its key."""
        turn = self._prober.render_turn(
            [{"name": NAMES[0], "arguments": {_KEYS[0]: value}}], make_tools(keys={_KEYS[0]: kind})
        )
        _, key, rest = turn.text.partition(_KEYS[0])
        if not key:
            raise NotLearnt(f"it leaves out arguments of the type {kind}")
        return rest

    # -- literals --------------------------------------------------------------------------------------------------

    def _frame(self, lead: str, between: str, tail: str) -> tuple[str, str, str, str, str]:
        """Tell the literals round calls apart: of the section, of a call, between two."""
        call_open = self._suffix(lead, between)
        rest = between[: len(between) - len(call_open)]
        call_close = self._prefix(rest, tail)
        return (
            lead[: len(lead) - len(call_open)].replace(NAMES[0], NAME_MARK),
            call_open,
            call_close,
            rest[len(call_close) :].replace(NAMES[1], NAME_MARK),
            tail[len(call_close) :],
        )

    def _lex(self, text: str) -> list[str]:
        return self._lexer.findall(text)

    def _prefix(self, one: str, other: str) -> str:
        """Return what two texts begin with, in whole tags and words."""
        pairs = zip(self._lex(one), self._lex(other), strict=False)
        return "".join(a for a, _ in takewhile(lambda p: p[0] == p[1], pairs))

    def _suffix(self, one: str, other: str) -> str:
        """Return what two texts end with, in whole tags and words."""
        pairs = zip(reversed(self._lex(one)), reversed(self._lex(other)), strict=False)
        return "".join(reversed([a for a, _ in takewhile(lambda p: p[0] == p[1], pairs)]))


def _find_body(item: Mapping[str, Any], call: Call) -> JsonBody | None:
    """Find where the name and the arguments of a call stand in a JSON object."""
    leaves = dict(_walk(item))
    names = [path for path, leaf in leaves.items() if leaf == call["name"]]
    for path, leaf in leaves.items():
        as_text = isinstance(leaf, str) and _load(leaf) == call["arguments"]
        if not as_text and leaf != call["arguments"]:
            continue
        if names:
            return JsonBody(item, names[0], path, as_text)
        if path == (call["name"],) and len(item) == 1:
            return JsonBody({}, None, (), as_text)
    return None


def _add_slots(body: JsonBody, items: Sequence[Any]) -> JsonBody:
    """Put slots where the calls' objects hold the name, the arguments, an id, or a number of theirs."""
    if body.name_path is None:
        return body

    def fill(path: tuple[str, ...], nodes: Sequence[Any]) -> Any:
        if path in (body.name_path, body.arguments_path):
            return Slot("name" if path == body.name_path else "arguments")
        first = nodes[0]
        if first == IDS[0]:
            return Slot("id")
        if type(first) is int and any(n != first for n in nodes):
            return Slot("index", first)
        if isinstance(first, dict):
            others = [n if isinstance(n, dict) else {} for n in nodes]
            return {k: fill((*path, k), [o.get(k) for o in others]) for k in first}
        return first

    return replace(body, skeleton=fill((), items))


def _walk(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, node
    if isinstance(node, dict) and len(path) < 4:
        for key, value in node.items():
            yield from _walk(value, (*path, key))


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _find_value(body: str, value: Any) -> _ValueSpan | None:
    """Find a value in what stands between its key and the end of the argument."""
    if isinstance(value, str):
        at = body.find(value)
        return _ValueSpan(body[:at], body[at + len(value) :], True) if at >= 0 else None
    quotes = ("", *dict.fromkeys(re.findall(r"<[^<>\w\s]*>", body)))
    for is_json, quote in ((True, ""), *((False, q) for q in quotes)):
        for at in range(min(len(body), 120)):
            try:
                found, end = scan_json(body, at) if is_json else scan_literal(body, at, quote)
            except (ValueError, RecursionError):
                continue
            if found == value and type(found) is type(value):
                return _ValueSpan(body[:at], body[end:], is_json)
    return None
