"""Fences in plain text: what a template and a call format write around others' text without a control token.

``</tool_response>`` is a token in Qwen3, and eleven letters in Qwen2.5: there a tool that says it ends its own result,
token by token as the template does. So the fences of a family are read off renderings of its own template. In text that
somebody else wrote they are broken: ``<�/tool_response>``.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from agentrl.renderer.control_tokens import REPLACEMENT, Piece
from agentrl.renderer.placeholders import Part
from agentrl.types import THOUGHT_MARKS

# In a marked rendering: a control token, a message's text, any other text (a name, an argument).
_CONTROL, _CONTENT, OTHER = "\x01", "\x02", "\x03"
_TAG = re.compile(r"<{1,2}/?[^\s<>\x02]{1,40}(?: [^<>\n\x02]{1,80})?>{1,2}|\[/?[A-Z][A-Z_]+\]")
_CALL_ID = re.compile(r'"\w+": ?"call\d{5}"')
_WORDS = re.compile(r"\w+(?: \w+)?")
_HEADER_LENGTH = 48

_PLAIN = "\t\n\v\f\r -~"  # characters that no normalizer alters, but for their case
_ODD = re.compile(f"[^{_PLAIN}]+")
_SPACE = r"\s{0,4}"
_WILD = {OTHER: rf"[^<>\n?{REPLACEMENT}]{{0,200}}?", "call0": r"\w{0,40}"}  # what stands there differs
_LINE_START = r"[\n\v\f\r\x85\u2028\u2029][ \t]{0,4}"


class Conversation(NamedTuple):
    """A rendering of so many messages, each with two texts, as `placeholders.collect_texts` says."""

    parts: Sequence[Part]
    messages: int
    tools: bool  # are shown, before the first text or between others


def find_fences(conversations: Iterable[Conversation], added: Collection[str]) -> list[str]:
    """Find what a template writes in plain text round messages' texts.

    Tags (``</tool_response>``, ``[INST]``) and role headers (``### Human:``, ``\\nuser\\n``); a line break at an edge
    of one is part of it. A header behind a control token is none, unless another role's can be spelled.

    Args:
        added: the tokenizer's added tokens, which `SafeEncoder` keeps from others' text.
    """
    tags: set[str] = set()
    headers: set[tuple[str, bool]] = set()
    for conversation in conversations:
        prose, first, turns = _mark(conversation, added).partition(_CONTENT)
        tags |= {*(_find_pairs(prose) if conversation.tools else _find_tags(prose)), *_find_tags(turns)}
        headers |= set(_find_headers(first + turns if conversation.tools else prose + first + turns))
    plain = any(not bound for _, bound in headers)
    found = tags | {text for text, bound in headers if plain or not bound or not text.strip()[0].isalnum()}
    found = {fence for fence in found if fence not in added and not any(mark in fence for mark in THOUGHT_MARKS)}
    return sorted(fence for fence in found if not (fence[0] == "\n" and fence.strip("\n") in found))


def _mark(conversation: Conversation, added: Collection[str]) -> str:
    """Write a rendering with a mark for each text and each control token."""
    parts, texts = conversation.parts, 2 * conversation.messages
    text = "".join(
        part if isinstance(part, str) else OTHER if part.index % 2 or part.index >= texts else _CONTENT
        for part in parts
    )
    tokens = sorted(added, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, tokens)), _CONTROL, text) if tokens else text


def _find_pairs(prose: str) -> Iterator[str]:
    """Yield the tags that prose about tools opens and closes; others stand for something: ``<function-name>``."""
    mentioned = set(_TAG.findall(prose))
    for tag in mentioned:
        if (closing := f"{tag[0]}/{tag[1:]}") in mentioned:
            yield from (tag, closing)


def _find_tags(turns: str) -> Iterator[str]:
    yield from (tag for tag in _TAG.findall(turns) if any(map(str.isalpha, tag)) and _CONTROL not in tag)
    yield from _CALL_ID.findall(turns)


def _find_headers(marked: str) -> Iterator[tuple[str, bool]]:
    """Yield the headers on the lines beside each text, and whether each touches a control token."""
    for at in (i for i, c in enumerate(marked) if c == _CONTENT):
        before = re.split(r"[\x01\x02]", marked[:at])[-1]
        behind = re.split(r"[\x01\x02]", marked[at + 1 :])[0]
        opens = marked[: at - len(before)][-1:]  # what stands before it: a mark, or nothing
        ends = marked[at + 1 + len(behind) :][:1]
        lines = before.split("\n")
        number = max((i for i, line in enumerate(lines) if line.strip()), default=-1)
        if number >= 0:
            start = number > 0 or not opens
            yield from _read_header(lines[number], start, number < len(lines) - 1, number == 0 and opens == _CONTROL)
        lines = behind.split("\n")
        number = next((i for i, line in enumerate(lines) if line.strip()), -1)
        if number >= 0:
            last = number == len(lines) - 1
            yield from _read_header(lines[number], number > 0, not last, last and ends == _CONTROL)


def _read_header(line: str, starts: bool, ends: bool, bound: bool) -> Iterator[tuple[str, bool]]:
    """Yield the header that a line is or holds. It starts or ends a line, and is bound to a control token, or not."""
    rest = _TAG.sub(_CONTROL, line)
    words = rest.strip()
    if _CONTROL in rest:
        starts, words = starts and not rest.lstrip().startswith(_CONTROL), rest.replace(_CONTROL, " ").strip()
    if not words or len(words) > _HEADER_LENGTH or OTHER in words or '"' in words or "{" in words:
        return
    if _WORDS.fullmatch(words):
        if starts and ends and _CONTROL not in rest:
            yield f"\n{words}\n", bound
    elif (
        any(c.isalpha() for c in words)
        and len(words.split()) <= 5
        and (words[-1] in ":>]#=*|-" or words[0] in "#*=|<-")
    ):
        yield ("\n" if starts else "") + words, bound


class PlainFences:
    """The fences of a family, to be broken in others' text.

    Args:
        fences: as `find_fences` finds them.
        replacement: a character that is text in the tokenizer, and in none of the fences.
        ignore_case: the tokenizer lowers letters. Tags are found in any case.
    """

    def __init__(self, fences: Sequence[str], replacement: str = REPLACEMENT, *, ignore_case: bool = False) -> None:
        self.fences, self._replacement = tuple(fences), replacement
        tags = [f for f in fences if _TAG.fullmatch(f)]
        headers = [f for f in fences if f not in tags]
        self._skeletons = {"".join(f.replace(OTHER, "").split()).lower() for f in fences if OTHER in f}
        self._patterns = [
            *_compile(tags, re.IGNORECASE),
            *_compile(headers, re.IGNORECASE if ignore_case else 0),
        ]

    def break_in(self, pieces: Sequence[Piece]) -> tuple[Sequence[Piece], Counter[str]]:
        """Break each fence that an untrusted piece spells or has a part in; return the pieces, and how many, by source.

        A sign of its own stands in a broken fence. All else is as it was.
        """
        attempts: Counter[str] = Counter()
        if not self._patterns or not any(p.source for p in pieces):
            return pieces, attempts
        while breaks := self._find_breaks(pieces):
            attempts.update(pieces[number].source for number, _ in breaks)
            pieces = [
                Piece(self._insert(piece.text, {at for n, at in breaks if n == number}), piece.source)
                for number, piece in enumerate(pieces)
            ]
        return pieces, attempts

    def _find_breaks(self, pieces: Sequence[Piece]) -> set[tuple[int, int]]:
        """Return the places to break at: the number of an untrusted piece, and a position in its text."""
        text = "".join(p.text for p in pieces)
        folded, index = _fold(text)
        starts = [0, *accumulate(len(p.text) for p in pieces)]
        breaks = set()
        for start, end in self._find(folded):
            if index is not None and index[start] == index[end - 1]:
                continue  # one character, which cannot be broken, and is no fence either
            places = range(start, end) if index is None else index[start:end]
            own = "".join(text[at] for at in dict.fromkeys(places) if not pieces[bisect_right(starts, at) - 1].source)
            if "".join(own.split()).lower() in self._skeletons:
                continue  # the template's own, with a name in it
            for position in range(start, end):
                at = position if index is None else index[position]
                number = bisect_right(starts, at) - 1
                if pieces[number].source:  # an empty piece begins where the next one does, which is the last of them
                    breaks.add((number, at - starts[number] + (position == start)))
                    break
        return breaks

    def _find(self, folded: str) -> Iterator[tuple[int, int]]:
        """Yield the spans of fences, overlapping ones too."""
        lines = "\n" + folded  # so that the first line has a start as well
        for pattern in self._patterns:
            at = 0
            while match := pattern.search(lines, at):
                at = match.start() + 1
                yield match.start("fence") - 1, match.end("fence") - 1

    def _insert(self, text: str, places: set[int]) -> str:
        edges = [0, *sorted(places), len(text)]
        return self._replacement.join(text[a:b] for a, b in pairwise(edges))


def _compile(fences: Sequence[str], flags: int) -> list[re.Pattern[str]]:
    """Compile a pattern for fences within lines, and one for those that begin a line; the part ``fence`` is theirs."""
    within = sorted((f for f in fences if f[0] != "\n"), key=len, reverse=True)
    begins = sorted((f for f in fences if f[0] == "\n"), key=len, reverse=True)
    patterns = []
    for chosen, before in ((within, ""), (begins, _LINE_START)):
        if chosen:
            patterns.append(re.compile(f"{before}(?P<fence>{'|'.join(map(_to_pattern, chosen))})", flags))
    return patterns


def _to_pattern(fence: str) -> str:
    """Write a fence as a pattern: a little white space between its words and signs is as good as none."""
    words = re.findall(rf"call\d{{5}}|{OTHER}|\w+|[^\w\s]", fence)
    body = _SPACE.join(_WILD.get(word[:5], re.escape(_fold(word)[0])) for word in words)
    return body + (r"(?=[ \t]*(?:[\n\v\f\r\x85\u2028\u2029]|$))" if fence[-1] == "\n" else "")


def _fold(text: str) -> tuple[str, list[int] | None]:
    """Return the text as the most thorough normalizer makes it, and where each of its characters was, if that differs.

    Compatible forms are decomposed; marks and what is not seen are dropped; sentencepiece's "▁" is a space.
    """
    if not _ODD.search(text):
        return text, None
    folded: list[str] = []
    index: list[int] = []
    at = 0
    for odd in _ODD.finditer(text):
        folded.append(text[at : odd.start()])
        index += range(at, odd.start())
        for position, character in enumerate(odd[0], odd.start()):
            letters = _fold_character(character)
            folded.append(letters)
            index += [position] * len(letters)
        at = odd.end()
    folded.append(text[at:])
    index += range(at, len(text))
    return "".join(folded), index


@lru_cache(1 << 14)
def _fold_character(character: str) -> str:
    if character in "▁\x85\u2028\u2029":
        return " " if character == "▁" else character
    dropped = ("Mn", "Me", "Cf", "Cc", "Cs")
    return "".join(c for c in unicodedata.normalize("NFKD", character) if unicodedata.category(c) not in dropped)
