"""The renderer's contract: messages to tokens and back. ``template`` follows any model's own chat template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from agentrl.renderer.history import NewContext
from agentrl.types import JsonSchema, Message, Reply


class Renderer(Protocol):
    """Turns messages into token ids. The method names are those of the ``renderers`` package."""

    injection_attempts: Counter[str]  # attempts of untrusted text to spell structure, by tool name or role

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

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] | None = None,
        tools: Sequence[JsonSchema] = (),
        stop: Sequence[str] = (),
    ) -> Reply:
        """Read one turn. Where the prompt opened a thought, the reply's content begins with what opened it.

        Args:
            stop: strings of which the first in the turn's text ends it: what stands before it is read.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of some of a turn's tokens, in which stop strings are looked for."""
        ...

    def with_words(self, words: Mapping[str, Any]) -> Renderer:
        """Return the renderer of an episode whose environment has values for words of the chat template.

        Raises:
            UserError: the template reads no such word.
        """
        ...

    def get_stop_token_ids(self) -> list[int]: ...


@runtime_checkable
class AppendingRenderer(Protocol):
    """A renderer that renders what stands behind a turn by itself, at a cost that does not grow with the context."""

    def render_appended(
        self, completion_ids: Sequence[int], messages: Sequence[Message], *, tools: Sequence[JsonSchema] = ()
    ) -> list[int]:
        """Render what `Renderer.bridge_to_next_turn` puts behind the prompt and the completion."""
        ...


@runtime_checkable
class HistoryRewriter(Protocol):
    """A renderer that may render a conversation anew, where its template writes earlier turns otherwise."""

    def rewrite_history(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        history: Sequence[Message],
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonSchema] = (),
    ) -> NewContext | None:
        """Render the conversation anew, where its history is to be otherwise than in the context; else return None.

        Args:
            history: the messages up to the completion's.
            messages: those behind it.
        """
        ...
