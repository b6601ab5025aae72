"""The check of tool schemas, which is all that a model is told of its tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from agentrl.checks.finding import Finding, fail, ok, skip, warn
from agentrl.tools.tool import Tool

MAX_TOKENS = 600  # of a tool's schema
CHARS = 4  # a token, roughly


def check_tool_schemas(tools: Sequence[Tool]) -> list[Finding]:
    """Check names, descriptions and lengths of the tools."""
    findings = [f for t in tools for f in _check_schema(t)]
    summary = ", ".join(f"{t.name} (about {_tokens(t)} tokens)" for t in tools)
    if not tools:
        return [skip("tools", "there are none")]
    return findings or [ok("tools", f"each is described, and its arguments: {summary}")]


def _tokens(tool: Tool) -> int:
    return len(json.dumps(tool.schema)) // CHARS


def _check_schema(tool: Tool) -> Iterator[Finding]:
    name = "tools"
    try:
        json.dumps(tool.schema)
    except (TypeError, ValueError) as error:
        yield fail(name, f"the schema of tool {tool.name!r} is no JSON ({error}); it is sent to models as JSON")
        return
    if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", tool.name):
        yield fail(name, f"tool {tool.name!r}: servers take names of 1 to 64 letters, digits, _ and -; rename it")
    if not tool.description.strip():
        yield warn(name, f"tool {tool.name!r} has no description, and the model knows its name only: write a docstring")
    for argument, schema in tool.parameters.get("properties", {}).items():
        if not str(schema.get("description") or "").strip():
            way_out = f"write `{argument}: ...` under Args: in the docstring"
            yield warn(name, f"argument {argument!r} of tool {tool.name!r} has no description; {way_out}")
    if (tokens := _tokens(tool)) > MAX_TOKENS:
        way_out = "every prompt carries it; shorten it, or split the tool"
        yield warn(name, f"the schema of tool {tool.name!r} is about {tokens} tokens, over {MAX_TOKENS}: {way_out}")
