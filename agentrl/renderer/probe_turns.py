"""Short turns that a template is rendered with, to read off what it writes around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from agentrl.renderer.placeholders import Rendering
from agentrl.types import JsonSchema

REPLY_TEXT = "qzsaidq"  # letters pass every filter of a template unchanged
USER_TURN: Rendering = {"role": "user", "content": "q"}
REPLY: Rendering = {"role": "assistant", "content": REPLY_TEXT}
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
PROBE_TOOL = {"type": "function", "function": {"name": "probe", "description": "d", "parameters": _PARAMETERS}}


class Render(Protocol):
    """Renders turns by a template, with tools; ``prompt`` opens the model's next turn."""

    def __call__(
        self, messages: Sequence[Rendering], tools: Sequence[JsonSchema] = (), *, prompt: bool = False
    ) -> str: ...


def make_probe_call(name: str, arguments: dict[str, Any], index: int = 0) -> Rendering:
    """Make a call as messages have it."""
    return {"id": f"call{index:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def make_probe_result(index: int) -> Rendering:
    """Make the result of the call of that index."""
    return {"role": "tool", "content": "r", "tool_call_id": f"call{index:05d}", "name": "probe"}
