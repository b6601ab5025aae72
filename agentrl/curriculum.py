"""Which tasks come next, where that depends on what came of those before: siblings of `agentrl.tasks.TaskSampler`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from agentrl.errors import ContractError
from agentrl.tasks import Deal, TaskSampler
from agentrl.types import Group

MEMORY = 0.5  # weight of what was known of a task before, when it is played again
RAREST = 0.1  # the chance of a task of which nothing can be learned, where the best has 1
WINDOW = 1000  # groups that a curriculum looks back on


@dataclass
class DifficultySampler(TaskSampler):
    """Goes through the tasks in their order, and passes over those that are always or never solved, mostly.

    A task's chance is ``4 p (1 - p)``, at least ``RAREST``, where ``p`` is how good its groups were on average between
    the worst and the best reward ever seen. A task that was not played yet is always taken.
    """

    passes: dict[int, float] = field(default_factory=dict)  # mean reward, by task
    worst: float = 0.0
    best: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count is None:
            raise ContractError(
                "rollout.sampler difficulty needs an environment whose count() is a number: where no task comes twice, "
                "nothing is known of the next one"
            )

    def deal(self) -> Deal:
        for _ in range(20 * (self.count or 1)):
            deal = super().deal()
            chance = self._chance(deal.task)
            if random.Random(f"{self.seed}:{self.cursor}").random() < chance:
                return deal
        return deal  # pragma: no cover - RAREST to that power

    def record(self, group: Group) -> None:
        rewards = [t.reward for t in group.scored if t.reward is not None]
        if not rewards:
            return
        self.worst, self.best = min(self.worst, *rewards), max(self.best, *rewards)
        mean, before = fmean(rewards), self.passes.get(group.task)
        self.passes[group.task] = mean if before is None else MEMORY * before + (1 - MEMORY) * mean

    def state(self) -> dict[str, Any]:
        passes = {str(task): p for task, p in self.passes.items()}
        return {**super().state(), "passes": passes, "worst": self.worst, "best": self.best}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.passes = {int(task): p for task, p in state["passes"].items()}
        self.worst, self.best = state["worst"], state["best"]

    def _chance(self, task: int) -> float:
        if task not in self.passes:
            return 1.0
        p = (self.passes[task] - self.worst) / (self.best - self.worst)
        return max(RAREST, 4 * p * (1 - p))


@dataclass(frozen=True)
class Outcome:
    """What came of a task: one for each group, the oldest first."""

    task: int
    options: Mapping[str, Any]
    reward: float | None  # the group's mean; None where nobody was scored


Curriculum = Callable[[Sequence[Outcome]], Mapping[str, Any]]  # to the options of the next task's reset


@dataclass
class CurriculumSampler(TaskSampler):
    """Tasks in their order; a function of the last outcomes says with which options the environment begins them."""

    curriculum: Curriculum = lambda history: {}
    history: list[Outcome] = field(default_factory=list)
    _options: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    def deal(self) -> Deal:
        options = self.curriculum(tuple(self.history))
        if not isinstance(options, Mapping):
            raise ContractError(f"the curriculum returned {options!r:.80}; it must return a dict of options")
        deal = super().deal()
        self._options[deal.task] = options
        return Deal(deal.task, dict(options))

    def record(self, group: Group) -> None:
        rewards = [t.reward for t in group.scored if t.reward is not None]
        options = self._options.pop(group.task, {})
        self.history = [*self.history, Outcome(group.task, options, fmean(rewards) if rewards else None)][-WINDOW:]

    def state(self) -> dict[str, Any]:
        history = [[o.task, dict(o.options), o.reward] for o in self.history]
        return {**super().state(), "history": history, "options": {t: dict(o) for t, o in self._options.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.history = [Outcome(task, options, reward) for task, options, reward in state["history"]]
        self._options = dict(state["options"])
