"""Environments: Gymnasium's contract, async, where an action is an assistant message and a task is an integer."""

from __future__ import annotations

import copy
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, Self

import anyio
from typing_extensions import TypeVar

from agentrl.environments.tool_binding import ToolBinding, ToolSpec, check_tool_names
from agentrl.errors import ContractError, NoExpertError, ToolError
from agentrl.runtime.lanes import Track
from agentrl.runtime.threads import SerialThread, open_task_group
from agentrl.tools.call import call_tool
from agentrl.tools.tool import Tool
from agentrl.tools.toolset import Toolset
from agentrl.types import ERROR_PREFIX, CallRecord, ExpertTurn, Message, Observation, Reply, Step, ToolCall, Trajectory

Shared = TypeVar("Shared", default=Any)


class Env(Generic[Shared]):
    """The environment of one episode. A fresh object is made for each episode, and always closed.

    Subclasses write ``reset`` and ``step``, and take their settings (``--env.NAME value``) as keyword arguments of
    ``__init__``. What is expensive and shared is made once a run in ``open_shared`` and found as ``self.shared``; its
    type is the argument of the class: ``class Quiz(Env[Index])``.
    """

    sync: ClassVar[bool] = False  # True: methods that are plain `def` run in a thread of the episode's own
    max_turns: int = 8
    reward_weights: Mapping[str, float] = {}
    scores_groups: bool = False  # whether `score_group` is called, once all episodes of a group have ended
    metrics: Mapping[str, float] = {}  # of the episode, logged beside its rewards: means in metrics.jsonl
    extras: Mapping[str, Any] = {}  # of the episode, kept in its ``info``
    template_words: Mapping[str, Any] = {}  # of this episode, for the model's chat template: {"enable_thinking": False}
    best_reward: float = 1.0  # of a perfect episode; `agentrl check env` measures by it
    worst_reward: float = 0.0  # of the worst one: what an episode earns at most that provoked a fault
    shared: Shared = None  # type: ignore[assignment]  # until a spec has set it
    call_records: Sequence[CallRecord] = ()  # the tool calls of the episode so far, as they ended
    running_calls: Mapping[str, str] = {}  # tools being called now, by the call's id
    _track: Track | None = None  # of the episode, through the lanes of the run
    _thread: SerialThread | None = None  # of a sync environment
    needs: ClassVar[Mapping[str, str]] = {}  # packages beyond the plain install: modules, and extras that bring them
    named_by: ClassVar[str | None] = None  # the setting that ``NAME:VALUE`` gives, for a family of environments

    def __init__(self) -> None: ...

    @classmethod
    @asynccontextmanager
    async def open_shared(cls, **settings: Any) -> AsyncIterator[Shared]:
        """Open the run-wide state, given the settings of ``__init__``: a dataset, a pool, a session."""
        yield None  # type: ignore[misc]

    def list_splits(self) -> Sequence[str]:
        """List the splits that ``options["split"]`` may name; those beside ``train`` are for evaluation."""
        return ("train", "test")

    def count(self, split: str) -> int | None:
        """Return the number of tasks in a split (``train``, ``test``); ``None``: as many as there are integers."""
        return None

    async def reset(
        self, *, seed: int, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, Mapping[str, object]]:
        """Begin task ``seed``: the same seed and options give the same task. ``options["split"]`` is set."""
        raise ContractError(f"{type(self).__name__} has no method `reset`")

    async def step(self, action: Reply) -> Step:
        """Answer one turn of the model."""
        raise ContractError(f"{type(self).__name__} has no method `step`")

    async def score(self, trajectory: Trajectory) -> Mapping[str, float | None]:
        """Score the finished episode: rewards by name, ``None`` for one that does not apply.

        By default it is the sum of the steps' rewards.
        """
        return {"reward": sum(trajectory.step_rewards)}

    async def score_group(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Compare the episodes of a group; return them, each `Trajectory.with_rewards` of this comparison.

        Called where ``scores_groups`` is true, after each member's own `score`, on the environment of the first, which
        is closed by then. Members that ended in a fault are not among them. It is bounded as `score` is.
        """
        return trajectories

    def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
        """Play this episode well, from the model's side, after ``reset``: an async generator (optional).

        It yields each of the assistant's turns, a text, a `ToolCall` or several, or a `Reply`, and ``yield`` returns
        the messages that answered it. ``agentrl sft`` learns from it, ``agentrl play --expert`` shows it, and
        ``agentrl check env`` says what it earns. It is closed where the episode ends.

        Raises:
            NoExpertError: there is none, or none for this task.
        """
        raise NoExpertError(
            f"{type(self).__name__} has no expert: write `async def expert(self)`, which yields each of the model's "
            "turns and is given the messages that answer it (docs/write-an-environment.md)"
        )

    async def summarize(self, messages: list[Message]) -> str:
        """Write the summary of an episode that the expert plays, where its context is folded (optional).

        What the expert yields behind it can rest on the task and on this text alone. It is trained as its turns are:
        ``agentrl sft --rollout.context fold`` learns from each context as the model is asked to write it.

        Args:
            messages: that answered the expert's last turn; ``yield`` in `expert` returns them too, afterwards.

        Raises:
            NoExpertError: it writes none.
        """
        raise NoExpertError(
            f"{type(self).__name__} has no `summarize`, which writes the summaries of its expert where contexts are "
            "folded (rollout.context): define it, or demonstrate whole contexts (docs/write-an-environment.md)"
        )

    async def health_check(self) -> None:
        """Raise if the world that ``step`` and ``score`` depend on does not work now.

        Called on a fresh environment, which was not reset, when an episode ended in a fault: where this passes, the
        episode's own request provoked the fault. Without it the other episodes are the evidence (docs/faults.md).
        """
        raise NotImplementedError

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
            if name not in _CACHED:
                other.__dict__[name] = value if name in _OF_THE_RUN else copy.deepcopy(value, memo)
        return other

    async def close(self) -> None:
        """Release the resources of this episode."""

    async def close_tools(self) -> None:
        """Release the resources of its tools; called after ``close``."""

    @property
    def is_left_behind(self) -> bool:
        """Return True if a sync method was given up while it ran, in a thread that nothing can interrupt."""
        return self._thread is not None and self._thread.abandoned

    @property
    def tool_list(self) -> Sequence[Tool]:
        """List the tools that the model may call."""
        return ()


class ToolEnv(Env[Shared]):
    """An environment made of tools: it runs the calls of a turn together, and ends when a turn makes none.

    ``tools`` lists tools, toolsets, names from the registry, or nothing at all; methods marked ``@tool`` belong to it
    too.
    """

    system_prompt: str = ""
    tools: Sequence[ToolSpec] = ()
    call_records: list[CallRecord]
    running_calls: dict[str, str]
    _turn: int
    _episode_number: int  # of the episode, among those whose calls are compared
    tool_binding: ToolBinding | None = None  # the tools of the run

    def __new__(cls, *_: Any, **__: Any) -> Self:  # and no __init__, which a subclass may forget to call
        self = super().__new__(cls)
        self._episode_number = next(_count)
        self.call_records, self.running_calls = [], {}
        self._turn = 0
        return self

    @classmethod
    def marked_tools(cls) -> list[Tool]:
        """List the methods marked ``@tool``. Raises ContractError where one hides an attribute of ``ToolEnv``."""
        attributes = {k: v for c in reversed(cls.__mro__) for k, v in vars(c).items()}
        methods = {k: v for k, v in attributes.items() if isinstance(v, Tool)}
        for k in methods:
            if hasattr(ToolEnv, k):
                raise ContractError(
                    f"the tool {cls.__name__}.{k} hides Env.{k}; rename the method, and say @tool(name={k!r})"
                )
        return list(methods.values())

    @property
    def has_tools(self) -> bool:
        """Return True if it lists a tool or a toolset; nothing is opened."""
        return bool((self.tool_binding or _UNBOUND).list_patterns(self))

    @cached_property
    def _listed(self) -> list[Tool | Toolset]:
        """Return this episode's own toolsets, and the tools beside them."""
        binding = self.tool_binding or _UNBOUND
        patterns = binding.list_patterns(self)
        return [binding.start_toolset(t, self) if isinstance(t, Toolset) else t for t in patterns]

    @cached_property
    def _tools(self) -> dict[str, Tool]:
        listed = [t.bind(self, self._thread) if isinstance(t, Tool) and t.is_method else t for t in self._listed]
        tools = [t for one in listed for t in (one.checked_tools() if isinstance(one, Toolset) else [one])]
        check_tool_names([t.name for t in tools], type(self))
        return {t.name: t for t in tools}

    def fork_tools(self, trunk: ToolEnv) -> None:
        """Give a clone tools, call records and toolsets of its own, in the state of those of its trunk.

        Raises:
            ContractError: a toolset cannot be forked, or a tool is bound to the trunk.
        """
        self.tool_binding = binding = trunk.tool_binding or _UNBOUND
        self.call_records, self.running_calls, self._turn = list(trunk.call_records), {}, trunk._turn
        for name in _CACHED:
            self.__dict__.pop(name, None)
        patterns = binding.list_patterns(self)
        for t in patterns:
            if isinstance(t, Tool) and _holds(t.function, trunk):
                raise ContractError(
                    f"the tool {t.name!r} of a clone acts on the {type(self).__name__} that was cloned, to which its "
                    "function is bound: write it as a method marked @tool, or make it anew in clone()"
                )
        if "_listed" in vars(trunk):
            pairs = zip(binding.list_patterns(trunk), trunk._listed, strict=True)
            live = {p.key: t for p, t in pairs if isinstance(p, Toolset) and isinstance(t, Toolset)}
            self._listed = [
                t if isinstance(t, Tool) else live[t.key].fork() if t.key in live else binding.start_toolset(t, self)
                for t in patterns
            ]

    async def close_tools(self) -> None:
        for t in self.__dict__.get("_listed", ()):
            if isinstance(t, Toolset):
                await t.close()

    @property
    def tool_list(self) -> Sequence[Tool]:
        return tuple(self._tools.values())

    def ask(self, question: str) -> list[Message]:
        """Return the first observation: the system prompt, if there is one, and a question."""
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

    async def _answer_all(self, calls: Sequence[ToolCall], results: Sequence[Message]) -> None:
        async with open_task_group() as tasks:
            for call, result in zip(calls, results, strict=True):
                tasks.start_soon(self._answer, call, result)

    async def _answer(self, call: ToolCall, message: Message) -> None:
        """Run one call and write its result, or the reason why there is none, into its message."""
        message["tool_call_id"], message["name"] = call.id, call.name
        started, status, turn = anyio.current_time(), "cancelled", self._turn
        self.running_calls[call.id] = call.name
        track = None
        try:
            if self._track is not None and call.error is None and call.name in self._tools:
                track = self._track
                track.call(call.name)
            message["content"] = await self._run(call)
            status = "ok"
        except ToolError as error:
            message["content"], message["is_error"], status = f"{ERROR_PREFIX}{error}", True, error.kind
        except Exception as error:
            status = getattr(error, "kind", "error")
            raise
        finally:
            if track is not None:
                track.returned(call.name)
            self.running_calls.pop(call.id, None)
            seconds = anyio.current_time() - started
            self.call_records.append(CallRecord(turn, call.name, status, seconds, call.span))

    async def _run(self, call: ToolCall) -> str:
        if call.error is not None:
            raise ToolError(call.error, kind="parse")
        if call.name not in self._tools:
            known = ", ".join(self._tools)
            raise ToolError(f"unknown tool {call.name!r}; the tools are: {known}", kind="unknown_tool")
        return await call_tool(self._tools[call.name], call.arguments, self._episode_number)


_count = itertools.count()
_UNBOUND = ToolBinding()
_CACHED = ("_listed", "_tools")  # what a ToolEnv keeps of its tools
_OF_THE_RUN = ("shared", "tool_binding", "tools", "_thread")


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
