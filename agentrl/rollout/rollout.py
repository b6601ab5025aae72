"""Roll out: an episode, a group, a batch of groups. No torch here, and no barrier: each episode has its own pace.

An episode is generate -> environment -> generate ... The context handed to the engine is exactly the concatenation
of the segments so far; what the model sampled is never encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import anyio
import anyio.lowlevel

from agentrl.environments.env import Env
from agentrl.environments.spec import EnvSpec
from agentrl.errors import ConfigError
from agentrl.renderer import Renderer
from agentrl.renderer.stop_strings import StopStrings
from agentrl.rollout.engine_protocol import Engine, Meter
from agentrl.rollout.episode import Branching, EpisodeContext, EpisodeLimits
from agentrl.rollout.folding import Folding
from agentrl.rollout.group import GroupRollout
from agentrl.rollout.group_scoring import score_group
from agentrl.rollout.provenance import settle_faults
from agentrl.runtime.lanes import Track
from agentrl.runtime.stalls import Wait
from agentrl.runtime.threads import open_task_group
from agentrl.settings.registry import load_entry
from agentrl.settings.schema import RolloutConfig
from agentrl.types import Group, SamplingParams, Trajectory

EpisodeCallback = Callable[[Trajectory], None]


@dataclass
class Rollout(EpisodeContext):
    """Rolls out episodes and groups of a run, all of which share this context."""

    branching: Branching | None = None
    oversample: int = 0  # episodes that a group starts beyond its size; the slowest are cancelled
    cancelled: int = 0  # episodes that were started and then not needed
    scoring: list[tuple[str, float]] = field(default_factory=list)  # groups that are being scored, since when

    @classmethod
    def from_config(cls, config: RolloutConfig, spec: EnvSpec, engine: Engine, renderer: Renderer, split: str) -> Self:
        """Build the rollout of a split; only ``train`` oversamples and branches."""
        limits = EpisodeLimits(
            config.max_turns,
            config.max_tokens,
            config.turn_timeout_s,
            config.episode_timeout_s,
            config.max_episode_tokens,
        )
        rollout = cls(spec, engine, renderer, limits, _build_sampling(config, renderer), split)
        if config.context != "whole":
            budget = config.context_budget or 0
            rollout.folding = Folding(load_entry("context", config.context), budget, config.summary_tokens)
        if split == "train":
            rollout.oversample = config.oversample
            rollout.branching = Branching(config.branch_turn, config.branches) if config.branches > 1 else None
        return rollout

    def waits(self) -> list[Wait]:
        """List what is waited for now: one entry for each running episode, and each group that is scored."""
        now = self.lanes.clock()
        limit = self.limits.turn_timeout_s
        waits = [
            Wait(episode.describe_wait(), now - episode.since, None if episode.stage == "generate" else limit)
            for episode in self.running
        ]
        return waits + [Wait(method, now - since, limit) for method, since in self.scoring]

    @property
    def progress(self) -> tuple[object, ...]:
        """Return a value that stays the same while nothing happens: turns that ended, and the engine's counters."""
        meter = getattr(self.engine, "meter", None)
        return (self.turns, *(meter.signs_of_life() if isinstance(meter, Meter) else ()))

    async def batch(
        self, tasks: Sequence[int], size: int, *, seed: int = 0, on_episode: EpisodeCallback | None = None
    ) -> list[Group]:
        """Roll out ``size`` episodes of every task, all at once; return the groups in the order of the tasks.

        Args:
            seed: makes the sampling reproducible: the randomness of a turn depends on it, the task, the member and
                the turn, and on nothing that happens beside it.
            on_episode: called with every episode as it ends.

        Raises:
            UserError: an environment, tool or reward broke its contract.
        """
        groups: dict[int, Group] = {}

        async def roll_out(index: int) -> None:
            first = (size + self.oversample) * tasks[:index].count(tasks[index])  # a task given twice gets other seeds
            groups[index] = await self.group(tasks[index], size, seed=seed, first=first, on_episode=on_episode)

        async with open_task_group() as workers:
            for index in range(len(tasks)):
                workers.start_soon(roll_out, index)
                await anyio.lowlevel.checkpoint()  # the engine begins with one group while the next is reset
        return [groups[index] for index in range(len(tasks))]

    async def group(
        self,
        task: int,
        size: int,
        *,
        seed: int = 0,
        first: int = 0,
        options: Mapping[str, Any] | None = None,
        on_episode: EpisodeCallback | None = None,
    ) -> Group:
        """Roll out ``size`` episodes of a task, all at once.

        Args:
            first: the number of the first episode's seed.
            options: for the environment's ``reset``, the same for all.

        Raises:
            UserError: the environment, a tool or a reward broke its contract.
        """

        def report(env: Env | None, trajectory: Trajectory) -> None:
            if on_episode is not None and not _waits_for_group(env, trajectory):
                on_episode(trajectory)

        run = GroupRollout(self, task, size, seed, first, options or {}, self.oversample, self.branching, report)
        members = await run.run()
        self.cancelled += run.started - len(members)
        return Group(task, tuple(self._settle(members, await self._score_group(members, on_episode))))

    def _settle(
        self, members: Sequence[tuple[Env | None, Trajectory]], scored: Sequence[Trajectory]
    ) -> list[Trajectory]:
        """Settle whose faults those of a group's members are."""
        worst = min((float(env.worst_reward) for env, _ in members if env is not None), default=0.0)
        return settle_faults(scored, self.ended, worst)

    async def _score_group(
        self, members: Sequence[tuple[Env | None, Trajectory]], on_episode: EpisodeCallback | None = None
    ) -> list[Trajectory]:
        """Score the members together where their environment does that, and report them to ``on_episode``."""
        trajectories = [t for _, t in members]
        env = next((env for env, t in members if env is not None and _waits_for_group(env, t)), None)
        if env is None:
            return trajectories
        track, now = Track(self.lanes), self.lanes.clock()
        scoring = (f"{type(env).__name__}.score_group", now)
        self.scoring.append(scoring)
        track.enter("score", now)
        try:
            scored = await score_group(env, trajectories, self.limits.turn_timeout_s)
        finally:
            self.scoring.remove(scoring)
            track.leave(self.lanes.clock())
        self.lanes.ended(track)
        for member, trajectory in zip(members, scored, strict=True):
            if on_episode is not None and _waits_for_group(*member):
                on_episode(trajectory)
        return scored

    async def episode(self, task: int, *, seed: int = 0) -> Trajectory:
        """Roll out one episode and score it. Infrastructure failures are in ``Trajectory.fault``, never raised.

        Raises:
            UserError: the environment or a tool broke its contract.
        """
        episode = self.begin_episode(task, seed)
        trajectory = await episode.run()
        members = [(episode.env, trajectory)]
        return self._settle(members, await self._score_group(members))[0]


def _build_sampling(config: RolloutConfig, renderer: Renderer) -> SamplingParams:
    """Build the sampling of a run's turns."""
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        stop=StopStrings(config.stop, renderer.decode) if config.stop else None,
    )


def _waits_for_group(env: Env | None, trajectory: Trajectory) -> bool:
    """Return True if an episode is not scored until its group is."""
    return env is not None and env.scores_groups and trajectory.fault is None


def check_deadlines(spec: EnvSpec, turn_timeout_s: float) -> None:
    """Check that deadlines nest: a tool's is within the environment's turn, whose own is within the episode's.

    Raises:
        ConfigError: a tool may take longer than the turn that waits for it.
    """
    for t in spec.tool_list():
        if t.max_duration_s > turn_timeout_s:
            tries = f"{t.retries + 1} tries of {t.timeout_s:g} s" if t.retries else "its timeout_s"
            raise ConfigError(
                f"rollout.turn_timeout_s {turn_timeout_s:g} is under the {t.max_duration_s:g} s that tool {t.name!r} "
                f"may take ({tries}); raise it, or lower the tool's"
            )
