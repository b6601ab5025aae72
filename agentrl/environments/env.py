"""Environments: Gymnasium's contract, async, where an action is an assistant message and a task is an integer."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cached_property, partial
from typing import Any, ClassVar, Self

import anyio

from agentrl import registry
from agentrl.breaker import breaker_of
from agentrl.errors import ContractError, ToolError, nearest
from agentrl.lanes import Track
from agentrl.signature import settings_of
from agentrl.tool import Tool
from agentrl.toolset import Toolset, named
from agentrl.types import REFUSAL, CallRecord, Message, Observation, Reply, Step, ToolCall, Trajectory, utf8_within


class Env:
    """One episode's world. A fresh object is made for each episode, and always closed.

    Subclasses write ``reset`` and ``step``, and take their settings (``--env.NAME value``) as keyword arguments of
    ``__init__``. What is expensive and shared is made once a run in ``open_shared`` and found as ``self.shared``.
    """

    max_turns: int = 8
    reward_weights: Mapping[str, float] = {}
    scores_groups: bool = False  # whether `score_group` is called, once all episodes of a group have ended
    metrics: Mapping[str, float] = {}  # of the episode, logged beside its rewards: means in metrics.jsonl
    extras: Mapping[str, Any] = {}  # of the episode, kept in its ``info``
    best_reward: float = 1.0  # of a perfect episode; `agentrl check env` measures by it
    shared: Any = None
    call_records: Sequence[CallRecord] = ()  # the tool calls of the episode so far, as they ended
    running_calls: Mapping[str, str] = {}  # tools being called now, by the call's id
    _track: Track | None = None  # of the episode, through the lanes of the run
    needs: ClassVar[Mapping[str, str]] = {}  # packages beyond the plain install: modules, and extras that bring them
    named_by: ClassVar[str | None] = None  # the setting that ``NAME:VALUE`` gives, for a family of environments

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

    async def score_group(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Compare the episodes of a group; return them, each `Trajectory.with_rewards` of this comparison.

        Called where ``scores_groups`` is true, after each member's own `score`, on the environment of the first, which
        is closed by then. Members that the world failed are not among them. It is bounded as `score` is.
        """
        return trajectories

    def clone(self) -> Env:
        """Return a second environment in the same state, for rollouts that branch (``rollout.branches``).

        ``return copy.deepcopy(self)`` does it where the state is Python objects: ``shared`` stays one. The tools, the
        call records and the toolsets of a `ToolEnv` are made its own afterwards. `agentrl check env` plays branches.
        """
        raise ContractError(f"{type(self).__name__} has no method `clone`, which rollout.branches needs")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy what the episode holds; what belongs to the run stays one."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        memo[id(self.shared)] = self.shared
        for name, value in vars(self).items():
            if name not in _BINDINGS:
                other.__dict__[name] = value if name in _OF_THE_RUN else copy.deepcopy(value, memo)
        return other

    async def close(self) -> None:
        """Let go of what this episode held."""

    async def close_tools(self) -> None:
        """Let go of what its tools held; called after ``close``."""

    @property
    def tool_list(self) -> Sequence[Tool]:
        """The tools the model is told of."""
        return ()


class ToolEnv(Env):
    """An environment made of tools: it runs the calls of a turn together, and ends when a turn makes none.

    ``tools`` lists tools, toolsets, names from the registry, or nothing at all; methods marked ``@tool`` belong to it
    too.
    """

    system_prompt: str = ""
    tools: Sequence[Tool | Toolset | type[Toolset] | str] = ()
    call_records: list[CallRecord]
    running_calls: dict[str, str]
    _turn: int
    kit: Kit | None = None  # the run's say in the tools

    def __new__(cls, *_: Any, **__: Any) -> Self:  # and no __init__, which a subclass may forget to call
        self = super().__new__(cls)
        self.call_records, self.running_calls = [], {}
        self._turn = 0
        return self

    @cached_property
    def _listed(self) -> list[Tool | Toolset]:
        """This episode's own toolsets, and the tools beside them."""
        kit = self.kit or _NO_KIT
        return [kit.of_episode(t, self) if isinstance(t, Toolset) else t for t in kit.tools_of(self)]

    @cached_property
    def _tools(self) -> dict[str, Tool]:
        found = [t.bind(self) if isinstance(t, Tool) and t.is_method else t for t in self._listed]
        flat = [t for one in found for t in (one.tool_list if isinstance(one, Toolset) else [one])]
        _check_names([t.name for t in flat], type(self))
        return {t.name: t for t in flat}

    def part_from(self, trunk: ToolEnv) -> None:
        """Take tools, call records and toolsets of its own, in the state of the environment that it is a clone of.

        Raises:
            ContractError: a toolset cannot be forked, or a tool is bound to the trunk.
        """
        self.kit = kit = trunk.kit or _NO_KIT
        self.call_records, self.running_calls, self._turn = list(trunk.call_records), {}, trunk._turn
        for name in _BINDINGS:
            self.__dict__.pop(name, None)
        for t in (own := kit.tools_of(self)):
            if isinstance(t, Tool) and _holds(t.function, trunk):
                raise ContractError(
                    f"the tool {t.name!r} of a clone acts on the {type(self).__name__} that was cloned, to which its "
                    "function is bound: write it as a method marked @tool, or make it anew in clone()"
                )
        if "_listed" in vars(trunk):
            patterns = zip(kit.tools_of(trunk), trunk._listed, strict=True)
            live = {p.key: t for p, t in patterns if isinstance(p, Toolset) and isinstance(t, Toolset)}
            self._listed = [_forked(t, live, kit, self) if isinstance(t, Toolset) else t for t in own]

    async def close_tools(self) -> None:
        for t in self.__dict__.get("_listed", ()):
            if isinstance(t, Toolset):
                await t.close()

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
        if len(results) == 1:  # a task of its own would cost more than many a tool
            await self._answer(action.tool_calls[0], results[0])
        else:
            await self._answer_all(action.tool_calls, results)
        self._turn += 1
        return Step(results, 0.0, False, False, {})

    async def _answer_all(self, asked: Sequence[ToolCall], results: Sequence[Message]) -> None:
        try:
            async with anyio.create_task_group() as calls:
                for slot, call in zip(results, asked, strict=True):
                    calls.start_soon(self._answer, call, slot)
        except ExceptionGroup as group:  # the first to fail has cancelled the others
            raise group.exceptions[0] from group.exceptions[0].__cause__

    async def _answer(self, call: ToolCall, slot: Message) -> None:
        """Run one call and write its result, or why there is none, into its place in the row."""
        slot["tool_call_id"], slot["name"] = call.id, call.name
        started, status = anyio.current_time(), "cancelled"
        self.running_calls[call.id] = call.name
        track = None
        try:
            if self._track is not None and call.error is None and call.name in self._tools:
                track = self._track
                track.call(call.name)
            slot["content"] = await self._run(call)
            status = "ok"
        except ToolError as refusal:
            slot["content"], slot["refused"], status = f"{REFUSAL}{refusal}", True, "refused"
        except Exception as error:
            status = getattr(error, "kind", "error")
            raise
        finally:
            if track is not None:
                track.returned(call.name)
            self.running_calls.pop(call.id, None)
            self.call_records.append(CallRecord(self._turn, call.name, status, anyio.current_time() - started))

    async def _run(self, call: ToolCall) -> str:
        if call.error is not None:
            raise ToolError(call.error)
        if call.name not in self._tools:
            raise ToolError(f"unknown tool {call.name!r}; the tools are: {', '.join(self._tools)}")
        return await called(self._tools[call.name], call.arguments)


_BINDINGS = ("_listed", "_tools")  # what a ToolEnv keeps of its tools
_OF_THE_RUN = ("shared", "kit", "tools")


def _holds(function: Any, owner: object) -> bool:
    """Return True where a function is bound to an object, or closes over it."""
    if isinstance(function, partial):
        return any(v is owner for v in (*function.args, *function.keywords.values())) or _holds(function.func, owner)
    cells = (cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_set(cell))
    return getattr(function, "__self__", None) is owner or any(value is owner for value in cells)


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that has no value yet
        return False


def _forked(pattern: Toolset, live: Mapping[str, Toolset], kit: Kit, env: Env) -> Toolset:
    """Fork the toolset that the trunk made of this pattern; begin one where it made none."""
    return live[pattern.key].fork() if pattern.key in live else kit.of_episode(pattern, env)


async def called(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """The result of a tool, its arguments checked, within its limit and if its breaker is closed. Raises as it does."""
    checked_arguments = tool.check(utf8_within(arguments))  # JSON lets a model write half a character
    async with AsyncExitStack() as held:
        if (limiter := _limiter(tool)) is not None:
            await held.enter_async_context(limiter)
        if tool.breaker is not None:
            await held.enter_async_context(breaker_of(tool.name, tool.breaker, tool.rest_s).closed())
        return await tool(**checked_arguments)


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


def _check_names(names: Sequence[str], cls: type[ToolEnv]) -> None:
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise ContractError(f"{cls.__name__} has two tools called {twice!r}")


class Kit:
    """A run's say in the tools of its environments: more of them, their settings, and what toolsets hold open."""

    def __init__(self, more: Sequence[str] = (), settings: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.more, self.settings = more, settings or {}
        self.shared: dict[str, Any] = {}
        self._of_class: dict[type[ToolEnv], list[Tool | Toolset]] = {}

    def tools_of(self, env: ToolEnv) -> list[Tool | Toolset]:
        """Its marked methods, then the tools it lists, then the run's; looked up once a class."""
        cls = type(env)
        if "tools" in vars(env):
            return self._resolved(cls, env.tools)
        if cls not in self._of_class:
            self._of_class[cls] = self._resolved(cls, cls.tools)
        return self._of_class[cls]

    def _resolved(self, cls: type[ToolEnv], tools: Sequence[Tool | Toolset | type[Toolset] | str]) -> list[Any]:
        attributes = {k: v for c in reversed(cls.__mro__) for k, v in vars(c).items()}
        methods = {k: v for k, v in attributes.items() if isinstance(v, Tool)}
        for k in methods:
            if hasattr(ToolEnv, k):
                raise ContractError(
                    f"the tool {cls.__name__}.{k} hides Env.{k}; rename the method, and say @tool(name={k!r})"
                )
        found = [*methods.values(), *(self._listed(cls, t) for t in (*tools, *self.more))]
        _check_names([t.name for t in found if isinstance(t, Tool)], cls)
        heard = {t.partition(":")[0] for t in (*tools, *self.more) if isinstance(t, str)}
        for name in self.settings:
            if name not in heard:
                raise ContractError(f"tool.{name}: {cls.__name__} has no tool of that name{nearest(name, heard)}")
        return found

    def _listed(self, cls: type[ToolEnv], given: Any) -> Tool | Toolset:
        if isinstance(given, str):
            return named(given, self.settings.get(given.partition(":")[0]))
        if isinstance(given, type) and issubclass(given, Toolset):
            return given()
        if not isinstance(given, Tool | Toolset):
            raise ContractError(
                f"{cls.__name__}.tools holds {given!r}, which is no tool; decorate it with @agentrl.tool"
            )
        return given

    @asynccontextmanager
    async def open(self, env: Env) -> AsyncIterator[None]:
        """Hold open what the toolsets of such environments share."""
        if not isinstance(env, ToolEnv):
            if self.more or self.settings:
                raise ContractError(f"{type(env).__name__} takes no tools; those of a ToolEnv can be added to")
            yield
            return
        async with AsyncExitStack() as held:
            for t in self.tools_of(env):
                if isinstance(t, Toolset) and t.key not in self.shared:
                    self.shared[t.key] = await held.enter_async_context(t.open())
            try:
                yield
            finally:
                self.shared.clear()

    def of_episode(self, toolset: Toolset, env: Env) -> Toolset:
        if toolset.key not in self.shared:
            raise ContractError(
                f"{type(env).__name__} uses the toolset {type(toolset).__name__}, which is not open: make the "
                "environment by `async with EnvSpec(...).open() as spec: spec.make()`, and list its tools in the class "
                "or in __init__"
            )
        return toolset.of_episode(self.shared[toolset.key])


_NO_KIT = Kit()


class EnvSpec:
    """An environment class and its settings: what makes a fresh environment for each episode."""

    def __init__(self, env: str | type[Env], **settings: Any) -> None:
        """Raises UserError for an unknown name, ContractError for what is no ``Env``, or for unknown settings."""
        cls, member = registry.member("env", env) if isinstance(env, str) else (env, None)
        short = env.partition(":")[0] if isinstance(env, str) else getattr(env, "__name__", "")
        registry.check_needs(f"env {short!r}", cls)
        if not (isinstance(cls, type) and issubclass(cls, Env)):
            raise ContractError(f"env {env!r} is {cls!r:.80}, not a subclass of agentrl.Env")
        self.cls: type[Env] = cls
        self.name = env if isinstance(env, str) else cls.__name__
        if member is not None and cls.named_by is not None:
            settings = {**settings, cls.named_by: member}
        self.settings = settings_of(cls, settings, f"env {self.name!r}", "env", (self.name, cls.named_by))
        self.kit = Kit()

    def equipped(self, tools: Sequence[str] = (), settings: Mapping[str, Mapping[str, Any]] | None = None) -> Self:
        """With more tools, by name, and with settings of tools. Raises UserError where there is none of that name."""
        self.kit = Kit(tools, settings)
        if not issubclass(self.cls, ToolEnv) and (tools or settings):
            raise ContractError(f"env {self.name!r} takes no tools; those of a ToolEnv can be added to")
        for name in tools:
            named(name, self.kit.settings.get(name.partition(":")[0]))
        return self

    @asynccontextmanager
    async def open(self) -> AsyncIterator[EnvSpec]:
        """Hold the run-wide state while the environments live."""
        async with self.cls.open_shared(**self.settings) as shared:
            self.shared = shared
            async with self.kit.open(self.make()):
                yield self

    def make(self) -> Env:
        env = self.cls(**self.settings)
        env.shared = self.shared
        if isinstance(env, ToolEnv):
            env.kit = self.kit
        return env

    shared: Any = None
