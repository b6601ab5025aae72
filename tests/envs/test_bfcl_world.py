"""BFCL's APIs as objects: called by name, compared, described; and no text is evaluated."""

from __future__ import annotations

from typing import Any

import pytest
from agentrl_envs.bfcl_world import ApiInstances, _to_json_schema, contains_all, make_tool, parse_call

from agentrl import ContractError, ToolError

pytest.importorskip("bfcl_eval")

FILES = {"root": {"home": {"type": "directory", "contents": {"a.txt": {"type": "file", "content": "one"}}}}}
ROW: dict[str, Any] = {
    "id": "multi_turn_base_0",
    "involved_classes": ["GorillaFileSystem", "MathAPI"],
    "initial_config": {"GorillaFileSystem": FILES},
}


def test_worlds_are_equal_until_something_is_done() -> None:
    one, other = ApiInstances(ROW), ApiInstances(ROW)
    assert one == other
    assert one.call("cat", ["a.txt"], {}) == '{"file_content": "one"}'
    assert one == other  # looking changes nothing
    one.call("touch", [], {"file_name": "b.txt"})
    assert one != other
    other.call("touch", ["b.txt"], {})
    assert one == other
    assert FILES["root"]["home"]["contents"] == {"a.txt": {"type": "file", "content": "one"}}


def test_what_is_no_function_cannot_be_called() -> None:
    world = ApiInstances(ROW)
    assert not {"_load_scenario", "__init__", "root"} & world.methods.keys()
    assert world.call("_load_scenario", [], {}).startswith("Error during execution")
    assert world.call("add", [1.0], {"b": 2.0}) == '{"result": 3.0}'


@pytest.mark.parametrize(
    "text", ["__import__('os').system('x')", "f(open('x'))", "f(1)(2)", "f(**{'a': g()})", "a.b()", "f(", "x = 1"]
)
def test_only_literal_arguments_are_read(text: str) -> None:
    with pytest.raises((ContractError, ValueError, SyntaxError)):
        parse_call(text)
    assert parse_call("mv('a', destination=['b', 1.5, None])") == ("mv", ["a"], {"destination": ["b", 1.5, None]})


def test_each_is_wanted_as_often_as_it_is_said() -> None:
    assert contains_all(["a", "b", "a"], ["a", "a"])
    assert contains_all(["a"], [])
    assert not contains_all(["a", "b"], ["a", "a"])


async def test_a_documented_function_is_a_tool_with_a_json_schema() -> None:
    given: list[Any] = []

    async def call(name: str, arguments: Any) -> str:
        given.append((name, arguments))
        return "told"

    theirs = {"type": "dict", "properties": {"type": {"type": "float"}, "at": {"type": "tuple", "items": []}}}
    tool = make_tool({"name": "f", "description": "Does.", "parameters": _to_json_schema(theirs)}, call)
    assert tool.parameters == {
        "type": "object",
        "properties": {"type": {"type": "number"}, "at": {"type": "array", "items": []}},
    }
    assert await tool(**tool.check({"name": 2, "unknown": 3})) == "told"
    assert given == [("f", {"name": 2, "unknown": 3})]
    with pytest.raises(ToolError, match="self: no such argument"):
        tool.check({"self": 1})
    assert _to_json_schema({"type": "string"}) == {"type": "string"}
