"""JSON schemas as checks: one pair of words for each argument that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from agentrl_tools.schema import build_argument_check

from agentrl import UserError

NESTED = {
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
