"""Call formats: how a model family writes a tool call; siblings of `hermes` are registered by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from agentrl.types import JsonSchema, Reply


class CallFormat(Protocol):
    """A form of tool calls in text.

    A form may have attributes more: ``name``, for verdicts; ``stops``, tokens that end a turn behind a call; ``marks``,
    texts that open a call, which are broken where others write them; and ``owns_thoughts = True`` where its own
    structure says what is a thought (harmony's channels). For all others the renderer cuts the thoughts by the
    template's marks.
    """

    def parse(self, text: str, *, tools: Sequence[JsonSchema] = (), thinking: bool = False) -> Reply:
        """Read one turn of the model; each call has its own verdict, and a bad one spoils no other.

        Args:
            tools: the schemas of the tools that were offered, for forms that write values without their types.
            thinking: the prompt has opened a thought already.
        """
        ...

    def format_call(self, call: Mapping[str, object]) -> str:
        """Write a call, ``{"name": ..., "arguments": {...}}``, as a model of the family does.

        A text in it stands there as it is, or as JSON without ASCII escapes: then what stands around it may hold
        control tokens, and the text may not.
        """
        ...

    def format_instructions(self) -> tuple[str, str]:
        """Return the text before and after the list of tools, for a model whose template knows no such calls."""
        ...


NEEDS: Sequence[str] = ("parse", "format_call", "format_instructions")
