"""A tool: a Python function that the model may call, with a schema taken from its signature."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

import anyio
import docstring_parser
import pydantic

from agentrl.aside import Overdue, in_thread, within
from agentrl.errors import ContractError, ToolError, UserError, WorldFault
from agentrl.processes import call_in_process
from agentrl.signature import arguments_model, checked, problems
from agentrl.types import JsonSchema

Check = Callable[[Mapping[str, Any]], Sequence[tuple[str, str]]]
"""Says what is wrong with a call's arguments, as (where, what): nothing, or the arguments are passed on as they are."""


@dataclass(frozen=True)
class Tool:
    """A tool as the rollout sees it.

    Args:
        name, description, parameters: what the model is told; ``parameters`` is a JSON schema.
        arguments: what checks a call's arguments: a pydantic model, which converts them too, or a `Check`.
        function: sync functions run in a thread, off the event loop.
        timeout_s: a try that takes longer is given up, and repeated ``retries`` times; then it is the world's fault.
        limit: how many calls may run at once in one run; ``None``: any number.
        breaker: after that many faults in a row, over all episodes, it is left alone for ``rest_s``; calls fail at once
            meanwhile. ``None``: never.
        process: a sync function runs in a process of its own, which ends with its deadline: for what computes long, or
            cannot be interrupted. It must be in a module that can be imported, and its arguments and result picklable.
        max_chars: a longer result is cut, and says so.
        writes: whether a call may change what is outside of the episode (``None``: not known). ``agentrl check`` does
            not call one that does, unless it is named in ``--allow-writes``; an MCP server is told.
    """

    name: str
    description: str
    parameters: JsonSchema
    arguments: type[pydantic.BaseModel] | Check
    function: Callable[..., Any]
    timeout_s: float = 30.0
    retries: int = 0
    limit: int | None = None
    max_chars: int = 20_000
    breaker: int | None = 32
    rest_s: float = 10.0
    process: bool = False
    writes: bool | None = None

    def __post_init__(self) -> None:
        if self.breaker is not None and self.breaker < 1:
            raise ContractError(f"tool {self.name!r}: breaker is 1 or more, or None; not {self.breaker!r}")
        if self.process and (self.is_method or inspect.iscoroutinefunction(self.function)):
            raise ContractError(f"tool {self.name!r}: process is for sync functions of a module, not for methods")
        if self.process and self.function.__module__ == "__main__":
            raise ContractError(
                f"tool {self.name!r}: process=True is for functions of a module that can be imported; this one is "
                "defined in the script or notebook that was started, which a worker process never imports: move it to "
                "a module of its own, or leave out process=True to run it in a thread"
            )
        if not self.timeout_s > 0 or self.retries < 0 or (self.limit is not None and self.limit < 1):
            raise ContractError(
                f"tool {self.name!r}: timeout_s must be over 0, retries 0 or more, limit 1 or more (or None); "
                f"not {self.timeout_s!r}, {self.retries!r} and {self.limit!r}"
            )

    @property
    def schema(self) -> JsonSchema:
        """The OpenAI function schema, which chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @property
    def is_method(self) -> bool:
        return next(iter(inspect.signature(self.function).parameters), None) == "self"

    @property
    def longest_s(self) -> float:
        """How long a call may take, its retries and the pauses between them included."""
        pauses = sum(_pause(attempt) for attempt in range(self.retries))
        return self.timeout_s * (self.retries + 1) + pauses

    def bind(self, owner: object) -> Tool:
        """The tool of one environment, for functions that take ``self``."""
        return replace(self, function=partial(self.function, owner))

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as Python values.

        Raises:
            ToolError: with words for the model on every argument that is wrong.
        """
        if isinstance(self.arguments, type):
            try:
                return checked(self.arguments, arguments)
            except pydantic.ValidationError as error:
                wrong: Sequence[tuple[str, str]] = problems(error)
        elif not (wrong := self.arguments(arguments)):
            return dict(arguments)
        words = "; ".join(f"{where}: {what}" for where, what in wrong)
        raise ToolError(f"bad arguments for {self.name}: {words}")

    async def __call__(self, /, **arguments: Any) -> str:
        """Call it; the result as text for the model.

        Raises:
            ToolError: the tool says no; the model may read why.
            WorldFault: it timed out, or raised something else, ``retries + 1`` times. One of its own keeps its kind.
            ContractError: its result is neither text nor JSON.
        """
        for attempt in range(self.retries + 1):
            try:
                return self._text(await within(self.timeout_s, self._invoke(arguments)))
            except (ToolError, UserError):
                raise
            except WorldFault as raised:
                fault = raised
            except Overdue:
                fault = WorldFault("tool_timeout", f"tool {self.name!r} took over {self.timeout_s:g} s")
            except Exception as error:  # one of the two boundaries: around a tool call
                fault = WorldFault(
                    "tool_error",
                    f"tool {self.name!r} raised {type(error).__name__}: {error} "
                    "(raise agentrl.ToolError for what the model should read)",
                )
                fault.__cause__ = error
            if attempt < self.retries:
                await anyio.sleep(_pause(attempt))
        raise fault

    async def _invoke(self, arguments: dict[str, Any]) -> Any:
        function = self.function.func if isinstance(self.function, partial) else self.function
        if inspect.iscoroutinefunction(function):
            return await self.function(**arguments)
        call = partial(self.function, **arguments)
        if self.process:
            return await call_in_process(_called, self.function.__module__, self.function.__qualname__, arguments)
        result = await in_thread(call)
        return await result if isinstance(result, Awaitable) else result

    def _text(self, result: Any) -> str:
        if not isinstance(result, str):
            if isinstance(result, pydantic.BaseModel):
                result = result.model_dump(mode="json")
            try:
                result = json.dumps(result, ensure_ascii=False)
            except (TypeError, ValueError):
                raise ContractError(
                    f"tool {self.name!r} returned {result!r:.80} ({type(result).__name__}), which is neither text "
                    "nor JSON; return a str, a number, a bool, None, or lists and dicts of them"
                ) from None
        if len(result) > self.max_chars:
            result = f"{result[: self.max_chars]} [cut: {len(result) - self.max_chars} more characters]"
        return str(result)


def _pause(attempt: int) -> float:
    """Seconds before the next try."""
    return min(0.1 * 2.0**attempt, 5.0)


def _called(module: str, name: str, arguments: dict[str, Any]) -> Any:
    """In another process: the function by its name, since the name in its module is the tool."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return (found.function if isinstance(found, Tool) else found)(**arguments)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = ...,
    timeout_s: float = ...,
    retries: int = ...,
    limit: int | None = ...,
    max_chars: int = ...,
    breaker: int | None = ...,
    rest_s: float = ...,
    process: bool = ...,
    writes: bool | None = ...,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, /, **settings: Any) -> Tool | Callable[..., Tool]:
    """Make a tool of a function: ``@tool`` or ``@tool(timeout_s=5)``.

    The schema comes from the signature, the descriptions from the docstring (Google, NumPy or reST style). Arguments
    are checked and converted by pydantic before the function sees them; unknown ones are refused. On a method
    of a ``ToolEnv``, ``self`` is the episode's environment, so that a tool may have state.

    Raises:
        ContractError: an argument has no type or one that JSON cannot hold, or the function takes ``*args`` or
            ``**kwargs``, or a setting makes no sense.
    """
    return _make(function) if function is not None else partial(_make, **settings)


def _make(function: Callable[..., Any], name: str | None = None, **settings: Any) -> Tool:
    name = name or function.__name__
    doc = docstring_parser.parse(inspect.getdoc(function) or "")
    model = arguments_model(function, f"tool {name!r}", described=True)
    try:
        parameters = _untitled(model.model_json_schema(by_alias=True))
    except pydantic.errors.PydanticInvalidForJsonSchema as error:
        raise ContractError(f"tool {name!r} has an argument of a type that JSON cannot hold: {error.message}") from None
    description = "\n\n".join(part for part in (doc.short_description, doc.long_description) if part)
    return Tool(name, description, parameters, model, function, **settings)


def _untitled(schema: Any) -> Any:
    """Without pydantic's generated ``title`` strings, which cost tokens and say nothing."""
    if isinstance(schema, list):
        return [_untitled(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        k: {n: _untitled(p) for n, p in v.items()} if k in ("properties", "$defs") else _untitled(v)
        for k, v in schema.items()
        if k != "title"
    }
