"""The Gymnasium spaces of our observations and actions: messages, and text of any alphabet."""

from __future__ import annotations

import string
from typing import Any

import gymnasium

from agentrl.environments.validation import ROLES
from agentrl.types import Message

_LETTERS = string.ascii_letters + string.digits + string.punctuation + " "


class MessageSpace(gymnasium.Space[list[Message]]):
    """The messages of the environment since the last action."""

    is_np_flattenable = False

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) or (isinstance(x, list) and all(_is_message(m) for m in x))

    def sample(self, mask: Any = None, probability: Any = None) -> list[Message]:
        return [{"role": "user", "content": _text(self)}]


class TextSpace(gymnasium.Space[str]):
    """Any text: a turn of the model, tool calls included."""

    is_np_flattenable = False

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return _text(self)


def _is_message(part: Any) -> bool:
    return isinstance(part, dict) and part.get("role") in ROLES and isinstance(part.get("content"), str)


def _text(space: gymnasium.Space[Any]) -> str:
    drawn = space.np_random.integers(len(_LETTERS), size=int(space.np_random.integers(1, 33)))
    return "".join(_LETTERS[i] for i in drawn)
