"""What a model wrote where a call could not be read: the text of its own tokens."""

from __future__ import annotations

import re

OPEN = "<tool_call>"
_CALL = re.compile(rf"{OPEN}(?:(?!{OPEN}).)*?(?:</tool_call>|(?={OPEN})|\Z)", re.S)
LONGEST = 4_000  # characters


def split_calls(turn: str, count: int) -> list[str]:
    """Return the text of each of a turn's ``count`` calls; the whole turn for each where they cannot be told apart.

    Args:
        turn: the text of all tokens of the turn, special ones too.
    """
    thought = turn.rfind("</think>")
    calls = _CALL.findall(turn, max(thought, 0))
    return [text.strip() for text in (calls if len(calls) == count else [turn] * count)]
