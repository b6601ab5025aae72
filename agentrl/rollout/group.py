"""The episodes of one group, while they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anyio.abc import TaskGroup

from agentrl.environments.env import Env
from agentrl.environments.task_sampler import task_index
from agentrl.rollout.episode import Branching, Episode, EpisodeContext
from agentrl.rollout.seeds import mix_seeds
from agentrl.runtime.threads import open_task_group
from agentrl.types import Trajectory

Ended = Callable[[Env | None, Trajectory], None]


@dataclass
class GroupRollout:
    """Rolls out the episodes of one task, all at once, until ``size`` have ended; the others are cancelled.

    With branching they grow as trees. Below ``size`` is 4 and ``branches`` 2, and two trunks share one turn each:

        root 0 --- turn 1 --- clone --+-- turn 2 ... member 0
                                      +-- turn 2 ... member 1
        root 2 --- turn 1 --- clone --+-- turn 2 ... member 2
                                      +-- turn 2 ... member 3

    A trunk that ends before it branches is the member of its root; its other members are episodes of their own.
    A trunk holds a slot of the concurrency limit, its branches hold none.

    Args:
        seed: that the seeds of the members are made of.
        first: the number of the first member's seed.
        options: for the environment's ``reset``.
        oversample: episodes that are started beyond ``size``.
        on_ended: called with each member's environment and trajectory as it ends.
    """

    context: EpisodeContext
    task: int
    size: int
    seed: int = 0
    first: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    oversample: int = 0
    branching: Branching | None = None
    on_ended: Ended = lambda env, trajectory: None
    started: int = 0  # episodes
    _trajectories: dict[int, Trajectory] = field(default_factory=dict)  # by member
    _envs: dict[int, Env | None] = field(default_factory=dict)

    async def run(self) -> list[tuple[Env | None, Trajectory]]:
        """Return the environment and the trajectory of each member, in order.

        Raises:
            UserError: the environment, a tool or a reward broke its contract.
        """
        members = range(self.size + self.oversample)
        width = self.branching.branches if self.branching else 1
        async with open_task_group() as tasks:
            for root in members[::width]:
                tasks.start_soon(self._run_tree, tasks, root, members[root + 1 : root + width])
        trajectories = _count_trunks_once(self._trajectories, width)
        return [(self._envs[m], trajectories[m]) for m in sorted(trajectories)]

    async def _run_tree(self, tasks: TaskGroup, root: int, others: Sequence[int] = ()) -> None:
        """Run an episode until it branches into a root and ``others``; without others, until it ends."""
        until = Branching(self.branching.turn, 1 + len(others)) if self.branching and others else None
        async with self.context.concurrency.slot():
            seed = mix_seeds(self.seed, task_index(self.task), self.first + root)
            trunk = self.context.begin_episode(self.task, seed, self.options)
            self.started += 1
            trajectory = await trunk.run(until)
        if trajectory is not None:
            self._add_member(tasks, root, trunk, trajectory)
            for member in others:
                tasks.start_soon(self._run_tree, tasks, member)
            return
        forks, trunk.forks = trunk.forks, []  # from here on each for itself
        self.started += len(forks)
        for member, branch in zip((root, *others), (trunk, *forks), strict=True):
            tasks.start_soon(self._run_branch, tasks, member, branch)

    async def _run_branch(self, tasks: TaskGroup, member: int, branch: Episode) -> None:
        self._add_member(tasks, member, branch, await branch.run())

    def _add_member(self, tasks: TaskGroup, member: int, episode: Episode, trajectory: Trajectory) -> None:
        if len(self._trajectories) < self.size:
            self._trajectories[member], self._envs[member] = trajectory, episode.env
            self.on_ended(episode.env, trajectory)
        if len(self._trajectories) == self.size:
            tasks.cancel_scope.cancel()  # the episodes that were started beyond the size


def _count_trunks_once(trajectories: Mapping[int, Trajectory], width: int) -> dict[int, Trajectory]:
    """Let one member of each tree of ``width`` count its trunk: the first that no fault ended, if there is one."""
    counts: dict[int, int] = {}
    for member in sorted(trajectories, key=lambda m: (trajectories[m].fault is not None, m)):
        counts.setdefault(member // width, member)
    return {m: replace(t, shared_turns=0) if counts[m // width] == m else t for m, t in trajectories.items()}
