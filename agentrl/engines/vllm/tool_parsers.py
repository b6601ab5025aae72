"""Names of vLLM's parsers of tool calls, by what a chat template writes."""

from __future__ import annotations

from collections.abc import Mapping

MARKS = (  # the first that a template has
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
)


def find_tool_parser(template: str | Mapping[str, str] | None) -> str | None:
    """Name the parser for a chat template; None where the template has no form of its own for calls."""
    text = "\n".join(template.values()) if isinstance(template, Mapping) else template or ""
    return next((parser for mark, parser in MARKS if mark in text), None)
