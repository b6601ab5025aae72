"""The renderer's contract: messages to tokens and back. ``template`` follows any model's own chat template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from agentrl.types import JsonSchema, Message, Reply


class Renderer(Protocol):
    """Turns messages into token ids. The method names are those of the ``renderers`` package."""

    injection_attempts: Counter[str]  # attempts of untrusted text to spell a control token, by tool name or role

    def render_ids(self, messages: Sequence[Message], *, tools: Sequence[JsonSchema] = ()) -> list[int]:
        """Render the first prompt, ready for the model's turn."""
        ...

    def bridge_to_next_turn(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonSchema] = (),
    ) -> list[int]:
        """Render the next prompt: ``prompt_ids + completion_ids`` to the token, then ``messages``."""
        ...

    def parse_response(self, token_ids: Sequence[int], *, prompt_ids: Sequence[int] | None = None) -> Reply:
        """Read one turn. Where the prompt opened a thought, the reply's content begins with what opened it."""
        ...

    def get_stop_token_ids(self) -> list[int]: ...
