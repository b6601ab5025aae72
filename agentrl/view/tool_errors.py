"""The errors of tools: the most frequent texts, with numbers and names made alike."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from agentrl.errors import UserError
from agentrl.runs.reader import read_rows
from agentrl.settings.documents import parse_json
from agentrl.types import ERROR_PREFIX, TOOL_ERRORS, find_failed_answers
from agentrl.view.store import Store

_VARYING = re.compile(r"\"[^\"]*\"|'[^']*'|\d+(?:\.\d+)?")
LONGEST = 400  # characters of an answer that are compared


class ToolErrorCount(NamedTuple):
    """The errors of a tool: all, those of the most frequent kind, and one of these."""

    total: int
    alike: int
    example: str


def count_tool_errors(conversations: Iterable[str]) -> dict[str, ToolErrorCount]:
    """Count the errors in conversations (JSON) by tool; ``""`` stands for calls that could not be read."""
    kinds: dict[str, Counter[str]] = {}
    examples: dict[tuple[str, str], str] = {}
    for tool, text in _find_errors(conversations):
        kind = _VARYING.sub("#", text)
        kinds.setdefault(tool, Counter())[kind] += 1
        examples.setdefault((tool, kind), text)
    by_tool = {}
    for tool, counts in kinds.items():
        kind, alike = counts.most_common(1)[0]
        by_tool[tool] = ToolErrorCount(counts.total(), alike, examples[tool, kind])
    return by_tool


def _find_errors(conversations: Iterable[str]) -> Iterator[tuple[str, str]]:
    for text in conversations:
        if ERROR_PREFIX not in text:
            continue
        messages = _parse_messages(text)
        for message, is_error in zip(messages, find_failed_answers(messages, True), strict=True):
            content = message.get("content")
            if is_error and isinstance(content, str):
                yield str(message.get("name") or ""), content.removeprefix(ERROR_PREFIX)[:LONGEST]


def _parse_messages(text: str) -> list[dict[str, Any]]:
    try:
        messages = parse_json(text)
    except ValueError:
        return []
    return [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []


def read_failed_conversations(store: Store, steps: Iterable[int], split: str = "train") -> Iterator[str]:
    """Yield the conversations of some steps in which a call failed, as JSON; of files that can be read."""
    for step in steps:
        with suppress(UserError):
            for _, row in read_rows(store.episode_file(split, step), ["messages", "calls"], {}):
                if any(call["status"] in TOOL_ERRORS for call in row["calls"]):
                    yield row["messages"]
