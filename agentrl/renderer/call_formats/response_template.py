"""The form that a tokenizer's ``response_template`` describes, in patterns for transformers' ``parse_response``.

It tells how calls are read and not how they are written. So it serves where the chat template shows tools and writes
calls, in a form that cannot be learnt. Thoughts are the renderer's, as with other forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import TemplateError
from agentrl.renderer.call_formats.hermes import make_call_id
from agentrl.types import JsonSchema, Reply, Span, ToolCall

_FAULTS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # of a region, and what it is made of


class ResponseTemplateFormat:
    """The call format of a ``response_template``.

    Args:
        template: the tokenizer's.

    Raises:
        ValueError: it is none, or does not say where a call begins.
    """

    name = "the tokenizer's response_template"

    def __init__(self, template: Mapping[str, Any]) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self._template = load_response_template(dict(template))
        calls = self._template.fields.get("tool_calls")
        if calls is None or calls.open_re is None:
            raise ValueError("it does not say where a call begins")
        self._opening, self._closing = calls.open_re, calls.close_re

    def parse(self, text: str, *, tools: Sequence[JsonSchema] = (), thinking: bool = False) -> Reply:
        """Read one turn, each region of calls for itself, so that a bad one spoils no other."""
        calls, said, at = list[ToolCall](), list[str](), 0
        while opened := self._opening.search(text, at):
            said.append(text[at : opened.start()])
            closed = self._closing.search(text, opened.end()) if self._closing is not None else None
            at = max(closed.end() if closed else len(text), opened.start() + 1)
            is_closed = closed is not None or self._closing is None
            calls += self._read_region(text, (opened.start(), at), tools, len(calls), is_closed=is_closed)
        return Reply("".join([*said, text[at:]]).strip(), tuple(calls))

    def format_call(self, call: Mapping[str, object]) -> str:
        """Raise TemplateError: a ``response_template`` does not say how a call is written."""
        raise TemplateError("the tokenizer's response_template says how a call is read, and not how it is written")

    def format_instructions(self) -> tuple[str, str]:
        """Return the text before and after the list of tools."""
        return "# Tools\nThe tools, as JSON schemas, one a line:\n", ""

    def _read_region(
        self, text: str, span: Span, tools: Sequence[JsonSchema], number: int, *, is_closed: bool
    ) -> list[ToolCall]:
        """Read a region, which holds one call or a list of them."""
        from transformers.utils.chat_parsing import parse_response

        def refuse(why: str, kind: str = "invalid", name: str = "") -> ToolCall:
            return ToolCall(make_call_id(text, number), name, error=why, kind=kind, span=span)

        if not is_closed:
            return [refuse("the tool call was not closed", "unclosed")]
        try:
            found = parse_response(text[slice(*span)], self._template, prefix="", tools=list(tools))["tool_calls"]
            functions = [c["function"] for item in found for c in (item if isinstance(item, list) else [item])]
            read = [(f["name"], f.get("arguments", {})) for f in functions]
        except _FAULTS as error:
            return [refuse(f"the tool call cannot be read: {' '.join(str(error).split())[:200]}")]
        calls: list[ToolCall] = []
        for at, (name, arguments) in enumerate(read):
            if not isinstance(name, str) or not name:
                calls.append(refuse("a tool call must have a name"))
            elif not isinstance(arguments, dict):
                calls.append(refuse("the arguments of a tool call must be an object", name=name))
            else:  # a list of calls has one place
                calls.append(ToolCall(make_call_id(text, number + at), name, arguments, span=None if at else span))
        return calls
