"""JSON schemas as checks: one pair of words for each argument that is wrong."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
from agentrl_tools import schema as schemas
from agentrl_tools.schema import build_argument_check

from agentrl import UserError

NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/B"}, "c": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"B": {"type": "object", "properties": {"d": {"type": "array", "items": {"type": "string"}}}}},
}


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"a": 1, "b": {"d": ["x"]}, "c": "x"}, []),
        ({}, [("a", "field required"), ("b", "field required")]),
        ({"a": "1", "b": {"d": [2]}}, [("a", "'1' is not of type 'integer'"), ("b.d.0", "2 is not of type 'string'")]),
        ({"a": 1, "b": {}, "e": 1}, [("e", "not an argument; known: a, b, c")]),
        ({"a": 1, "b": {}, "c": "z"}, [("c", "'z' is not one of ['x', 'y']")]),
    ],
)
def test_each_wrong_argument_has_its_words(arguments: dict[str, Any], wrong: list[tuple[str, str]]) -> None:
    assert build_argument_check(NESTED, "tool")(arguments) == wrong


def test_words_are_short() -> None:
    (_, what), *_ = build_argument_check({"properties": {"a": {"type": "integer"}}}, "tool")({"a": "x" * 9999})
    assert len(what) == 200


def test_what_is_no_schema_is_a_sentence() -> None:
    with pytest.raises(UserError, match="tool 'x': its schema is no JSON schema: 'integre' is not valid"):
        build_argument_check({"properties": {"a": {"type": "integre"}}}, "tool 'x'")


@pytest.mark.parametrize("schema", [{"$ref": "https://example.org/schema"}, {"type": "string", "pattern": r"^\p{L}+$"}])
def test_what_cannot_be_checked_here_is_left_to_the_server(schema: dict[str, Any]) -> None:
    assert build_argument_check({"properties": {"a": schema}}, "tool")({"a": "x"}) == []


def twice(levels: int, start: str = "#/$defs/L") -> dict[str, Any]:
    parts: dict[str, Any] = {f"L{i}": {"allOf": [{"$ref": f"{start}{i + 1}"}] * 2} for i in range(levels)}
    return {"$ref": f"{start}0", "$defs": {**parts, f"L{levels}": {"type": "object"}}}


@pytest.mark.parametrize(
    "costly",
    [
        {"properties": {"a": {"pattern": "^(a+)+$"}}},
        {"properties": {"a": {"pattern": "a*a*$"}}},
        {"patternProperties": {"^(a+)+$": {}}},
        {"$ref": "#"},
        {"properties": {"a": {"$ref": "#"}}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}},
        {"$ref": "#/allOf/0", "allOf": [{"$ref": "#/allOf/0"}]},
        {"$id": "http://a/b", "$ref": "http://a/b"},
        twice(40),
        twice(40, "#/%24defs/L"),
        {"anyOf": [{"type": "string"}] * 200},
        {"properties": {"a": {"uniqueItems": True}}},
    ],
)
async def test_a_check_that_may_take_long_runs_in_a_worker(
    costly: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "CHECK_S", 1.0)
    check = build_argument_check(costly, "tool")({"a": "a" * 40 + "!"})
    assert isinstance(check, Coroutine)
    assert isinstance(await check, list)


@pytest.mark.parametrize(
    "cheap",
    [
        NESTED,
        {"properties": {"id": {"type": "string"}, "pattern": {"type": "string"}}},
        {"properties": {"a": {"pattern": "^[a-z0-9-]+$"}, "b": {"pattern": r"^\d{4}-\d\d$"}}},
        {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}], "format": "date"}}},
    ],
)
def test_a_schema_as_servers_have_them_is_checked_where_it_stands(cheap: dict[str, Any]) -> None:
    assert isinstance(build_argument_check(cheap, "tool")({}), list)


async def test_a_worker_says_the_same_words() -> None:
    check = build_argument_check({**NESTED, "properties": {**NESTED["properties"], "e": {"pattern": "(x+)+"}}}, "tool")
    assert await check({"a": "1", "b": {}, "e": "y"}) == [
        ("a", "'1' is not of type 'integer'"),
        ("e", "'y' does not match '(x+)+'"),
    ]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**400])
def test_a_number_that_cannot_be_checked_is_left_to_the_server(value: float) -> None:
    found = build_argument_check({"properties": {"a": {"multipleOf": 0.1}}}, "tool")({"a": value})
    assert isinstance(found, list)
