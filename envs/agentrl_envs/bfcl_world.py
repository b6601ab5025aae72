"""The APIs of BFCL's multi-turn tasks: objects with a state, called by name; never by evaluating text."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pydantic

from agentrl import ContractError, Tool, ToolError
from agentrl.types import JsonSchema

_TYPES = {"dict": "object", "float": "number", "tuple": "array"}  # theirs -> JSON's


def import_apis(classes: Iterable[str]) -> None:
    """Import the modules of some APIs, which takes a second."""
    backend = importlib.import_module("bfcl_eval.constants.executable_backend_config")
    for name in classes:
        importlib.import_module(backend.CLASS_FILE_PATH_MAPPING[name])


class ApiInstances:
    """The instances of the APIs of one task. Two are equal where all that is public in them is."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        backend = importlib.import_module("bfcl_eval.constants.executable_backend_config")
        self.parts: dict[str, Any] = {}
        for name in row["involved_classes"]:
            part = getattr(importlib.import_module(backend.CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in backend.STATELESS_CLASSES:
                begin = copy.deepcopy(row["initial_config"].get(name, {}))
                part._load_scenario(begin, long_context="long_context" in row["id"])
            self.parts[name] = part
        members = [pair for part in self.parts.values() for pair in inspect.getmembers(part, inspect.ismethod)]
        self.methods = {name: method for name, method in members if not name.startswith("_")}

    def call(self, name: str, positional: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        """Call a function and word its result as their runner does; an exception is a result too."""
        try:
            result = self.methods[name](*positional, **arguments)
            return json.dumps(result) if isinstance(result, dict) else str(result)
        except Exception as error:
            return f"Error during execution: {error}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ApiInstances):
            return NotImplemented
        return {n: _public(p) for n, p in self.parts.items()} == {n: _public(p) for n, p in other.parts.items()}

    __hash__ = None  # type: ignore[assignment]


def _public(part: Any) -> dict[str, Any]:
    return {k: v for k, v in vars(part).items() if not k.startswith("_")}


def contains_all(said: Sequence[str], wanted: Sequence[str]) -> bool:
    """Return True if each of ``wanted`` is in ``said``, as often as in ``wanted``, in any order."""
    left = list(said)
    for one in wanted:
        if one not in left:
            return False
        left.remove(one)
    return True


def parse_call(call: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Parse ``mv(source='a', destination='b')`` into name and arguments. Literals only: nothing is evaluated."""
    found = ast.parse(call, mode="eval").body
    if not (isinstance(found, ast.Call) and isinstance(found.func, ast.Name)):
        raise ContractError(f"bfcl: the ground truth {call!r} is no call of a function by its name")
    named = {str(k.arg): ast.literal_eval(k.value) for k in found.keywords}
    return found.func.id, [ast.literal_eval(a) for a in found.args], named


class _ApiTool(Tool):
    """A tool whose arguments go to the function unchecked: it reports itself what is wrong with them."""

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if "self" in arguments:
            raise ToolError(f"bad arguments for {self.name}: self: no such argument")
        return dict(arguments)


def make_tool(document: Mapping[str, Any], call: Callable[[str, Mapping[str, Any]], Awaitable[str]]) -> Tool:
    """Make a tool of a documented function, which calls ``call`` with its name and arguments."""

    async def function(**arguments: Any) -> str:
        return await call(document["name"], arguments)

    named = (document["name"], document["description"], document["parameters"])
    return _ApiTool(*named, pydantic.BaseModel, function)


def _to_json_schema(theirs: Any) -> JsonSchema:
    """Translate their description of parameters into JSON schema's names of the types."""

    def translated(part: Any) -> Any:
        if isinstance(part, list):
            return [translated(p) for p in part]
        if not isinstance(part, dict):
            return part
        named = {k: translated(v) for k, v in part.items()}
        kind = named.get("type")
        return {**named, "type": _TYPES.get(kind, kind)} if isinstance(kind, str) else named

    return dict(translated(theirs))


@cache
def _documents(file: Path) -> list[dict[str, Any]]:
    """Load documents once a process: an episode has dozens of functions."""
    return [{**doc, "parameters": _to_json_schema(doc["parameters"])} for doc in read_json_lines(file)]


def load_documents(data: Path, classes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Load the documented functions of some APIs, by name."""
    files = importlib.import_module("bfcl_eval.constants.executable_backend_config").MULTI_TURN_FUNC_DOC_FILE_MAPPING
    return {doc["name"]: doc for c in classes for doc in _documents(data / "multi_turn_func_doc" / files[c])}


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
