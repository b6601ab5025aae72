"""Samplers whose next task depends on the outcomes of those before: siblings of `task_sampler.TaskSampler`."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import sqrt
from statistics import fmean, pvariance
from typing import Any

from agentrl.environments.task_sampler import Outcome, TaskDraw, TaskSampler
from agentrl.errors import ContractError, author_errors
from agentrl.settings.entries import sampler
from agentrl.spread import is_rounding

__all__ = ["Curriculum", "CurriculumSampler", "DifficultySampler", "Outcome", "difficulty", "order"]

MEMORY = 0.5  # weight of what was known of a task before, when it is rolled out again
RAREST = 0.1  # the chance of a task of which nothing can be learned, where the best has 1
WINDOW = 1000  # groups that a curriculum looks back on


@dataclass
class _RewardMoments:
    """Mean and variance of a task's rewards, over its groups, where later ones count more."""

    mean: float
    variance: float

    def after(self, rewards: Sequence[float]) -> _RewardMoments:
        """Return what is known once another group has come: the moments of the mixture of both."""
        mean, old, new = fmean(rewards), MEMORY, 1 - MEMORY
        between = old * new * (mean - self.mean) ** 2
        return _RewardMoments(old * self.mean + new * mean, old * self.variance + new * pvariance(rewards) + between)

    @property
    def spread(self) -> float:
        """Return the standard deviation; 0.0 where it is no more than rounding."""
        deviation = sqrt(self.variance)
        return 0.0 if is_rounding(deviation, abs(self.mean)) else deviation


@dataclass
class DifficultySampler(TaskSampler):
    """Draws the tasks in their order, and mostly skips those of which little is learned.

    A task's chance is the spread of its rewards over the median spread of the tasks that have any: at most 1, at least
    ``RAREST``. So a task that is always or never solved comes seldom, whatever the rewards' scale and sign are. A task
    that was not played yet is always taken.
    """

    known: dict[int, _RewardMoments] = field(default_factory=dict)
    _spreads: list[float] = field(default_factory=list)  # of the known tasks that have one, sorted

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count is None:
            raise ContractError(
                "rollout.sampler difficulty needs an environment whose count() is a number: where no task comes twice, "
                "nothing is known of the next one"
            )

    def draw(self) -> TaskDraw:
        for _ in range(20 * (self.count or 1)):
            drawn = super().draw()
            chance = self._chance(drawn.task)
            if random.Random(f"{self.seed}:{self.cursor}").random() < chance:
                return drawn
        return drawn  # pragma: no cover - RAREST to that power

    def record(self, outcome: Outcome) -> None:
        before = self.known.get(outcome.task)
        if len(outcome.rewards) < 2 and (before is None or not outcome.rewards):
            return  # one reward alone has no spread
        self._learn(
            outcome.task, before.after(outcome.rewards) if before else _RewardMoments(*_moments(outcome.rewards))
        )

    def state(self) -> dict[str, Any]:
        return {**super().state(), "known": {str(task): [k.mean, k.variance] for task, k in self.known.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.known, self._spreads = {}, []
        for task, moments in state["known"].items():
            self._learn(int(task), _RewardMoments(*moments))

    def _learn(self, task: int, now: _RewardMoments) -> None:
        before = self.known.get(task)
        if before is not None and before.spread:
            del self._spreads[bisect_left(self._spreads, before.spread)]
        if now.spread:
            insort(self._spreads, now.spread)
        self.known[task] = now

    def _chance(self, task: int) -> float:
        if task not in self.known or not self._spreads:
            return 1.0
        return max(RAREST, min(1.0, self.known[task].spread / self._spreads[len(self._spreads) // 2]))


def _moments(rewards: Sequence[float]) -> tuple[float, float]:
    return fmean(rewards), pvariance(rewards)


Curriculum = Callable[[Sequence[Outcome]], Mapping[str, Any]]  # to the options of the next task's reset


@dataclass
class CurriculumSampler(TaskSampler):
    """Draws tasks in their order; a function of the last outcomes returns the options of the next reset."""

    curriculum: Curriculum = lambda history: {}
    history: list[Outcome] = field(default_factory=list)  # the oldest first

    def draw(self) -> TaskDraw:
        with author_errors("the curriculum"):
            options = self.curriculum(tuple(self.history))
        if not isinstance(options, Mapping):
            raise ContractError(f"the curriculum returned {options!r:.80}; it must return a dict of options")
        if "split" in options:
            raise ContractError("the curriculum returned the option 'split', which is set for it: train; leave it out")
        return TaskDraw(super().draw().task, dict(options))

    def record(self, outcome: Outcome) -> None:
        self.history = [*self.history, outcome][-WINDOW:]

    def state(self) -> dict[str, Any]:
        return {**super().state(), "history": [asdict(outcome) for outcome in self.history]}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.history = [Outcome(**{**o, "rewards": tuple(o["rewards"])}) for o in state["history"]]


order = sampler(explain="tasks in order, each epoch of a dataset in an order of its own")(TaskSampler)
difficulty = sampler(explain="tasks that are always or never solved come seldom")(DifficultySampler)
