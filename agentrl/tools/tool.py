"""A tool: a Python function that the model may call, with a schema taken from its signature."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, overload

import anyio
import docstring_parser
import pydantic

from agentrl.errors import ContractError, InfraError, ToolError, UserError
from agentrl.runtime.processes import call_in_process
from agentrl.runtime.threads import DeadlineExceeded, SerialThread, contain_exits, run_in_thread, with_deadline
from agentrl.settings.signature import build_arguments_model, convert_arguments, list_problems
from agentrl.tools.provenance import HealthCheck
from agentrl.types import JsonSchema

Problems = Sequence[tuple[str, str]]
ArgumentCheck = Callable[[Mapping[str, Any]], Problems | Coroutine[Any, Any, Problems]]
"""Returns what is wrong with a call's arguments, as (where, what); if nothing is, they are passed on as they are."""


@dataclass(frozen=True)
class Tool:
    """A tool as the rollout sees it.

    Args:
        name, description, parameters: the model is told these; ``parameters`` is a JSON schema.
        arguments: checks a call's arguments: a pydantic model, which converts them too, or an `ArgumentCheck`.
        function: a sync function runs in a thread, off the event loop.
        timeout_s: seconds of one attempt. An attempt that takes longer is cancelled and repeated ``retries`` times;
            then the call is an infrastructure fault.
        max_concurrency: calls that may run at once in one run; ``None``: any number.
        max_consecutive_failures: after that many failures in a row, over all episodes, the tool is not called for
            ``cooldown_s``; calls fail at once meanwhile. ``None``: never.
        process: run a sync function in a process of its own, which ends at the deadline: for what computes long, or
            cannot be interrupted. It must be in a module that can be imported; its arguments cross as JSON and are
            converted there, its result is plain data.
        max_chars: a longer result is cut, and says so.
        writes: whether a call may change what is outside of the episode (``None``: not known). ``agentrl check`` calls
            such a tool only if ``--allow_writes`` names it; an MCP server tells its clients.
        model_errors: exceptions of the function that are the model's mistake beside ``ToolError``: it reads their text.
        health_check: arguments of a harmless call that succeeds wherever the tool works (``{"query": "SELECT 1"}``), or
            an async function that raises where it does not. It is asked when a call failed: where it passes, the
            request provoked the failure (docs/faults.md).
        thread: of a sync environment, in which its sync methods run.
    """

    name: str
    description: str
    parameters: JsonSchema
    arguments: type[pydantic.BaseModel] | ArgumentCheck
    function: Callable[..., Any]
    timeout_s: float = 30.0
    retries: int = 0
    max_concurrency: int | None = None
    max_chars: int = 20_000
    max_consecutive_failures: int | None = 32
    cooldown_s: float = 10.0
    process: bool = False
    writes: bool | None = None
    model_errors: tuple[type[Exception], ...] = ()
    health_check: Mapping[str, Any] | HealthCheck | None = None
    thread: SerialThread | None = None

    def __post_init__(self) -> None:
        if isinstance(self.health_check, Mapping) and self.is_method:
            raise ContractError(
                f"tool {self.name!r}: health_check is for functions; a method would be called on the episode's own "
                "object: write `async def health_check(self)` beside it instead"
            )
        if self.max_consecutive_failures is not None and self.max_consecutive_failures < 1:
            failures = self.max_consecutive_failures
            raise ContractError(f"tool {self.name!r}: max_consecutive_failures is 1 or more, or None; not {failures!r}")
        if self.process and (self.is_method or inspect.iscoroutinefunction(self.function)):
            raise ContractError(f"tool {self.name!r}: process is for sync functions of a module, not for methods")
        if self.process and self.function.__module__ == "__main__":
            raise ContractError(
                f"tool {self.name!r}: process=True is for functions of a module that can be imported; this one is "
                "defined in the script or notebook that was started, which a worker process never imports: move it to "
                "a module of its own, or leave out process=True to run it in a thread"
            )
        no_calls = self.max_concurrency is not None and self.max_concurrency < 1
        if not self.timeout_s > 0 or self.retries < 0 or no_calls:
            raise ContractError(
                f"tool {self.name!r}: timeout_s must be over 0, retries 0 or more, max_concurrency 1 or more "
                f"(or None); not {self.timeout_s!r}, {self.retries!r} and {self.max_concurrency!r}"
            )

    @property
    def schema(self) -> JsonSchema:
        """Return the OpenAI function schema, which chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @property
    def is_method(self) -> bool:
        return next(iter(inspect.signature(self.function).parameters), None) == "self"

    @property
    def max_duration_s(self) -> float:
        """Return the longest seconds a call may take, its retries and the pauses between them included."""
        pauses = sum(_pause(attempt) for attempt in range(self.retries))
        return self.timeout_s * (self.retries + 1) + pauses

    def bind(self, owner: object, thread: SerialThread | None = None) -> Tool:
        """Return the tool of one environment, for a function that takes ``self``."""
        return replace(self, function=partial(self.function, owner), thread=thread)

    def make_health_check(self) -> HealthCheck | None:
        """Return the function that asks whether the tool works; None where it has no health check."""
        if not isinstance(self.health_check, Mapping):
            return self.health_check
        return partial(self._call_harmlessly, self.health_check)

    async def _call_harmlessly(self, arguments: Mapping[str, Any]) -> None:
        await self._run(await self.check_off_loop(arguments))

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a call's arguments to Python values.

        Raises:
            ToolError: tells the model every argument that is wrong.
            ContractError: this tool's arguments are checked in another process: `check_off_loop`.
        """
        if not isinstance(self.arguments, type):
            wrong = self.arguments(arguments)
            if isinstance(wrong, Coroutine):
                wrong.close()
                raise ContractError(f"tool {self.name!r} checks its arguments off the event loop: await check_off_loop")
            return self._accept(arguments, wrong)
        try:
            return convert_arguments(self.arguments, arguments)
        except pydantic.ValidationError as error:
            return self._accept(arguments, list_problems(error))

    async def check_off_loop(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a call's arguments as `check` does, and wait for a check that runs in another process."""
        if isinstance(self.arguments, type):
            return self.check(arguments)
        wrong = self.arguments(arguments)
        return self._accept(arguments, await wrong if isinstance(wrong, Coroutine) else wrong)

    def _accept(self, arguments: Mapping[str, Any], wrong: Problems) -> dict[str, Any]:
        """Return the arguments. Raises ToolError if anything is wrong with them."""
        if not wrong:
            return dict(arguments)
        words = "; ".join(f"{where}: {what}" for where, what in wrong)
        raise ToolError(f"bad arguments for {self.name}: {words}", kind="arguments")

    async def __call__(self, /, **arguments: Any) -> str:
        """Call the tool, with its retries; return the result as text for the model.

        Raises:
            ToolError: the tool refuses; the model may read why.
            InfraError: it timed out, or raised something else, ``retries + 1`` times. One of its own keeps its kind.
            ContractError: its result is neither text nor JSON.
        """
        for attempt in range(self.retries + 1):
            try:
                return self._format(await self._run_with_timeout(arguments))
            except (ToolError, UserError):
                raise
            except self.model_errors as error:
                raise ToolError(f"{type(error).__name__}: {error}") from error
            except InfraError as raised:
                fault = raised
            except Exception as error:  # one of the two boundaries: around a tool call
                fault = InfraError(
                    "tool_error",
                    f"tool {self.name!r} raised {type(error).__name__}: {error} "
                    "(raise agentrl.ToolError for what the model should read)",
                )
                fault.__cause__ = error
            if attempt < self.retries:
                await anyio.sleep(_pause(attempt))
        raise fault

    async def _run_with_timeout(self, arguments: dict[str, Any]) -> Any:
        """Run one attempt within ``timeout_s``. Raises InfraError ``tool_timeout``."""
        try:
            # `contain_exits` in a task of its own, where a SystemExit would end the run
            return await with_deadline(self.timeout_s, contain_exits(self._run(arguments)))
        except DeadlineExceeded:
            raise InfraError("tool_timeout", f"tool {self.name!r} took over {self.timeout_s:g} s") from None

    async def _run(self, arguments: dict[str, Any]) -> Any:
        """Run the function where it belongs: in the event loop, a thread, or a process of its own."""
        if inspect.iscoroutinefunction(_unwrap_partial(self.function)):
            return await self.function(**arguments)
        if self.process:
            return await self._run_in_process(arguments)
        call = partial(self.function, **arguments)
        result = await (run_in_thread(call) if self.thread is None else self.thread.run(call))
        return await result if isinstance(result, Awaitable) else result

    async def _run_in_process(self, arguments: Mapping[str, Any]) -> Any:
        plain, model = arguments, self.arguments
        if is_model := isinstance(model, type) and issubclass(model, pydantic.BaseModel):
            plain = model.model_validate(arguments).model_dump(mode="json", by_alias=True)
        mistakes = [f"{cls.__module__}:{cls.__qualname__}" for cls in self.model_errors]
        module, name = self.function.__module__, self.function.__qualname__
        return await call_in_process(_run_by_name, module, name, plain, is_model, mistakes)

    def _format(self, result: Any) -> str:
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
    """Return the seconds before the next attempt."""
    return min(0.1 * 2.0**attempt, 5.0)


@lru_cache(maxsize=64)
def _build_model(function: Callable[..., Any]) -> type[pydantic.BaseModel]:
    return build_arguments_model(function, f"tool {function.__name__!r}")


def _run_by_name(module: str, name: str, arguments: dict[str, Any], convert: bool, mistakes: list[str]) -> Any:
    """Run a function in another process; the name in its module may be the tool.

    Args:
        convert: to the types of the signature.
        mistakes: names of exceptions that are the model's mistake.
    """
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    function = function.function if isinstance(function, Tool) else function
    if convert:
        arguments = convert_arguments(_build_model(function), arguments)
    try:
        result = function(**arguments)
    except ToolError:
        raise
    except Exception as error:
        if {f"{cls.__module__}:{cls.__qualname__}" for cls in type(error).__mro__}.isdisjoint(mistakes):
            raise
        raise ToolError(f"{type(error).__name__}: {error}") from error
    return result.model_dump(mode="json") if isinstance(result, pydantic.BaseModel) else result


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = ...,
    timeout_s: float = ...,
    retries: int = ...,
    max_concurrency: int | None = ...,
    max_chars: int = ...,
    max_consecutive_failures: int | None = ...,
    cooldown_s: float = ...,
    process: bool = ...,
    writes: bool | None = ...,
    model_errors: tuple[type[Exception], ...] = ...,
    health_check: Mapping[str, Any] | HealthCheck | None = ...,
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


# A plain function knows no ToolError. These are what wrong arguments raise; TRL lets the model read them too.
_ARGUMENT_ERRORS = (ValueError, ArithmeticError, LookupError)


def wrap_function(function: object, what: str) -> Tool:
    """Make a tool of a plain function, a bound method or a ``partial``, as ``@tool`` does.

    What wrong arguments raise (ValueError, ArithmeticError, LookupError) is the model's mistake; it reads the text.

    Args:
        what: how a sentence calls the place where it was given, such as ``Shop.tools``.

    Raises:
        ContractError: it is no such function, or its signature makes no schema.
    """
    if reason := _find_obstacle(function):
        raise ContractError(f"{what} holds {function!r:.80}, which is no tool: {reason}")
    kept = inspect.isfunction(function) and function.__closure__ is None  # not one made for an episode
    return (_wrap_once if kept else _wrap)(function)


def _wrap(function: Any) -> Tool:
    return _make(function, model_errors=_ARGUMENT_ERRORS)


_wrap_once = lru_cache(maxsize=256)(_wrap)  # an environment lists its tools for each episode


def _find_obstacle(function: Any) -> str | None:
    """Return why a thing cannot be wrapped as a tool, with the way out; None where it can."""
    inner = _unwrap_partial(function)
    if isinstance(inner, type) or not callable(inner):
        return "list functions, toolsets or names of tools"
    if not inspect.isroutine(inner):
        return "it is an object; list one of its methods, such as thing.search"
    if inner.__name__ == "<lambda>":
        return "a lambda has no types; write a def with types and a docstring"
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        return "it yields; a tool returns one result"
    if next(iter(_parameters(inner)), None) in ("self", "cls"):
        return f"it is a method of a class; list that of an object, such as thing.{inner.__name__}"
    return None


def _parameters(function: Callable[..., object]) -> Sequence[str]:
    try:
        return tuple(inspect.signature(function).parameters)
    except ValueError:  # written in C, which keeps none
        return ()


def _unwrap_partial(function: Any) -> Any:
    return _unwrap_partial(function.func) if isinstance(function, partial) else function


def _make(function: Callable[..., Any], name: str | None = None, **settings: Any) -> Tool:
    inner = _unwrap_partial(function)
    name = name or inner.__name__
    doc = docstring_parser.parse(inspect.getdoc(inner) or "")
    model = build_arguments_model(function, f"tool {name!r}", described=True)
    try:
        parameters = _untitled(model.model_json_schema(by_alias=True))
    except pydantic.errors.PydanticInvalidForJsonSchema as error:
        raise ContractError(f"tool {name!r} has an argument of a type that JSON cannot hold: {error.message}") from None
    description = "\n\n".join(part for part in (doc.short_description, doc.long_description) if part)
    return Tool(name, description, parameters, model, function, **settings)


def _untitled(schema: Any) -> Any:
    """Remove pydantic's generated ``title`` strings from a schema: they cost tokens and say nothing."""
    if isinstance(schema, list):
        return [_untitled(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        k: {n: _untitled(p) for n, p in v.items()} if k in ("properties", "$defs") else _untitled(v)
        for k, v in schema.items()
        if k != "title"
    }
