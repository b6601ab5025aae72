"""The turns that a person types for the model: text, or calls as Python writes them."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from typing import Any

from agentrl.errors import UserError, suggest
from agentrl.renderer.call_formats.hermes import make_call_id
from agentrl.types import JsonSchema, Trajectory

TypedCall = tuple[str, dict[str, Any]]
_JSON_NAMES = {"true": True, "false": False, "null": None}


def parse_calls(line: str, tools: Sequence[JsonSchema]) -> list[TypedCall]:
    """Parse the calls of a line: ``tool(a=1, b="x")``, several with ``;`` between, or ``/call tool {"a": 1}``.

    Empty where the line is text.

    Raises:
        UserError: it is meant as a call, and cannot be read.
    """
    if line.startswith("/call"):
        return [_parse_json_call(line.removeprefix("/call").strip())]
    try:
        statements = ast.parse(line.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _no_calls(line, tools)
    expressions = [s.value if isinstance(s, ast.Expr) else None for s in statements]
    calls = [e for e in expressions if isinstance(e, ast.Call) and isinstance(e.func, ast.Name)]
    if not calls or len(calls) < len(expressions):
        return _no_calls(line, tools)
    return [_parse_call(c, tools) for c in calls]


def build_message(text: str, calls: Sequence[TypedCall]) -> dict[str, Any]:
    """Build an assistant's message as the API has it."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        turn = json.dumps([text, calls])
        message["tool_calls"] = [
            {
                "id": make_call_id(turn, i),
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(given)},
            }
            for i, (name, given) in enumerate(calls)
        ]
    return message


def format_demonstration(trajectory: Trajectory, tools: Sequence[JsonSchema], env: str, split: str) -> str:
    """Format an episode as a line of JSON: ``messages`` and ``tools`` as trainers take them, and its rewards."""
    row = {"messages": trajectory.messages, "tools": list(tools), "env": env, "split": split, "task": trajectory.task}
    return json.dumps(row | {"rewards": dict(trajectory.rewards), "reward": trajectory.reward}, ensure_ascii=False)


def format_signature(tool: JsonSchema) -> str:
    """Format a tool as one calls it: ``price(item: string)``."""
    function = tool["function"]
    required = function["parameters"].get("required", ())
    shown = (
        f"{name}: {_kind(schema)}" + ("" if name in required else f" = {json.dumps(schema.get('default'))}")
        for name, schema in function["parameters"].get("properties", {}).items()
    )
    return f"{function['name']}({', '.join(shown)})"


def _kind(schema: JsonSchema) -> str:
    if "enum" in schema:
        return " | ".join(json.dumps(v) for v in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(_kind(s) for s in schema["anyOf"])
    return str(schema.get("type", "any"))


def _names(tools: Sequence[JsonSchema]) -> list[str]:
    return [t["function"]["name"] for t in tools]


def _no_calls(line: str, tools: Sequence[JsonSchema]) -> list[TypedCall]:
    """Return no calls. Raises UserError if the line begins as a call of a known tool does."""
    name, opened, _ = line.strip().partition("(")
    if opened and name in _names(tools):
        raise UserError(f'{line.strip()!r:.80} is no call: write {name}(a=1, b="x"), or /say before what is text')
    return []


def _parse_json_call(text: str) -> TypedCall:
    name, _, given = text.partition(" ")
    try:
        arguments = json.loads(given) if given.strip() else {}
    except ValueError as error:
        raise UserError(f'the arguments of {name!r} are no JSON: {error}; write /call {name} {{"a": 1}}') from None
    if not name or not isinstance(arguments, dict):
        raise UserError('write /call TOOL {"argument": "value"}: a name, and a JSON object')
    return name, arguments


def _parse_call(call: ast.Call, tools: Sequence[JsonSchema]) -> TypedCall:
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    schema = next((t["function"] for t in tools if t["function"]["name"] == name), None)
    if schema is None:
        hint = suggest(name, _names(tools))
        raise UserError(f"no tool {name!r}{hint} (/call makes the call all the same, /say takes it for text)")
    order = list(schema["parameters"].get("properties", {}))
    if len(call.args) > len(order) or any(isinstance(a, ast.Starred) for a in call.args):
        raise UserError(f"{name} takes {len(order)} arguments: {', '.join(order)}")
    if any(k.arg is None for k in call.keywords):
        raise UserError(f"name each argument of {name}: {', '.join(order)}")
    given = [*zip(order, call.args, strict=False), *((str(k.arg), k.value) for k in call.keywords)]
    return name, {argument: _evaluate(argument, node) for argument, node in given}


def _evaluate(argument: str, node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    try:
        value = ast.literal_eval(node)
        json.dumps(value)
    except (ValueError, TypeError, RecursionError):
        raise UserError(
            f'{argument} must be a plain value, such as 3, "text", true or [1, 2]; not {_shown(node)}'
        ) from None
    return value


def _shown(node: ast.expr) -> str:
    return ast.unparse(node)[:60]
