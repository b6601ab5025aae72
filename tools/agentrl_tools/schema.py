"""A JSON schema as the check of a tool's arguments, in words for the model.

A schema may come from a stranger: a pattern or a reference to itself can keep its check busy for ever. One that cannot
is checked where it stands; any other in a worker process that ends at a limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import jsonschema
import referencing.exceptions
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry

from agentrl.errors import UserError
from agentrl.runtime.processes import WorkerDied, call_in_process
from agentrl.types import JsonSchema

MAX_CHARS = 200  # of what is wrong with one argument: jsonschema repeats the value
MAX_PROBLEMS = 20
MAX_SCHEMA_CHARS, MAX_DEPTH = 64_000, 64
INLINE_CHARS = 4_000  # of a schema that is read where it stands
INLINE_NODES = 5_000  # of a schema with its references written out, which is checked where it stands
CHECK_S, CHECK_MEMORY = 5.0, 512 << 20  # of processor time; twice that by the clock
# Keywords whose check may take longer than the schema and the value are long.
_COSTLY = {
    "patternProperties",
    "uniqueItems",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
}
_NAMING = ("$id", "id", "$anchor", "$dynamicAnchor")  # of a text: what references may mean
_BRANCHING = ("allOf", "anyOf", "oneOf", "not", "if", "contains", "dependentSchemas", "dependencies")
BRANCH_NODES = 50  # that each branch counts for: of one that does not fit, the whole value is in an error

Problems = list[tuple[str, str]]


def build_argument_check(schema: JsonSchema, what: str) -> Callable[[Mapping[str, Any]], Any]:
    """Build the check of arguments by a schema; one that may be costly is a coroutine function.

    Raises:
        UserError: it is no schema, or a huge one; the sentence begins with ``what``.
    """
    _check_size(schema, what)
    return _build_check(schema, json.dumps(schema), describe_schema_error(json.dumps(schema)), what)


async def build_check_off_loop(schema: JsonSchema, what: str) -> Callable[[Mapping[str, Any]], Any]:
    """Build the check as `build_argument_check` does; a long schema is read in a worker process."""
    _check_size(schema, what)
    text = json.dumps(schema)
    if len(text) <= INLINE_CHARS:
        return _build_check(schema, text, describe_schema_error(text), what)
    try:
        error = await call_in_process(
            describe_schema_error,
            text,
            timeout_s=2 * CHECK_S,
            cpu_s=CHECK_S,
            memory_bytes=CHECK_MEMORY,
            reads_others=True,
        )
    except (TimeoutError, WorkerDied, MemoryError):
        error = f"it takes over {CHECK_S:g} s to read"
    return _build_check(schema, text, error, what)


def describe_schema_error(schema: str) -> str | None:
    """Describe what is wrong with a schema, given as JSON; None where it is one."""
    parsed = json.loads(schema)
    kind = validator_for(parsed, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(parsed, format_checker=jsonschema.FormatChecker(formats=()))  # patterns are of any language
    except jsonschema.SchemaError as error:
        return f"{error.message:.{MAX_CHARS}}"
    return None


def _build_check(schema: JsonSchema, text: str, error: str | None, what: str) -> Callable[[Mapping[str, Any]], Any]:
    if error is not None:
        raise UserError(f"{what}: its schema is no JSON schema: {error}")
    if _count_nodes(schema) > INLINE_NODES:
        return _WorkerCheck(text)
    return lambda arguments: _find(text, dict(arguments))


def _check_size(schema: JsonSchema, what: str) -> None:
    layer, depth, chars = [schema], 0, 0
    while layer:
        depth += 1
        inner: list[Any] = []
        for value in layer:
            chars += 2 + (len(value) if isinstance(value, str) else 0)
            if isinstance(value, Mapping):
                chars += sum(len(str(key)) for key in value)
            inner += value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        if depth > MAX_DEPTH:
            raise UserError(f"{what}: its schema is nested deeper than {MAX_DEPTH} levels: leave it out (only=...)")
        if chars > MAX_SCHEMA_CHARS:
            raise UserError(f"{what}: its schema has over {MAX_SCHEMA_CHARS:,} characters: leave it out (only=...)")
        layer = inner


def _count_nodes(schema: JsonSchema) -> float:
    """Count the parts of a schema with its references written out; infinitely many where its check may not end."""
    known: dict[str, float] = {}

    def count(node: Any) -> float:
        if isinstance(node, list):
            return 1 + sum(count(one) for one in node)
        if not isinstance(node, dict):
            return 1
        named = any(isinstance(node.get(name), str) for name in _NAMING)
        if named or not _COSTLY.isdisjoint(node) or not _is_linear(node.get("pattern", "^")):
            return float("inf")
        total = 1 + sum(count(value) for key, value in node.items() if key not in ("$ref", "$defs", "definitions"))
        branches = sum(len(node[key]) if isinstance(node[key], list | dict) else 1 for key in _BRANCHING if key in node)
        return total + BRANCH_NODES * branches + (count_reference(node["$ref"]) if "$ref" in node else 0)

    def count_reference(reference: object) -> float:
        if not isinstance(reference, str) or not reference.startswith("#"):
            return 1  # to elsewhere, where nothing is fetched
        if reference not in known:
            known[reference] = float("inf")  # while it is counted, and if it leads back here
            part = _find_part(schema, reference) if reference == "#" or reference.startswith("#/") else None
            known[reference] = float("inf") if part is None else count(part)
        return known[reference]

    return count(schema)


def _is_linear(pattern: object) -> bool:
    """Return True if a pattern is found, or not, in one pass: anchored, no group, and one part at most that repeats."""
    if not isinstance(pattern, str):
        return True  # the name of an argument
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return True  # of another language: it is not checked
    repeats = len(re.findall(r"[*+?]|\{\d*,", pattern))
    return pattern.startswith("^") and "(" not in pattern and "|" not in pattern and repeats <= 1


def _find_part(schema: JsonSchema, reference: str) -> JsonSchema | None:
    """Return the schema within a schema that a reference means; None where that takes more than names to tell."""
    found: Any = schema
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return found if isinstance(found, dict) else None


class _WorkerCheck:
    """A check in a worker process. Once it was not done in time it is left to the server, which has the last word."""

    def __init__(self, schema: str) -> None:
        self._schema, self._given_up = schema, False

    async def __call__(self, arguments: Mapping[str, Any]) -> Problems:
        if self._given_up:
            return []
        try:
            return await call_in_process(
                find_problems,
                self._schema,
                json.dumps(arguments),
                timeout_s=2 * CHECK_S,
                cpu_s=CHECK_S,
                memory_bytes=CHECK_MEMORY,
                reads_others=True,
            )
        except RecursionError:  # the arguments', which the server may read
            return []
        except (TimeoutError, WorkerDied, MemoryError):
            self._given_up = True
            return []


def find_problems(schema: str, arguments: str) -> Problems:
    """Return what is wrong with a call's arguments by a schema, as (where, what); both are JSON."""
    return _find(schema, json.loads(arguments))


def _find(schema: str, arguments: dict[str, Any]) -> Problems:
    found: Problems = []
    try:
        for error in _make_validator(schema).iter_errors(arguments):
            found += _words(error)
            if len(found) >= MAX_PROBLEMS:
                break
    except (referencing.exceptions.Unresolvable, re.error, RecursionError, ArithmeticError, ValueError, TypeError):
        # A reference to elsewhere or itself, a pattern of another language, a number that is none: the server's to say.
        return []
    return list(dict.fromkeys(found))


@lru_cache(maxsize=256)
def _make_validator(schema: str) -> Validator:
    parsed = json.loads(schema)
    made: Validator = validator_for(parsed, default=jsonschema.Draft202012Validator)(parsed, registry=Registry())
    return made  # whose registry fetches nothing


def _words(error: jsonschema.ValidationError) -> Iterator[tuple[str, str]]:
    path = [str(p) for p in error.absolute_path]
    if error.validator == "required":
        for name in error.validator_value:
            if name not in error.instance:
                yield ".".join([*path, name]), "field required"
    elif error.validator == "additionalProperties" and error.validator_value is False:
        known = error.schema.get("properties", {})
        for name in error.instance:
            if name not in known:
                yield ".".join([*path, name]), f"not an argument; known: {', '.join(known) or 'none'}"
    else:
        yield ".".join(path) or "arguments", f"{error.message:.{MAX_CHARS}}"
