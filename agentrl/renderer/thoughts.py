"""Thoughts: what stands round them in a model's turns, learnt from its chat template, and turns read by it.

In `Reply.content` and in messages a thought stands between ``<think>`` and ``</think>``, whatever the model's own marks
are: rewards, answers and people know one form. What the model sampled stays in its segment as it is.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from agentrl.errors import TemplateError
from agentrl.renderer.call_formats.hermes import make_call_id
from agentrl.renderer.chat_template import find_shared_beginning
from agentrl.types import THOUGHT_MARKS, Reply, Span, ToolCall

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]  # messages, and whether to open the next turn

_THOUGHT, _SAID = "qzthoughtq", "qzsaidq"
_USER: Mapping[str, Any] = {"role": "user", "content": "q"}
_FIELDS = ("reasoning_content", "reasoning", "thinking")
_TAG = re.compile(r"<[^<>\s][^<>]*>|\[/?[A-Z][A-Z_ ]+\]")
_EMPTY = re.compile(  # an empty thought, with which a prompt says that nothing is to be thought
    r"(?P<opening><[^<>\s]+>(?:thought|thinking|analysis))\s*(?P<ending><[^<>\s]+>)\s*\Z"
)
_WORD = re.compile("think|thought|reason|analysis", re.IGNORECASE)
_OPENING, _ENDING = THOUGHT_MARKS
_SPACE = "\n\n"  # between a thought and a text


class ThoughtMarks(NamedTuple):
    """The marks of a thought: its opening, its end, and the ``lead`` that a template writes from there to a text."""

    opening: str = _OPENING
    ending: str = _ENDING
    lead: str = ""


PLAIN = ThoughtMarks()


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The way that a template takes thoughts: their marks, and the field of a message that it reads.

    ``field`` is ``content`` where it takes blocks there, and empty where it reads no field: marks in the content.
    """

    marks: ThoughtMarks = PLAIN
    field: str = ""

    def put(self, message: Mapping[str, Any], thought: str, text: str, space: str = _SPACE) -> dict[str, Any]:
        """Put a thought and a text into an assistant's message, where the template reads them.

        Args:
            space: between the two, where both stand in the content.
        """
        if self.field == "content":
            return {**message, "content": _write_blocks(thought, text)}
        if self.field:
            return {**message, "content": text, self.field: thought}
        opening, ending, _ = self.marks
        return {**message, "content": f"{opening}\n{thought}\n{ending}{space}{text}"}


def learn_thoughts(render: Render) -> Thoughts:
    """Learn how a template writes a thought; where it reads none, ``<think>`` stands in the text."""
    try:
        prompt = render([_USER], True)
    except TemplateError:
        return Thoughts()
    for field, message in _list_probes():
        try:
            turn = render([_USER, message], False)
        except TemplateError:
            continue
        if marks := _read_marks(prompt, turn):
            return Thoughts(marks, field)
    empty = _EMPTY.search(prompt)
    return Thoughts(ThoughtMarks(empty["opening"], empty["ending"])) if empty else Thoughts()


def split_thought(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the thought that an assistant's message begins with, and the rest of its text."""
    content = message.get("content") or ""
    given = next((str(message[field]) for field in _FIELDS if message.get(field)), "")
    if given:
        return given, content
    before, opening, rest = content.partition(_OPENING)
    thought, ending, text = rest.partition(_ENDING)
    if before.strip() or not (opening and ending):
        return "", content
    return thought.strip(), text.lstrip("\n")


def find_space(content: str) -> str:
    """Return the line ends between a thought that a content begins with and the text."""
    _, ending, rest = content.partition(_ENDING)
    return rest[: len(rest) - len(rest.lstrip("\n"))] if ending else _SPACE


def find_opened(prompt: str, marks: Sequence[ThoughtMarks]) -> tuple[ThoughtMarks, str] | None:
    """Return the marks of a thought that a prompt opens at its end, and the white space behind them; or None."""
    stripped = prompt.rstrip()
    for mark in marks:
        if stripped.endswith(mark.opening):
            return mark, prompt[len(stripped) :]
    return None


def read_turn(
    text: str,
    parse: Callable[[str], Reply],
    marks: Sequence[ThoughtMarks],
    opened: tuple[ThoughtMarks, str] | None = None,
    cut_headers: Callable[[str], str] = str,
) -> Reply:
    """Read a turn: its thoughts by their marks, and all else by ``parse``. A mark inside a call is the call's.

    Args:
        parse: reads text without thoughts; its calls have spans in that text.
        marks: of the thoughts that may stand in the turn.
        opened: of a thought that the prompt has opened already, and the white space behind its opening.
        cut_headers: leaves out of what is said the headers of the template's that the model sampled with it.
    """
    content: list[str] = []
    calls: list[ToolCall] = []
    thoughts: list[Span] = []
    for start, end, mark in _split(text, parse, marks, opened):
        if mark is None:
            reply = parse(text[start:end])
            content.append(cut_headers(_cut_calls(text[start:end], reply)))
            calls += [replace(c, span=c.span and (c.span[0] + start, c.span[1] + start)) for c in reply.tool_calls]
        else:
            space = opened[1] if opened and not thoughts and not start else None
            content.append(_write_thought(text[start:end], mark, space))
            thoughts.append((start, end))
    if len(thoughts) + len(content) > 1:  # ids are of a turn, not of a part of it
        seed, times = make_call_id(text, 0), Counter(c.id for c in calls)
        calls = [
            c if _is_written_id(c, text) and times[c.id] == 1 else replace(c, id=make_call_id(seed, number))
            for number, c in enumerate(calls)
        ]
    said = (thoughts[-1][1] if thoughts else 0, len(text))
    spans = () if thoughts and not _ends(text, thoughts[-1], marks, opened) else (said,)
    return Reply("".join(content).strip(), tuple(calls), thought_spans=tuple(thoughts), text_spans=spans)


def _is_written_id(call: ToolCall, text: str) -> bool:
    """Return True if the model wrote the call's id."""
    return call.span is not None and call.id in text[slice(*call.span)]


def write_thought(reply: Reply) -> Reply:
    """Write the thought of a reply, which its call format has read, between ``<think>`` marks in its content."""
    if not reply.thought:
        return reply
    over = f"{_ENDING}\n\n{reply.text}" if reply.text or reply.tool_calls else ""
    return replace(reply, content=f"{_OPENING}\n{_break_marks(reply.thought)}\n{over}".strip())


def _split(
    text: str,
    parse: Callable[[str], Reply],
    marks: Sequence[ThoughtMarks],
    opened: tuple[ThoughtMarks, str] | None,
) -> Iterator[tuple[int, int, ThoughtMarks | None]]:
    """Yield the parts of a turn: from where to where, and the marks of a thought, or None for what is said."""
    at = start = 0
    if opened is not None:
        at = start = _find_end(text, 0, opened[0])
        yield 0, at, opened[0]
    openings = [*re.finditer("|".join(re.escape(m.opening) for m in marks), text)]
    calls = _Calls(text, parse, [o.start() for o in openings], start)
    for opening in openings:
        if opening.start() < at:
            continue
        if end := calls.find_end(opening.start()):
            at = end
            continue
        mark = next(m for m in marks if m.opening == opening[0])
        if start < opening.start():
            yield start, opening.start(), None
        at = start = _find_end(text, opening.end(), mark)
        calls = _Calls(text, parse, calls.openings, start)
        yield opening.start(), at, mark
    if start < len(text):
        yield start, len(text), None


class _Calls:
    """The calls behind ``start`` in a turn, parsed no further than the question whether one holds a place needs."""

    def __init__(self, text: str, parse: Callable[[str], Reply], openings: Sequence[int], start: int) -> None:
        self.text, self.openings = text, openings
        self._parse, self._start = parse, start
        self._spans: list[Span] = []
        self._bound, self._step = start, 1

    def find_end(self, place: int) -> int:
        """Return the end of the call that holds a place; 0 if none does."""
        if place >= self._bound:
            following = bisect_right(self.openings, place)
            bound = place
            while self._read(bound) and bound < len(self.text):  # a call is open: does it end further on?
                beyond = following + self._step - 1
                bound = self.openings[beyond] if beyond < len(self.openings) else len(self.text)
                self._step *= 2
            self._bound = bound
        last = bisect_right(self._spans, place, key=lambda span: span[0]) - 1
        return self._spans[last][1] if last >= 0 and self._spans[last][1] > place else 0

    def _read(self, bound: int) -> bool:
        """Read the calls up to a place. Return True if the last one is open there."""
        calls = [c for c in self._parse(self.text[self._start : bound]).tool_calls if c.span is not None]
        self._spans = [(c.span[0] + self._start, c.span[1] + self._start) for c in calls if c.span]
        return bool(calls) and calls[-1].kind == "unclosed"


def _find_end(text: str, at: int, mark: ThoughtMarks) -> int:
    """Return where a thought is over: behind its end, and behind what the template writes before a text."""
    end = text.find(mark.ending, at)
    if end < 0:
        return len(text)
    end += len(mark.ending)
    return end + len(mark.lead) if mark.lead and text.startswith(mark.lead, end) else end


def _ends(text: str, span: Span, marks: Sequence[ThoughtMarks], opened: tuple[ThoughtMarks, str] | None) -> bool:
    """Return True if the thought at a place of a turn was ended."""
    thought = text[slice(*span)]
    candidates = [opened[0]] if opened and not span[0] else [m for m in marks if thought.startswith(m.opening)]
    return any(m.ending in thought for m in candidates)


def _write_thought(text: str, mark: ThoughtMarks, space: str | None) -> str:
    """Write a thought between ``<think>`` marks; ``space``: of one that the prompt opened, behind its opening."""
    inner = text if space is not None else text[len(mark.opening) :]
    inner, ended, _ = inner.partition(mark.ending)
    if (mark.opening, mark.ending) != THOUGHT_MARKS:
        inner = _break_marks(inner)
    inner = inner.lstrip() if space is not None else inner
    return f"{_OPENING}{space or ''}{inner}{_ENDING if ended else ''}"


def _break_marks(thought: str) -> str:
    """Break the marks that a thought of other marks spells: they end and open nothing."""
    return re.sub("<(?=/?think>)", "< ", thought)


def _cut_calls(text: str, reply: Reply) -> str:
    """Return what was said beside the calls, with the white space round it."""
    edges = [0, *(at for c in reply.tool_calls if c.span for at in c.span), len(text)]
    cut = "".join(text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True))
    if cut.strip() == reply.content.strip():
        return cut
    stripped = text.strip()  # the form has marks round its calls, or says no places
    start = text.find(stripped)
    return text[:start] + reply.content + text[start + len(stripped) :]


def _list_probes() -> Iterator[tuple[str, dict[str, Any]]]:
    said: dict[str, Any] = {"role": "assistant", "content": _SAID}
    for field in _FIELDS:
        yield field, said | {field: _THOUGHT}
    yield "content", said | {"content": _write_blocks(_THOUGHT, _SAID)}


def _write_blocks(thought: str, text: str) -> list[dict[str, str]]:
    return [{"type": "thinking", "thinking": thought}, {"type": "text", "text": text}]


def _read_marks(prompt: str, turn: str) -> ThoughtMarks | None:
    """Read the marks off a rendered turn that thinks and says something. ``prompt``: the same up to the turn."""
    before, found, rest = turn.partition(_THOUGHT)
    between, said, _ = rest.partition(_SAID)
    if not (found and said and between.strip()) or "type" in between:  # a block written out is none
        return None
    header = find_shared_beginning(prompt, before)
    if (bracket := header.rfind("<")) > header.rfind(">"):  # the two differ within a tag
        header = header[:bracket]
    opening = before[len(header) :].strip() or _find_tail(before.rstrip()) or _find_tail(prompt.rstrip())
    if not opening:
        return None
    tags = list(_TAG.finditer(between))
    count = max(1, len(_TAG.findall(opening)))
    end = tags[min(count, len(tags)) - 1].end() if tags else len(between)
    return ThoughtMarks(opening, between[:end].strip(), between[end:].strip())


def _find_tail(text: str) -> str:
    """Return the opening of a thought that a prompt ends with: its last tags, up to one that says so; else a line."""
    line = text.rpartition("\n")[2]
    if _WORD.search(line) and not _TAG.search(line):
        return line
    return next((text[t.start() :] for t in reversed([*_TAG.finditer(text)][-3:]) if _WORD.search(text, t.start())), "")
