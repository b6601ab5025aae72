"""The spans of a reply, in tokens of its turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tokenizers.decoders import DecodeStream

from agentrl.types import Reply, Span


def place_reply(reply: Reply, text: str, token_ids: Sequence[int], backend: Any) -> Reply:
    """Return a reply whose spans, in characters of the turn, are spans in its tokens; none where that is not known.

    Args:
        text: of the whole turn.
        backend: the tokenizer of ``tokenizers``.
    """
    spans = [*reply.thought_spans, *reply.text_spans, *(c.span for c in reply.tool_calls if c.span)]
    if not spans:
        return reply
    places = _place_characters(backend, token_ids)
    if not places or len(places) != len(text):
        calls = tuple(replace(c, span=None) for c in reply.tool_calls)
        return replace(reply, tool_calls=calls, thought_spans=(), text_spans=())

    def convert(span: Span) -> Span:
        start, end = span
        at = places[start][0] if start < len(places) else len(token_ids)
        return (at, places[end - 1][1] + 1 if end > start else at)

    return replace(
        reply,
        tool_calls=tuple(replace(c, span=c.span and convert(c.span)) for c in reply.tool_calls),
        thought_spans=tuple(map(convert, reply.thought_spans)),
        text_spans=tuple(map(convert, reply.text_spans)),
    )


def _place_characters(backend: Any, token_ids: Sequence[int]) -> list[Span]:
    """Return, for each character of a decoded turn, the first and the last of the tokens that it is spread over."""
    stream, places, first = DecodeStream(skip_special_tokens=False), list[Span](), 0
    for at, i in enumerate(token_ids):
        if decoded := stream.step(backend, i):
            places += [(first, at)] * len(decoded)
            first = at + 1
    return places
