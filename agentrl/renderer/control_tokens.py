"""Text that somebody else wrote becomes tokens without ever becoming structure.

A tokenizer turns the *text* ``<|im_end|>`` into the control token, and ``<think>`` or ``</tool_response>`` too, which
are added but not marked special. Here text is cut inside every added token that touches an untrusted
character, until none is left; text without any keeps its canonical tokenisation. The check is on the outcome (ids
and offsets), so that normalisers, look-alikes and stripping tokens cannot get past it.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Span = tuple[int, int, str]  # start, end, source


class Piece(NamedTuple):
    """A text and its author: ``source`` is empty for the template, else a tool's name or a role."""

    text: str
    source: str = ""


def find_structural_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the ids of added tokens, by text, without those of white space alone, which mean nothing (Gemma's)."""
    added = tokenizer.added_tokens_decoder.items()
    return {token.content: i for i, token in added if token.content.strip("▁" + string.whitespace)}


class SafeEncoder:
    """Encodes pieces of trusted and untrusted text as one text.

    ``replacement`` is a character that is text in this tokenizer; ``ignores_case``: it lowers letters.

    Args:
        tokenizer: a fast transformers tokenizer.
        anchor: an added token that stands in front of what is no beginning, so that no prefix space is put there.
    """

    def __init__(self, tokenizer: Any, anchor: str) -> None:
        self._backend = tokenizer.backend_tokenizer
        # "Unknown" carries no structure where every rare character gives it.
        self.added_ids = set(find_structural_tokens(tokenizer).values()) - set(self._raw(chr(0xE123)).ids)
        self.replacement = next(c for c in (REPLACEMENT, "?", "_") if self._count(self._raw(c).ids) == 0)
        self.ignores_case = self._raw("A").ids == self._raw("a").ids
        after = "".join(self._raw(anchor + "a").tokens[1:])
        token = next(t for t in tokenizer.added_tokens_decoder.values() if t.content == anchor)
        self._anchor = anchor
        # In the middle of a text: some tokenizers put a space after every added token, some tokens eat the one there.
        self._middle = anchor + self.replacement if token.rstrip or after.startswith("▁") else anchor
        self._prefix_ids = {p: self._raw(p).ids for p in ("", self._anchor, self._middle)}
        self._own = lru_cache(4096)(lambda text: self._count(self._tokens(text, self._middle)[0]))

    def encode(self, pieces: Sequence[Piece], *, beginning: bool) -> tuple[list[int], Counter[str]]:
        """Encode the joined pieces; return the ids, and the control tokens that untrusted text spells, by source."""
        prefix = "" if beginning else self._anchor
        pieces = _joined(pieces)
        text, spans = "".join(p.text for p in pieces), _spans(pieces)
        attempts: Counter[str] = Counter()
        ids = self._encode(text, 0, spans, prefix, attempts)
        if self._count(ids) != sum(self._own(p.text) for p in pieces if not p.source):
            ids, attempts = [], Counter()  # a neighbour spoiled a token of the template: keep them apart
            for p in pieces:
                ids += self._encode(p.text, 0, [(0, len(p.text), p.source)] if p.source else [], prefix, attempts)
                prefix = self._middle
        return ids, attempts

    def _encode(self, text: str, base: int, spans: Sequence[Span], prefix: str, attempts: Counter[str]) -> list[int]:
        ids, offsets = self._tokens(text, prefix)
        cuts: list[int] = []
        characters = list(text) if offsets else []
        for start, end in (_trimmed(text, *offset) for offset in offsets):
            author = next((s for a, b, s in spans if a < base + end and base + start < b), "")
            if author:
                attempts[author] += 1
                if end - start > 1:
                    cuts.append(start + 1)
                else:
                    characters[start] = self.replacement  # one character cannot be cut
        cleaned = "".join(characters)
        if not cuts and cleaned in ("", text):
            return ids
        edges = [0, *cuts, len(text)]
        return [
            token
            for a, b in pairwise(edges)
            for token in self._encode(cleaned[a:b], base + a, spans, self._middle if a else prefix, attempts)
        ]

    def _tokens(self, text: str, prefix: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids, and the offsets in the text of those that are added tokens."""
        encoding = self._raw(prefix + text)
        ids, skip, shift = encoding.ids, len(self._prefix_ids[prefix]), len(prefix)
        if ids[:skip] != self._prefix_ids[prefix]:  # prefix and text grew together
            return self._tokens(text, "")
        if skip:
            ids = ids[skip:]
        if self.added_ids.isdisjoint(ids):
            return ids, []
        added = [o for i, o in zip(ids, encoding.offsets[skip:], strict=True) if i in self.added_ids]
        return ids, [(max(a - shift, 0), b - shift) for a, b in added]

    def _count(self, ids: Sequence[int]) -> int:
        return sum(i in self.added_ids for i in ids)

    def _raw(self, text: str) -> Any:
        """Encode with the backend, after undoing settings of its last user that lose text or structure."""
        backend = self._backend
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if backend.encode_special_tokens:
            backend.encode_special_tokens = False
        return backend.encode(text, add_special_tokens=False)


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Trim a span of the white space that a stripping token takes; its author does not matter."""
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Drop empty pieces, and join neighbours of one source."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].source == piece.source:
            joined[-1] = Piece(joined[-1].text + piece.text, piece.source)
        elif piece.text:
            joined.append(piece)
    return [Piece(_encodable(p.text), p.source) for p in joined]


def _spans(pieces: Sequence[Piece]) -> list[Span]:
    """Return the spans of the untrusted pieces in the joined text."""
    spans, at = [], 0
    for piece in pieces:
        if piece.source:
            spans.append((at, at + len(piece.text), piece.source))
        at += len(piece.text)
    return spans


def _encodable(text: str) -> str:
    """Replace lone surrogates, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
