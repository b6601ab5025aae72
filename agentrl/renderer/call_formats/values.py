"""Values of arguments in text: JSON, literals as Python and others write them, and bare text typed by a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from agentrl.types import JsonSchema

_DEEPEST = 64  # levels of a literal
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_WORD = re.compile(r"(?:true|True|false|False|null|None)\b")
_NUMBER = re.compile(r"-?\d+(?P<fraction>(?:\.\d+)?(?:[eE][+-]?\d+)?)")
_BARE_KEY = re.compile(r"[^\s:,{}\[\]\"'<>|]+")
_QUOTED = {q: re.compile(rf"{q}((?:[^{q}\\]|\\.)*){q}", re.S) for q in ("'", '"')}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|\n|.)", re.S)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_SPACE = re.compile(r"\s*")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_LENIENT = json.JSONDecoder(parse_constant=_refuse_constant, strict=False)  # takes a line break inside a string


def scan_json(text: str, at: int) -> tuple[Any, int]:
    """Read the JSON value at a position; return it and its end. Raises ValueError.

    A line break inside a string, which JSON spells ``\\n``, is read as it stands.
    """
    try:
        try:
            return _DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            if not error.msg.startswith("Invalid control character"):
                raise
            return _LENIENT.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {max(error.pos - at, 0)}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def scan_literal(text: str, at: int, quote: str = "", depth: int = 0) -> tuple[Any, int]:
    """Read the literal at a position; return it and its end. Raises ValueError.

    It may be JSON or Python's, and its keys need no quotes. Texts stand between single or double quotes.

    Args:
        quote: another mark that texts stand between, inside which nothing is escaped: Gemma's ``<|"|>``.
    """
    if depth > _DEEPEST:
        raise ValueError("nested too deeply")
    if quote and text.startswith(quote, at):
        end = text.find(quote, at + len(quote))
        if end < 0:
            raise ValueError("a text is not closed")
        return text[at + len(quote) : end], end + len(quote)
    start = text[at : at + 1]
    if start and start in "{[(":
        return _scan_collection(text, at, quote, depth)
    if start in _QUOTED:
        return _scan_quoted(text, at)
    if word := _WORD.match(text, at):
        return _WORDS[word[0]], word.end()
    if number := _NUMBER.match(text, at):
        return (float if number["fraction"] else int)(number[0]), number.end()
    raise ValueError(f"expected a value instead of {text[at : at + 12]!r}")


def _scan_quoted(text: str, at: int) -> tuple[str, int]:
    quoted = _QUOTED[text[at]].match(text, at)
    if quoted is None:
        raise ValueError("a text is not closed")
    unescaped = _ESCAPE.sub(_unescape, quoted[1])
    if any("\ud800" <= c <= "\udfff" for c in unescaped):  # halves of a pair, as JSON spells what is beyond 16 bits
        unescaped = unescaped.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return unescaped, quoted.end()


def _unescape(escape: re.Match[str]) -> str:
    what = escape[1]
    if what[0] in "uUx" and len(what) > 1:
        code = int(what[1:], 16)
        return chr(code) if code <= 0x10FFFF else escape[0]
    return _ESCAPES.get(what, what if what in "'\"\\/" else escape[0])


def _scan_collection(text: str, at: int, quote: str, depth: int) -> tuple[Any, int]:
    is_object, closing = text[at] == "{", {"{": "}", "[": "]", "(": ")"}[text[at]]
    pairs: dict[str, Any] = {}
    items: list[Any] = []
    at = _skip_space(text, at + 1)
    while not text.startswith(closing, at):
        if is_object:
            key, at = _scan_key(text, at, quote)
            at = _skip_space(text, at)
            if not text.startswith(":", at):
                raise ValueError("expected ':' behind a key")
            pairs[key], at = scan_literal(text, _skip_space(text, at + 1), quote, depth + 1)
        else:
            item, at = scan_literal(text, at, quote, depth + 1)
            items.append(item)
        at = _skip_space(text, at)
        if text.startswith(",", at):
            at = _skip_space(text, at + 1)
        elif not text.startswith(closing, at):
            raise ValueError(f"expected ',' or {closing!r}")
    return pairs if is_object else items, at + 1


def _scan_key(text: str, at: int, quote: str) -> tuple[str, int]:
    if bare := _BARE_KEY.match(text, at):
        return bare[0], bare.end()
    key, end = scan_literal(text, at, quote, _DEEPEST)
    return str(key), end


def _skip_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def read_typed(text: str, schema: JsonSchema, whole: JsonSchema) -> Any:
    """Read a bare text as its schema says: a string stays one, a number, a truth value, null, a list, an object.

    What the schema does not allow stays text, so that whoever checks the arguments says what is wrong with it.

    Args:
        schema: of the argument.
        whole: the tool's, for references.
    """
    types = set(_list_types(schema, whole, 0))
    if types == {"string"}:
        return text
    try:
        value = _read_value(text.strip())
    except ValueError:
        return text
    return value if not types or _name_type(value) & types else text


def _read_value(text: str) -> Any:
    for scan in (scan_json, scan_literal):
        try:
            value, end = scan(text, 0)
        except ValueError:
            continue
        if end == len(text):
            return value
    raise ValueError("no value")


def _name_type(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    return {"string"} if isinstance(value, str) else {"array"} if isinstance(value, list) else {"object"}


def _list_types(schema: JsonSchema, whole: JsonSchema, depth: int) -> Iterator[str]:
    """Yield the types that a schema allows; none where it does not say."""
    if not isinstance(schema, Mapping) or depth > 8:
        return
    if isinstance(reference := schema.get("$ref"), str):
        target: Any = whole
        for step in reference.removeprefix("#/").split("/"):
            target = target.get(step, {}) if isinstance(target, Mapping) else {}
        yield from _list_types(target, whole, depth + 1)
    named = schema.get("type")
    yield from (t for t in ([named] if isinstance(named, str) else named or ()) if isinstance(t, str))
    for choice in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(choice) or ():
            yield from _list_types(option, whole, depth + 1)
    if not named:
        for value in schema.get("enum") or ([schema["const"]] if "const" in schema else ()):
            yield from _name_type(value)


def get_parameters(tools: Sequence[JsonSchema], name: str) -> JsonSchema:
    """Return the schema of a tool's arguments; an empty one where there is no such tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            return dict(parameters) if isinstance(parameters, Mapping) else {}
    return {}


def write_literal(value: Any, quote: str = "") -> str:
    """Write a value as Python does; with a quote as Gemma does: texts between it, keys bare."""
    if not quote:
        return repr(value)
    if isinstance(value, str):
        if quote in value:
            raise ValueError(f"a text of this form cannot hold {quote}")
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{write_literal(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(write_literal(v, quote) for v in value) + "]"
    return json.dumps(value)
