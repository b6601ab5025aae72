"""Episodes that an inspection plays, through the rollout as a run does, and what is seen while they go on."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio

from agentrl.blocking import blocking_told
from agentrl.env import EnvSpec
from agentrl.episode import Limits
from agentrl.errors import UserError
from agentrl.inspection.lateness import measured
from agentrl.inspection.policies import Player, Policy, nothing
from agentrl.rollout import Rollout
from agentrl.testing import ByteRenderer
from agentrl.tool import Tool
from agentrl.types import JsonSchema, Message, Stop, Trajectory

LIMIT_S = 0.1  # for which a function may hold up the event loop
MAX_TURNS = 12
LIMITS = Limits(max_turn_tokens=1 << 30, turn_timeout_s=30.0, episode_timeout_s=60.0)


class Plays:
    """An open spec's episodes; each list of tasks that is played is a round."""

    def __init__(self, spec: EnvSpec, tools: Sequence[Tool] = ()) -> None:
        self.spec = spec
        self.know(tools)
        self.played: list[Trajectory] = []
        self.refused: dict[str, None] = {}  # sentences on broken contracts, in the order they came up
        self.blocking: dict[str, tuple[str, float]] = {}  # a function, the sentence on it, and for how many seconds
        self.rounds: Counter[str] = Counter()  # how many rounds each function did it in
        self._of_round: set[str] = set()
        turns = min(spec.make().max_turns, MAX_TURNS)
        self.limits = Limits(turns, LIMITS.max_turn_tokens, LIMITS.turn_timeout_s, LIMITS.episode_timeout_s)

    def know(self, tools: Sequence[Tool]) -> None:
        """These are the tools: policies may call them, and their functions be named."""
        self.tools: list[JsonSchema] = [t.schema for t in tools]
        functions = (t.function.func if isinstance(t.function, partial) else t.function for t in tools)
        self._whose = _files([*(c.__module__ for c in self.spec.cls.__mro__), *(f.__module__ for f in functions)])

    async def play(
        self,
        policy: Policy | Sequence[Policy],
        tasks: Sequence[int],
        *,
        dice: int | None = None,
        together: bool = False,
        split: str = "train",
    ) -> list[Trajectory | None]:
        """One episode a task, one after another or all at once; ``None`` where a contract was broken.

        Args:
            policy: of all, or one for each.
            dice: of the policy, the same for every task; each task's own by default.
        """
        policies = [policy] * len(tasks) if callable(policy) else policy
        found: list[Trajectory | None] = [None] * len(tasks)

        async def one(place: int) -> None:
            player = Player(policies[place], self.tools)
            rollout = Rollout(self.spec, player, ByteRenderer(), self.limits, split=split)
            try:
                found[place] = await rollout.episode(tasks[place], seed=tasks[place] if dice is None else dice)
            except UserError as error:
                self.refused[str(error)] = None

        with measured() as lateness, blocking_told(self._blocked, LIMIT_S, whose=self._whose):
            async with anyio.create_task_group() as episodes:
                for place in range(len(tasks)):
                    if together:
                        episodes.start_soon(one, place)
                    else:
                        await one(place)
            await anyio.sleep(LIMIT_S / 3)  # a beat of the watch, which tells of the last
        if lateness.worst_s < LIMIT_S / 2:  # otherwise the machine is busy, and nobody here is to blame
            self.rounds.update(self._of_round)
        self._of_round.clear()
        self.played += [t for t in found if t is not None]
        return found

    async def openings(
        self, tasks: Sequence[int], *, dice: int = 0, together: bool = False, split: str = "train"
    ) -> list[str]:
        """What each task begins with, as text to compare; ``dice``: of Python's and numpy's own generators."""
        with global_dice(dice):
            played = await self.play(nothing, tasks, together=together, split=split)
        return [opening(t) for t in played]

    def _blocked(self, sentence: str) -> None:
        function = sentence.partition(" by ")[2].partition(":")[0]
        seconds = float(sentence.partition(" for ")[2].partition(" s ")[0])
        if seconds > self.blocking.get(function, ("", 0.0))[1]:
            self.blocking[function] = sentence, seconds
        self._of_round.add(function)


def _files(modules: Sequence[str]) -> tuple[str, ...]:
    """The files of the modules, or the folders of the packages they are in, but agentrl's own."""
    tops = {m.partition(".")[0] for m in modules} - {"agentrl", "builtins", "abc"}
    files = (getattr(sys.modules.get(top), "__file__", None) for top in tops)
    return tuple(f.removesuffix("__init__.py") for f in files if f)


def opening(trajectory: Trajectory | None) -> str:
    """The messages before the model's first; why there are none, where there are none."""
    if trajectory is None:
        return "a broken contract"
    if trajectory.fault is not None and trajectory.fault.kind == "env_reset":
        return "a fault"
    return shown(before_the_model(trajectory))


def before_the_model(trajectory: Trajectory) -> list[Message]:
    messages = list(trajectory.messages)
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    return messages[:first]


def shown(value: Any) -> str:
    return repr(value)


def course(trajectory: Trajectory | None) -> list[tuple[str, str]]:
    """All that an episode came to, part by part, to be compared with that of another one."""
    if trajectory is None:
        return [("contract", "broken")]
    messages = [(f"message {i} ({m['role']})", shown(m)) for i, m in enumerate(trajectory.messages)]
    ends = {"rewards": dict(trajectory.rewards), "step rewards": trajectory.step_rewards, "end": trajectory.stop.value}
    return [*messages, *((name, shown(value)) for name, value in ends.items())]


def difference(one: Trajectory | None, other: Trajectory | None) -> str | None:
    """The first part in which two episodes differ; none where one met the world's failure."""
    if any(t is None or t.stop in (Stop.FAULT, Stop.TIMEOUT) for t in (one, other)):
        return None
    for (part, first), (_, second) in zip(course(one), course(other), strict=False):
        if first != second:
            return f"{part}: {first:.100} and {second:.100}"
    return None


@contextmanager
def global_dice(seed: int) -> Iterator[None]:
    """Inside, the generators that a whole process shares begin at ``seed``; afterwards they are as before."""
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
