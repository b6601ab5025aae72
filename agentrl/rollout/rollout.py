"""Play: an episode, a group, a batch of groups. No torch here, and no barrier: each episode goes at its own pace.

An episode is generate -> environment -> generate ... The context handed to the engine is exactly the concatenation
of the segments so far; what the model sampled is never encoded again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, overload

import anyio
import anyio.lowlevel

from agentrl.admission import Admission
from agentrl.aside import together
from agentrl.config import RolloutConfig
from agentrl.engine import Engine, Meter
from agentrl.env import Env, EnvSpec
from agentrl.episode import METHODS, Branching, Episode, Limits, mixed
from agentrl.errors import ConfigError, UserError, WorldFault
from agentrl.group_scoring import score_group
from agentrl.lanes import Lanes, Track
from agentrl.offered_tools import OfferedTools
from agentrl.renderer import Renderer
from agentrl.tasks import task_index
from agentrl.types import (
    Fault,
    Group,
    SamplingParams,
    Stop,
    Trajectory,
)
from agentrl.waits import Wait

Watch = Callable[[Trajectory], None]


@dataclass
class Rollout:
    """What every episode of a run shares.

    ``reset`` and ``score`` of an environment are bounded by ``turn_timeout_s`` as ``step`` is.
    """

    spec: EnvSpec
    engine: Engine
    renderer: Renderer
    limits: Limits = field(default_factory=Limits)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    split: str = "train"
    options: Mapping[str, Any] = field(default_factory=dict)
    branching: Branching | None = None
    spare: int = 0  # episodes that a group begins beyond its size; whoever has not ended when it is full is cancelled
    turns: int = 0  # that have ended, of all episodes
    tokens: int = 0  # that were sampled in them
    playing: set[Episode] = field(default_factory=set)
    comparing: list[tuple[str, float]] = field(default_factory=list)  # groups that are being scored, since when
    lanes: Lanes = field(default_factory=Lanes)
    offered: OfferedTools = field(default_factory=OfferedTools)

    def __post_init__(self) -> None:
        self.admission = Admission(self.engine.capacity)

    @classmethod
    def configured(cls, config: RolloutConfig, spec: EnvSpec, engine: Engine, renderer: Renderer, split: str) -> Self:
        limits = Limits(config.max_turns, config.max_turn_tokens, config.turn_timeout_s, config.episode_timeout_s)
        rollout = cls(spec, engine, renderer, limits, SamplingParams(temperature=config.temperature), split)
        if split == "train":
            rollout.spare = config.spare
            rollout.branching = Branching(config.branch_turn, config.branches) if config.branches > 1 else None
        return rollout

    def waits(self) -> list[Wait]:
        """Who waits on what now: one for each episode that is being played."""
        now = self.lanes.clock()
        limit = self.limits.turn_timeout_s
        waits = [
            Wait(play.waits_on(), now - play.since, None if play.stage == "generate" else limit)
            for play in self.playing
        ]
        return waits + [Wait(method, now - since, limit) for method, since in self.comparing]

    @property
    def progress(self) -> tuple[object, ...]:
        """Return what stands still where nothing goes on: turns that ended, and what the engine has sampled."""
        meter = getattr(self.engine, "meter", None)
        return (self.turns, *(meter.signs_of_life() if isinstance(meter, Meter) else ()))

    async def batch(self, tasks: Sequence[int], size: int, *, seed: int = 0, watch: Watch | None = None) -> list[Group]:
        """Play ``size`` episodes of every task, all at once; the groups in the order of the tasks.

        Args:
            seed: makes the sampling reproducible: the randomness of a turn depends on it, the task, the member and
                the turn, and on nothing that happens beside it.
            watch: told of every episode as it ends.

        Raises:
            UserError: an environment, tool or reward broke its contract.
        """
        played: dict[int, Group] = {}

        async def play(place: int) -> None:
            first = (size + self.spare) * tasks[:place].count(tasks[place])  # a task given twice gets other dice
            played[place] = await self.group(tasks[place], size, seed=seed, first=first, watch=watch)

        async with together() as players:
            for place in range(len(tasks)):
                players.start_soon(play, place)
                await anyio.lowlevel.checkpoint()  # the engine begins with one group while the next is reset
        return [played[place] for place in range(len(tasks))]

    async def group(
        self,
        task: int,
        size: int,
        *,
        seed: int = 0,
        first: int = 0,
        options: Mapping[str, Any] | None = None,
        watch: Watch | None = None,
    ) -> Group:
        """Play ``size`` episodes of a task, all at once.

        Args:
            first: the number of the first episode's dice.
            options: for the environment's ``reset``, the same for all.

        Raises:
            UserError: the environment, a tool or a reward broke its contract.
        """
        played: dict[int, Trajectory] = {}
        envs: dict[int, Env | None] = {}

        def ended(member: int, play: Episode, trajectory: Trajectory) -> None:
            if len(played) < size:
                played[member], envs[member] = trajectory, play.env
                if watch is not None and not _waits_for_group(play.env, trajectory):
                    watch(trajectory)
            if len(played) == size:
                players.cancel_scope.cancel()  # whoever was begun to spare

        def begun(member: int) -> Episode:
            return Episode(self, task, mixed(seed, task_index(task), first + member), options or {})

        async def alone(member: int) -> None:
            async with self.admission.place():
                trajectory = await self._played(play := begun(member))
            ended(member, play, trajectory)

        async def tree(root: int, members: Sequence[int]) -> None:
            trunk = begun(root)
            async with self.admission.place():
                early = await self._played(trunk, until=until(len(members)))
            if early is not None:
                ended(root, trunk, early)  # before it could branch: the others are episodes of their own
                for member in members:
                    players.start_soon(alone, member)
                return
            forks, trunk.forks = trunk.forks, []  # from here on their own
            for member, play in zip((root, *members), (trunk, *forks), strict=True):
                players.start_soon(branch, member, play)

        def until(others: int) -> Branching | None:
            return Branching(self.branching.turn, 1 + others) if self.branching and others else None

        async def branch(member: int, play: Episode) -> None:
            ended(member, play, await self._played(play))

        everyone = range(size + self.spare)
        width = self.branching.branches if self.branching else 1
        async with together() as players:
            for root in everyone[::width]:
                if width == 1:
                    players.start_soon(alone, root)
                else:
                    players.start_soon(tree, root, everyone[root + 1 : root + width])
        members = sorted(played)
        return Group(task, tuple(await self._compared([(envs[m], played[m]) for m in members], watch)))

    async def _compared(
        self, members: Sequence[tuple[Env | None, Trajectory]], watch: Watch | None = None
    ) -> list[Trajectory]:
        """Score the members together where their environment does that, and tell whoever watches of those."""
        trajectories = [t for _, t in members]
        env = next((env for env, t in members if env is not None and _waits_for_group(env, t)), None)
        if env is None:
            return trajectories
        track, now = Track(self.lanes), self.lanes.clock()
        comparing = (f"{type(env).__name__}.score_group", now)
        self.comparing.append(comparing)
        track.enter("score", now)
        try:
            scored = await score_group(env, trajectories, self.limits.turn_timeout_s)
        finally:
            self.comparing.remove(comparing)
            track.leave(self.lanes.clock())
        self.lanes.ended(track)
        for member, trajectory in zip(members, scored, strict=True):
            if watch is not None and _waits_for_group(*member):
                watch(trajectory)
        return scored

    async def episode(self, task: int, *, seed: int = 0) -> Trajectory:
        """Play one episode to its end and score it. The world's failures are in ``Trajectory.fault``, never raised.

        Raises:
            UserError: the environment or a tool broke its contract.
        """
        trajectory = await self._played(play := Episode(self, task, seed, {}))
        return (await self._compared([(play.env, trajectory)]))[0]

    @overload
    async def _played(self, play: Episode) -> Trajectory: ...
    @overload
    async def _played(self, play: Episode, until: Branching | None) -> Trajectory | None: ...
    async def _played(self, play: Episode, until: Branching | None = None) -> Trajectory | None:
        """What an episode comes to; nothing where it branches before."""
        self.playing.add(play)
        branched = False
        try:
            with anyio.move_on_after(self.limits.episode_timeout_s) as deadline:
                branched = await play.run(until)
            if deadline.cancelled_caught:
                limit = f"over {self.limits.episode_timeout_s:g} s, in {play.where()}"
                play.end(Stop.TIMEOUT, Fault("episode_timeout", limit))
        except UserError:
            raise
        except WorldFault as fault:
            play.end(Stop.FAULT, Fault(fault.kind, str(fault)))
        except Exception:  # the other of the two boundaries: around an episode
            if play.stage not in METHODS:
                raise  # the engine and the renderer are ours
            play.end(
                Stop.FAULT, Fault(f"env_{METHODS[play.stage]}", f"{play.where()}: {traceback.format_exc(limit=-4)}")
            )
        finally:
            if not branched:
                self.playing.discard(play)
                await play.close()
        if branched:
            return None
        self.lanes.ended(play.track)
        return play.trajectory()


def _waits_for_group(env: Env | None, trajectory: Trajectory) -> bool:
    """Return True if an episode is not scored until its group is."""
    return env is not None and env.scores_groups and trajectory.fault is None


def check_deadlines(spec: EnvSpec, turn_timeout_s: float) -> None:
    """Deadlines nest: a tool's is within the environment's turn, whose own is within the episode's.

    Raises:
        ConfigError: a tool may take longer than the turn that waits for it.
    """
    for t in spec.make().tool_list:
        if t.longest_s > turn_timeout_s:
            tries = f"{t.retries + 1} tries of {t.timeout_s:g} s" if t.retries else "its timeout_s"
            raise ConfigError(
                f"rollout.turn_timeout_s {turn_timeout_s:g} is under the {t.longest_s:g} s that tool {t.name!r} "
                f"may take ({tries}); raise it, or lower the tool's"
            )
