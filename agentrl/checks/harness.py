"""Episodes that an inspection harness, through the rollout as a run does, and what is seen while they go on."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import anyio

from agentrl.checks.thread_lag import measure_thread_lag
from agentrl.checks.untrained_policies import Policy, PolicyEngine, say_nothing
from agentrl.environments.spec import EnvSpec
from agentrl.errors import UserError
from agentrl.gateway.gateway import Gateway
from agentrl.rollout.episode import BeginEpisode, EpisodeLimits
from agentrl.rollout.rollout import Rollout
from agentrl.runtime.loop_watchdog import watch_event_loop
from agentrl.testing import ByteRenderer
from agentrl.tools.tool import Tool
from agentrl.types import JsonSchema, Message, Stop, Trajectory

LIMIT_S = 0.1  # for which a function may hold up the event loop
MAX_TURNS = 12
LIMITS = EpisodeLimits(max_tokens=1 << 30, turn_timeout_s=30.0, episode_timeout_s=60.0)


class EpisodeHarness:
    """Plays episodes of an open spec and keeps them; each list of tasks that is played is a round."""

    def __init__(self, spec: EnvSpec, tools: Sequence[Tool] = ()) -> None:
        self.spec = spec
        self.begin: BeginEpisode | None = None
        self.set_tools(tools)
        self.played: list[Trajectory] = []
        self.broken_contracts: dict[str, None] = {}  # sentences, in the order they came up
        self.blocking: dict[str, tuple[str, float]] = {}  # a function, the sentence on it, and for how many seconds
        self.rounds: Counter[str] = Counter()  # how many rounds each function did it in
        self._of_round: set[str] = set()
        turns = min(spec.sample().max_turns, MAX_TURNS)
        self.limits = EpisodeLimits(turns, LIMITS.max_tokens, LIMITS.turn_timeout_s, LIMITS.episode_timeout_s)

    def set_tools(self, tools: Sequence[Tool]) -> None:
        """Set the tools that policies may call, and whose functions may be named."""
        self.tools: list[JsonSchema] = [t.schema for t in tools]
        functions = (t.function.func if isinstance(t.function, partial) else t.function for t in tools)
        self._whose = _files([*(c.__module__ for c in self.spec.cls.__mro__), *(f.__module__ for f in functions)])

    async def play(
        self,
        policy: Policy | Sequence[Policy],
        tasks: Sequence[int],
        *,
        seed: int | None = None,
        together: bool = False,
        split: str = "train",
    ) -> list[Trajectory | None]:
        """Play one episode a task, one after another or all at once; ``None`` where a contract was broken.

        Args:
            policy: of all, or one for each.
            seed: of the policy, the same for every task; each task's own by default.
        """
        policies = [policy] * len(tasks) if callable(policy) else policy
        trajectories: list[Trajectory | None] = [None] * len(tasks)

        async def one(index: int) -> None:
            engine = PolicyEngine(policies[index], self.tools)
            rollout = Rollout(self.spec, engine, ByteRenderer(), self.limits, split=split)
            rollout.begin = self.begin
            try:
                trajectories[index] = await rollout.episode(tasks[index], seed=tasks[index] if seed is None else seed)
            except UserError as error:
                self.broken_contracts[str(error)] = None

        with measure_thread_lag() as lag, watch_event_loop(self._blocked, LIMIT_S, whose=self._whose):
            async with anyio.create_task_group() as episodes:
                for index in range(len(tasks)):
                    if together:
                        episodes.start_soon(one, index)
                    else:
                        await one(index)
            await anyio.sleep(LIMIT_S / 3)  # a beat of the watchdog, which reports the last
        if lag.worst_s < LIMIT_S / 2:  # otherwise the machine is busy, and nobody here is to blame
            self.rounds.update(self._of_round)
        self._of_round.clear()
        self.played += [t for t in trajectories if t is not None]
        return trajectories

    async def openings(
        self, tasks: Sequence[int], *, rng_seed: int = 0, together: bool = False, split: str = "train"
    ) -> list[str]:
        """Describe what each task begins with, as text to compare.

        Args:
            rng_seed: of Python's and numpy's own generators.
        """
        with seed_global_rng(rng_seed):
            played = await self.play(say_nothing, tasks, together=together, split=split)
        return [_describe_opening(t) for t in played]

    def _blocked(self, sentence: str) -> None:
        function = sentence.partition(" by ")[2].partition(":")[0]
        seconds = float(sentence.partition(" for ")[2].partition(" s ")[0])
        if seconds > self.blocking.get(function, ("", 0.0))[1]:
            self.blocking[function] = sentence, seconds
        self._of_round.add(function)


@asynccontextmanager
async def open_harness(spec: EnvSpec) -> AsyncIterator[EpisodeHarness]:
    """Open an environment, with the endpoint that it plays against where it plays itself; yield a harness for it."""
    async with spec.open():
        harness = EpisodeHarness(spec)
        if not spec.brings_agent:
            yield harness
            return
        async with Gateway(None, episodes=sys.maxsize).open() as gateway:
            harness.begin = gateway.begin
            yield harness


def _files(modules: Sequence[str]) -> tuple[str, ...]:
    """Return the files of the modules, or the folders of their packages, without agentrl's own."""
    tops = {m.partition(".")[0] for m in modules} - {"agentrl", "builtins", "abc"}
    files = (getattr(sys.modules.get(top), "__file__", None) for top in tops)
    return tuple(f.removesuffix("__init__.py") for f in files if f)


def _describe_opening(trajectory: Trajectory | None) -> str:
    """Return the messages before the model's first, as text, or the reason why there are none."""
    if trajectory is None:
        return "a broken contract"
    if trajectory.fault is not None and trajectory.fault.kind == "env_reset":
        return "a fault"
    return _show(_list_opening_messages(trajectory))


def _list_opening_messages(trajectory: Trajectory) -> list[Message]:
    messages = list(trajectory.messages)
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    return messages[:first]


def _show(value: Any) -> str:
    return repr(value)


def describe_course(trajectory: Trajectory | None) -> list[tuple[str, str]]:
    """Return the parts of an episode as (name, text), to be compared with those of another one."""
    if trajectory is None:
        return [("contract", "broken")]
    messages = [(f"message {i} ({m['role']})", _show(m)) for i, m in enumerate(trajectory.messages)]
    ends = {"rewards": dict(trajectory.rewards), "step rewards": trajectory.step_rewards, "end": trajectory.stop.value}
    return [*messages, *((name, _show(value)) for name, value in ends.items())]


def find_difference(one: Trajectory | None, other: Trajectory | None) -> str | None:
    """The first part in which two episodes differ; none where an infrastructure error ended one."""
    if any(t is None or t.stop in (Stop.FAULT, Stop.TIMEOUT) for t in (one, other)):
        return None
    for (part, first), (_, second) in zip(describe_course(one), describe_course(other), strict=False):
        if first != second:
            return f"{part}: {first:.100} and {second:.100}"
    return None


@contextmanager
def seed_global_rng(seed: int) -> Iterator[None]:
    """Seed Python's and numpy's own generators while the block runs; restore them afterwards."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), numpy.random.get_state() if numpy else None
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        if numpy and before[1]:
            numpy.random.set_state(before[1])
