"""What tools said when they refused: the most frequent texts, with numbers and names made alike."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.types import REFUSAL, refused_answers
from agentrl.view.store import Store

_VARYING = re.compile(r"\"[^\"]*\"|'[^']*'|\d+(?:\.\d+)?")
LONGEST = 400  # characters of a refusal that are compared


class Refusals(NamedTuple):
    """How many refusals of a tool there were, and of the most frequent kind how many, and one of them."""

    total: int
    alike: int
    example: str


def refusals(conversations: Iterable[str]) -> dict[str, Refusals]:
    """By tool; of conversations as JSON. A call that could not be read has the tool ``""``."""
    kinds: dict[str, Counter[str]] = {}
    examples: dict[tuple[str, str], str] = {}
    for tool, text in _said(conversations):
        kind = _VARYING.sub("#", text)
        kinds.setdefault(tool, Counter())[kind] += 1
        examples.setdefault((tool, kind), text)
    found = {}
    for tool, counts in kinds.items():
        kind, alike = counts.most_common(1)[0]
        found[tool] = Refusals(counts.total(), alike, examples[tool, kind])
    return found


def _said(conversations: Iterable[str]) -> Iterator[tuple[str, str]]:
    for text in conversations:
        if REFUSAL not in text:
            continue
        messages = _messages(text)
        for message, refusal in zip(messages, refused_answers(messages, True), strict=True):
            content = message.get("content")
            if refusal and isinstance(content, str):
                yield str(message.get("name") or ""), content.removeprefix(REFUSAL)[:LONGEST]


def _messages(text: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(text)
    except ValueError:
        return []
    return [m for m in found if isinstance(m, dict)] if isinstance(found, list) else []


def conversations(store: Store, steps: Iterable[int], split: str = "train") -> Iterator[str]:
    """Yield the conversations of some steps in which a call was refused, as JSON; of files that can be read."""
    for step in steps:
        try:
            table = pq.read_table(store.file_of(split, step), columns=["messages", "calls"])
        except (OSError, pa.ArrowException):
            continue
        for text, calls in zip(table["messages"].to_pylist(), table["calls"].to_pylist(), strict=True):
            if text and any(call["status"] == "refused" for call in calls or ()):
                yield text
