"""The reader of tool calls that a vLLM server takes: agentrl's own, where the model's template writes calls."""

from __future__ import annotations

from typing import Any

from agentrl.errors import UserError
from agentrl.renderer.template import TemplateRenderer

OWN = "agentrl"  # its name in vLLM
PLUGIN = "agentrl.engines.vllm.tool_parser_plugin"


def find_tool_parser(tokenizer: Any) -> str | None:
    """Name the parser for a model's tokenizer; None where its chat template has no form of its own for calls."""
    try:
        return OWN if TemplateRenderer(tokenizer).takes_tools else None
    except UserError:  # no template, or one that cannot be followed
        return None
