"""Environments: Gymnasium's contract, async, where an action is an assistant message and a task is an integer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cached_property
from types import UnionType
from typing import Any, Self, Union, get_args, get_origin

import anyio
import pydantic

from agentrl import registry
from agentrl.breaker import breaker_of
from agentrl.errors import ContractError, ToolError, nearest
from agentrl.signature import arguments_model, checked, problems
from agentrl.tool import Tool
from agentrl.types import CallRecord, Message, Observation, Reply, Step, ToolCall, Trajectory


class Env:
    """One episode's world. A fresh object is made for each episode, and always closed.

    Subclasses write ``reset`` and ``step``, and take their settings (``--env.NAME value``) as keyword arguments of
    ``__init__``. What is expensive and shared is made once a run in ``open_shared`` and found as ``self.shared``.
    """

    max_turns: int = 8
    reward_weights: Mapping[str, float] = {}
    shared: Any = None
    call_records: Sequence[CallRecord] = ()  # the tool calls of the episode so far, as they ended
    running_calls: Mapping[str, str] = {}  # tools being called now, by the call's id

    def __init__(self) -> None: ...

    @classmethod
    @asynccontextmanager
    async def open_shared(cls, **settings: Any) -> AsyncIterator[Any]:
        """Run-wide state, given the settings of ``__init__``: a dataset, a pool, a session."""
        yield None

    def count(self, split: str) -> int | None:
        """How many tasks a split (``train``, ``test``) has; ``None``: as many as there are integers."""
        return None

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Begin task ``seed``: the same seed and options give the same task. ``options["split"]`` is set."""
        raise ContractError(f"{type(self).__name__} has no method `reset`")

    async def step(self, action: Reply) -> Step:
        """Answer one turn of the model."""
        raise ContractError(f"{type(self).__name__} has no method `step`")

    async def score(self, trajectory: Trajectory) -> Mapping[str, float | None]:
        """Named rewards of the finished episode; ``None``: does not apply. By default the sum of the steps' rewards."""
        return {"reward": sum(trajectory.step_rewards)}

    def clone(self) -> Env:
        """A second environment in the same state, for rollouts that branch (``rollout.branches``)."""
        raise ContractError(f"{type(self).__name__} has no method `clone`, which rollout.branches needs")

    async def close(self) -> None:
        """Let go of what this episode held."""

    @property
    def tool_list(self) -> Sequence[Tool]:
        """The tools the model is told of."""
        return ()


class ToolEnv(Env):
    """An environment made of tools: it runs the calls of a turn together, and ends when a turn makes none.

    ``tools`` lists tools, names from the registry, or nothing at all; methods marked ``@tool`` belong to it too.
    """

    system_prompt: str = ""
    tools: Sequence[Tool | str] = ()
    call_records: list[CallRecord]
    running_calls: dict[str, str]
    _turn: int

    def __new__(cls, *_: Any, **__: Any) -> Self:  # and no __init__, which a subclass may forget to call
        self = super().__new__(cls)
        self.call_records, self.running_calls = [], {}
        self._turn = 0
        return self

    @cached_property
    def _tools(self) -> dict[str, Tool]:
        return {t.name: t.bind(self) if t.is_method else t for t in _tools_of(self)}

    @property
    def tool_list(self) -> Sequence[Tool]:
        return tuple(self._tools.values())

    def ask(self, question: str) -> list[Message]:
        """The first observation: the system prompt, if there is one, and a question."""
        system: list[Message] = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": question}]

    async def step(self, action: Reply) -> Step:
        if not action.tool_calls:
            return Step([], 0.0, True, False, {})
        results: list[Message] = [{"role": "tool", "content": ""} for _ in action.tool_calls]
        try:
            async with anyio.create_task_group() as calls:
                for slot, call in zip(results, action.tool_calls, strict=True):
                    calls.start_soon(self._answer, call, slot)
        except ExceptionGroup as group:  # the first to fail has cancelled the others
            raise group.exceptions[0] from group.exceptions[0].__cause__
        self._turn += 1
        return Step(results, 0.0, False, False, {})

    async def _answer(self, call: ToolCall, slot: Message) -> None:
        """Run one call and write its result, or why there is none, into its place in the row."""
        slot["tool_call_id"], slot["name"] = call.id, call.name
        started, status = anyio.current_time(), "cancelled"
        self.running_calls[call.id] = call.name
        try:
            slot["content"] = await self._run(call)
            status = "ok"
        except ToolError as refusal:
            slot["content"], status = f"error: {refusal}", "refused"
        except Exception as error:
            status = getattr(error, "kind", "error")
            raise
        finally:
            self.running_calls.pop(call.id, None)
            self.call_records.append(CallRecord(self._turn, call.name, status, anyio.current_time() - started))

    async def _run(self, call: ToolCall) -> str:
        if call.error is not None:
            raise ToolError(call.error)
        if call.name not in self._tools:
            raise ToolError(f"unknown tool {call.name!r}; the tools are: {', '.join(self._tools)}")
        tool = self._tools[call.name]
        arguments = tool.check(call.arguments)
        async with AsyncExitStack() as held:
            if (limiter := _limiter(tool)) is not None:
                await held.enter_async_context(limiter)
            if tool.breaker is not None:
                await held.enter_async_context(breaker_of(tool.name, tool.breaker, tool.rest_s).closed())
            return await tool(**arguments)


# One run is one event loop: a tool's limit is shared by all environments of the run.
_limiters = anyio.lowlevel.RunVar[dict[str, anyio.CapacityLimiter]]("agentrl_tool_limits")


def _limiter(tool: Tool) -> anyio.CapacityLimiter | None:
    if tool.limit is None:
        return None
    try:
        limiters = _limiters.get()
    except LookupError:
        _limiters.set(limiters := {})
    return limiters.setdefault(tool.name, anyio.CapacityLimiter(tool.limit))


def _tools_of(env: ToolEnv) -> list[Tool]:
    """Those of the class are looked up once; an environment may set ``self.tools`` of its own."""
    cls = type(env)
    if "tools" in vars(env):
        return _resolved(cls, env.tools)
    if "_class_tools" not in vars(cls):
        cls._class_tools = _resolved(cls, cls.tools)  # type: ignore[attr-defined]
    found: list[Tool] = cls._class_tools  # type: ignore[attr-defined]
    return found


def _resolved(cls: type[ToolEnv], tools: Sequence[Tool | str]) -> list[Tool]:
    """The methods marked ``@tool``, then the tools listed."""
    named = [registry.load("tool", t) if isinstance(t, str) else t for t in tools]
    attributes = {k: v for c in reversed(cls.__mro__) for k, v in vars(c).items()}
    methods = {k: v for k, v in attributes.items() if isinstance(v, Tool)}
    for k in methods:
        if hasattr(ToolEnv, k):
            raise ContractError(
                f"the tool {cls.__name__}.{k} hides Env.{k}; rename the method, and say @tool(name={k!r})"
            )
    found = [*methods.values(), *named]
    for t in found:
        if not isinstance(t, Tool):
            raise ContractError(f"{cls.__name__}.tools holds {t!r}, which is no tool; decorate it with @agentrl.tool")
    names = [t.name for t in found]
    if twice := {n for n in names if names.count(n) > 1}:
        raise ContractError(f"{cls.__name__} has two tools called {twice.pop()!r}")
    return found


class EnvSpec:
    """An environment class and its settings: what makes a fresh environment for each episode."""

    def __init__(self, env: str | type[Env], **settings: Any) -> None:
        """Raises UserError for an unknown name, ContractError for what is no ``Env``, or for unknown settings."""
        cls = registry.load("env", env) if isinstance(env, str) else env
        if not (isinstance(cls, type) and issubclass(cls, Env)):
            raise ContractError(f"env {env!r} is {cls!r:.80}, not a subclass of agentrl.Env")
        self.cls: type[Env] = cls
        self.name = env if isinstance(env, str) else cls.__name__
        self.settings = self._checked(settings)

    def _checked(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings given, converted to the types of ``__init__``; ``a,b`` is a list where one is wanted."""
        model = arguments_model(self.cls.__init__, f"env {self.name!r}")
        known = {f.alias or "": f.annotation for f in model.model_fields.values()}
        for name in settings:
            if name not in known:
                raise ContractError(f"env {self.name!r} has no setting 'env.{name}'{nearest(name, known)}")
        given = {k: _listed(v) if _wants_list(known[k]) else v for k, v in settings.items()}
        try:
            values = checked(model, given)
        except pydantic.ValidationError as error:
            where, what = problems(error)[0]
            if what == "field required":
                raise ContractError(f"env {self.name!r} needs a value for --env.{where}") from None
            shown = f", not {settings[where]!r}" if where in settings else ""
            raise ContractError(f"env.{where} of env {self.name!r}: {what}{shown}") from None
        return {k: values[k] for k in given}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[EnvSpec]:
        """Hold the run-wide state while the environments live."""
        async with self.cls.open_shared(**self.settings) as shared:
            self.shared = shared
            yield self

    def make(self) -> Env:
        env = self.cls(**self.settings)
        env.shared = self.shared
        return env

    shared: Any = None


def _wants_list(annotation: Any) -> bool:
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return any((get_origin(k) or k) in (list, tuple, Sequence) for k in kinds) and str not in kinds


def _listed(value: Any) -> Any:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value
