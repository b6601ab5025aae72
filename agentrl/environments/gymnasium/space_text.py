"""Gymnasium's spaces in words: an observation as text, and a reply as an action."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from agentrl.errors import ContractError, ToolError
from agentrl.types import strip_thoughts

LARGEST = 64  # numbers in an observation
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_MARKED = re.compile(r"\x1b\[[1-9][\d;]*m(.*?)\x1b\[0m")
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")


def describe_observation(space: spaces.Space[Any], value: Any) -> str:
    """Describe an observation in words."""
    match space:
        case spaces.Dict():
            return "\n".join(f"{name}: {describe_observation(part, value[name])}" for name, part in space.items())
        case spaces.Tuple():
            return ", ".join(describe_observation(part, v) for part, v in zip(space.spaces, value, strict=True))
        case spaces.Box():
            return "[" + ", ".join(f"{x:.4g}" for x in np.asarray(value).ravel()) + "]"
        case spaces.MultiDiscrete() | spaces.MultiBinary():
            return "[" + ", ".join(str(x) for x in np.asarray(value).ravel()) + "]"
    return str(value)


def is_describable(space: spaces.Space[Any]) -> bool:
    """Return True if an observation space is text, or up to `LARGEST` numbers."""
    match space:
        case spaces.Dict():
            return all(is_describable(part) for part in space.values())
        case spaces.Tuple():
            return all(is_describable(part) for part in space.spaces)
        case spaces.Text() | spaces.Discrete():
            return True
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return int(np.prod(space.shape)) <= LARGEST
    return False


def check_action_space(space: spaces.Space[Any], name: str, actions: Sequence[str]) -> None:
    """Raise ContractError for an action space that a reply cannot act in."""
    match space:
        case spaces.Discrete():
            if actions and len(actions) != space.n:
                raise ContractError(f"env.actions names {len(actions)} actions; gym:{name} has {space.n}")
        case spaces.Text() | spaces.MultiDiscrete():
            pass
        case _:
            raise ContractError(f"gym:{name} takes {space!s:.80}; a reply can mean a Discrete, MultiDiscrete or Text")


def describe_actions(space: spaces.Space[Any], actions: Sequence[str]) -> str:
    """Describe to the model how to act."""
    match space:
        case spaces.Discrete() if actions:
            listed = ", ".join(f"{space.start + i} ({name})" for i, name in enumerate(actions))
            what = f"one of the actions {listed}"
        case spaces.Discrete():
            what = f"an action, a number from {space.start} to {space.start + space.n - 1}"
        case spaces.MultiDiscrete():
            what = (
                f"{space.nvec.size} numbers, commas between them, each below its own of {space.nvec.ravel().tolist()}"
            )
        case _:
            what = "your text"
    return f"Act by replying with {what}, in \\boxed{{}}."


def parse_action(space: spaces.Space[Any], reply: str, actions: Sequence[str]) -> Any:
    r"""Parse the action of a reply: the text in its last ``\boxed{}``, or all of it.

    Raises:
        ToolError: it is no action, in words for the model.
    """
    text = strip_thoughts(reply)
    text = (_BOX.findall(text) or [text])[-1].strip()
    action: Any = text
    match space:
        case spaces.Discrete():
            names = [name.casefold() for name in actions]
            numbers = [space.start + names.index(text.casefold())] if text.casefold() in names else _numbers(text)
            action = np.int64(numbers[0]) if len(numbers) == 1 else None
        case spaces.MultiDiscrete():
            numbers = _numbers(text)
            wide = np.array(numbers, np.int64)
            whole = wide.size == space.nvec.size and bool((wide == wide.astype(space.dtype)).all())
            action = wide.astype(space.dtype).reshape(space.shape) if whole else None
    if action is None or not space.contains(action):
        raise ToolError(f"{text!r:.80} is no action. {describe_actions(space, actions)}")
    return action


def strip_colours(rendered: Any) -> str:
    """Strip a rendering of a terminal's colours; the text that they mark is put in brackets."""
    text = rendered if isinstance(rendered, str) else "\n".join(map(str, rendered or ()))
    return _COLOUR.sub("", _MARKED.sub(r"[\1]", text)).rstrip()


def _numbers(text: str) -> list[int]:
    """Parse ``[1, 0, 2]``, with or without brackets; an empty list for anything else."""
    parts = text.strip("[]() ").replace(",", " ").split()
    return [int(p) for p in parts] if all(re.fullmatch(r"-?\d{1,18}", p) for p in parts) else []
