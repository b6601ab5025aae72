"""The order of tasks. A task is an integer, so the data cursor of a run is one number."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from agentrl.errors import ContractError, UserError, author_errors

HELD_OUT = 2_000_000_000  # the first held-out integer: held-out task 5 of a generator is 2000000005
_HELD_OUT_UP_TO = 2**31  # so that it is a seed for everybody


def task_integer(split: str, index: int, seed: int = 0) -> int:
    """Return the integer of a task of an environment that generates tasks (its ``count`` is None).

    Run ``seed`` trains on the integers from ``seed * 2**32`` on. Every other split begins at ``HELD_OUT`` and ends
    below ``2**31``: no run trains on those, whatever its seed. An ``index`` that is such an integer already stays as it
    is.

    Raises:
        UserError: the split has no task at that index.
    """
    if split == "train":
        if index >= (most := 2**32 if seed else HELD_OUT):
            raise UserError(f"a run of seed {seed} trains on {most:,} integers at most; there is no task {index:,}")
        return seed * 2**32 + index
    task = HELD_OUT + task_index(index)
    if not HELD_OUT <= task < _HELD_OUT_UP_TO:
        raise UserError(f"split {split!r} has {_HELD_OUT_UP_TO - HELD_OUT:,} tasks; there is no task {index:,}")
    return task


def task_index(task: int) -> int:
    """Return where a held-out integer stands in its split, from 0; a training integer is returned as it is.

    An environment that makes its task of ``seed`` and ``options["split"]`` together may use it: its test tasks are then
    named by small numbers.
    """
    return task - HELD_OUT if HELD_OUT <= task < _HELD_OUT_UP_TO else task


def describe_task(task: int, split: str) -> str:
    """Name a task by its place in its split, as ``agentrl eval --first`` counts: ``task 5 of split test``."""
    return f"task {task_index(task)}" + ("" if split == "train" else f" of split {split}")


class TaskDraw(NamedTuple):
    """A drawn task, and the options of its reset beside the split."""

    task: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a draw: its group's rewards, and whether it is trained."""

    task: int
    options: Mapping[str, Any]  # of this draw
    reward: float | None  # the group's mean; None where nobody was scored
    rewards: tuple[float, ...] = ()  # of the scored episodes
    number: int = 0  # of the draw, counted from the run's first
    resampled: bool = False  # another task was drawn in its place, and it is not trained


@dataclass
class TaskSampler:
    """Draws tasks in order.

    With a finite ``count`` (a dataset) each epoch is a permutation of its rows, its order fixed by ``seed`` and the
    epoch. Without one (a generator) run ``seed`` owns the integers from ``seed * 2**32`` on: see `task_integer`.
    """

    count: int | None
    seed: int
    cursor: int = 0

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ContractError(f"the environment has {self.count} tasks to train on; count() is 1 or more, or None")

    def next_tasks(self, n: int) -> list[int]:
        """Return the next ``n`` tasks, and move the cursor."""
        tasks = [self._at(i) for i in range(self.cursor, self.cursor + n)]
        self.cursor += n
        return tasks

    def draw(self) -> TaskDraw:
        """Draw the next task."""
        (task,) = self.next_tasks(1)
        return TaskDraw(task, {})

    def record(self, outcome: Outcome) -> None:
        """Record the outcome of a draw. Here it changes nothing."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        return {"cursor": self.cursor}

    def load(self, state: Mapping[str, Any]) -> None:
        self.cursor = state["cursor"]

    def _at(self, index: int) -> int:
        if self.count is None:
            return task_integer("train", index, self.seed)
        epoch, row = divmod(index, self.count)
        return _permutation(self.count, self.seed, epoch)[row]


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    rows = list(range(count))
    random.Random(f"{seed}:{epoch}").shuffle(rows)
    return rows


@dataclass
class GuardedSampler(TaskSampler):
    """A sampler from outside of agentrl, whose draws are checked: it never trains on a held-out task."""

    sampler: TaskSampler = field(kw_only=True)

    def draw(self) -> TaskDraw:
        what = type(self.sampler).__name__
        with author_errors(f"{what}.draw"):
            drawn = self.sampler.draw()
        if not isinstance(drawn, tuple) or len(drawn) != 2 or not isinstance(drawn[1], Mapping):
            raise ContractError(f"{what}.draw returned {drawn!r:.80}; it returns TaskDraw(task, options)")
        task, options = drawn
        if "split" in options:
            raise ContractError(f"{what}.draw returned the option 'split', which is set for it: train; leave it out")
        return TaskDraw(_check_training_task(what, task, self.count), dict(options))

    def record(self, outcome: Outcome) -> None:
        with author_errors(f"{type(self.sampler).__name__}.record"):
            self.sampler.record(outcome)

    def state(self) -> dict[str, Any]:
        return self.sampler.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self.sampler.load(state)


def _check_training_task(what: str, task: object, count: int | None) -> int:
    """Return a drawn task if it is one to train on. Raises ContractError; ``what`` names who drew it."""
    if not isinstance(task, int) or isinstance(task, bool):
        raise ContractError(f"{what} drew the task {task!r:.80}; a task is an integer")
    if count is not None and not 0 <= task < count:
        raise ContractError(f"{what} drew task {task}; the environment has the tasks 0 to {count - 1}")
    if count is None and (task < 0 or HELD_OUT <= task < _HELD_OUT_UP_TO):
        raise ContractError(f"{what} drew task {task}, which is {'none' if task < 0 else 'held out for evaluations'}")
    return task
