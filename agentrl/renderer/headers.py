"""Headers: what a template writes in a turn round the model's own words, and the model samples: ``to=user<|message|>``.

They are read off turns that the template writes: what is left of one beside its thought, its text and its calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from agentrl.errors import TemplateError
from agentrl.renderer.placeholders import Rendering
from agentrl.renderer.probe_turns import (
    PROBE_TOOL,
    REPLY,
    REPLY_TEXT,
    USER_TURN,
    Render,
    make_probe_call,
    make_probe_result,
)
from agentrl.types import Reply

Read = Callable[[str, str], Reply]  # a turn, and the prompt before it
Think = Callable[[Rendering], Rendering]  # puts a thought into a message

_NAME = "probe"


@dataclass(frozen=True, slots=True)
class Headers:
    """The headers before a text or a call, and what stands behind one."""

    before: re.Pattern[str] | None = None
    behind: tuple[str, ...] = ()

    def cut(self, text: str) -> str:
        """Return what was said without them, with the white space round it."""
        if self.before and (match := self.before.match(text)):
            text = text[match.end() :]
        for tail in self.behind:
            if text.rstrip().endswith(tail):
                return text[: text.rindex(tail)]
        return text


def learn_headers(render: Render, read: Read, think: Think | None) -> Headers:
    """Learn the headers of a template, behind a user's turn and behind a result.

    Args:
        read: reads a turn as if there were none.
        think: None where the template takes no thoughts.
    """
    before, behind = dict[str, None](), dict[str, None]()
    for said in _list_leftovers(render, read, think):
        head, found, tail = said.partition(REPLY_TEXT)
        before[head.strip()] = None
        if found:
            behind[tail.strip()] = None
    patterns = [re.escape(h).replace(_NAME, r"[\w.-]+") for h in sorted(before, key=len, reverse=True) if h]
    joined = re.compile(rf"\s*(?:{'|'.join(patterns)})\s*") if patterns else None
    return Headers(joined, tuple(tail for tail in behind if tail))


def _list_leftovers(render: Render, read: Read, think: Think | None) -> Iterator[str]:
    call, other = (make_probe_call(_NAME, {"a": "b"}, index) for index in (0, 1))
    asked: list[Rendering] = [USER_TURN]
    answered = [USER_TURN, REPLY | {"content": "", "tool_calls": [call]}, make_probe_result(0)]
    turns: list[Rendering] = [REPLY, *(REPLY | {"tool_calls": calls} for calls in ([call], [call, other]))]
    turns += [turn | {"content": ""} for turn in turns[1:]]
    for history in (asked, answered):
        for turn in turns:
            for own in (turn, think(turn)) if think else (turn,):
                try:
                    yield _read_leftover(render, read, history, own)
                except TemplateError:
                    continue  # it takes no such turn


def _read_leftover(render: Render, read: Read, history: list[Rendering], turn: Rendering) -> str:
    """Read a turn that the template writes; return what is left beside its thought and its calls."""
    tools: Any = [PROBE_TOOL]
    prompt, written = render(history, tools, prompt=True), render([*history, turn], tools)
    if not written.startswith(prompt):
        return ""  # it opens a thought, which such a turn has not
    reply = read(written[len(prompt) :], prompt)
    return "" if any(call.error for call in reply.tool_calls) else reply.text
