"""Groups, rolled out ahead of the learner as far as staleness allows, and no further.

    taken          0        1        2       max_staleness = 1, four groups a step
    learns         |--------|--------|
    rolls out 0..7 |  8..11 | 12..15 |       what is learned from in a step was started one step before at the earliest

A group that was started after ``v`` updates is learned from after ``v + max_staleness`` at the latest: the learner
takes the oldest groups that are complete, and waits for others only where they would not find a batch in time. Hence no
group is ever too old, none is thrown away for having slow tools, which would teach the policy to avoid them, and with
``max_staleness = 0`` it is the plain loop: roll out, learn, roll out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple, Protocol, Self

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from agentrl.environments.task_sampler import Outcome, TaskDraw
from agentrl.rollout.rollout import EpisodeCallback, Rollout
from agentrl.runtime.threads import open_task_group
from agentrl.settings.schema import TrainConfig
from agentrl.spread import has_zero_variance
from agentrl.types import Group, Trajectory


class _Sampler(Protocol):
    """Draws tasks, and hears of every group that was rolled out, once: trained, resampled or lost."""

    def draw(self) -> TaskDraw: ...
    def record(self, outcome: Outcome) -> None: ...


@dataclass(frozen=True)
class BatchPlan:
    """The make-up of a step's batch.

    Args:
        tasks: groups a step.
        size: episodes a group.
        max_staleness: updates that may lie between a group's start and its being learned from.
        min_group_size: a group with fewer scored members is lost.
        max_resamples: groups a step that may be rolled out in the place of those that are lost, and, with
            ``dynamic_sampling``, of those whose rewards are all the same; ``tasks`` by default. Where they are not
            enough the step has fewer.
        dynamic_sampling: whether zero-variance groups are replaced by groups of other tasks (DAPO, arXiv 2503.14476).
        ordered: a complete group is judged once all that were drawn before it are. Then what a sampler hears, and which
            task takes a lost group's place, depends on the draws alone and not on the clock; resampling begins later
            for it.
        steps: the last step. No group is started that would be learned from after it; ``None``: it is not known.
    """

    tasks: int
    size: int
    max_staleness: int = 0
    min_group_size: int = 2
    max_resamples: int | None = None
    dynamic_sampling: bool = False
    ordered: bool = False
    steps: int | None = None

    @classmethod
    def from_config(cls, config: TrainConfig) -> Self:
        """Build the plan that the settings name."""
        r = config.rollout
        return cls(
            r.tasks_per_step,
            r.group_size,
            r.max_staleness,
            r.min_group_size,
            r.max_resamples,
            r.dynamic_sampling,
            ordered=config.deterministic,
            steps=config.steps,
        )

    def allows_resample(self, done: int) -> bool:
        """Return True if a step that has resampled ``done`` groups may resample another one."""
        return done < (self.tasks if self.max_resamples is None else self.max_resamples)

    def is_useless(self, group: Group) -> bool:
        """Return True for a group that is lost, or that dynamic sampling replaces."""
        lost = len(group.scored) < self.min_group_size
        return lost or (self.dynamic_sampling and has_zero_variance(group.trajectories))


class ScheduledGroup(NamedTuple):
    """A task, its reset's options, the number of the first of its seeds, and which of the run's draws it is."""

    task: int
    options: Mapping[str, object]
    first: int
    number: int


class SchedulerState(NamedTuple):
    """A scheduler as a checkpoint holds it: all that was drawn and is not taken is rolled out again, with its seeds."""

    scheduled: int
    slots: Sequence[tuple[int, ScheduledGroup]]
    draws: Mapping[int, Mapping[int, int]]  # how often each task was drawn, by step
    resampled: Sequence[Group]
    num_resampled: int
    num_draws: int = 0
    recorded: Sequence[int] = ()  # draws among the slots of which the sampler has heard


@dataclass(eq=False)
class _Slot:
    """A slot in the order of groups, and what is rolled out there."""

    number: int
    started: int  # after so many updates
    scheduled: ScheduledGroup
    recorded: bool = False
    complete: Group | None = None  # as it was rolled out, until it is judged
    group: Group | None = None  # to be learned from


@dataclass
class StepBatch:
    """The groups of a step; ``resampled`` were rolled out in the same slots before, and are not learned from."""

    groups: list[Group]
    resampled: list[Group]
    staleness: list[int]  # updates since each group was started


@dataclass
class RolloutScheduler:
    """Rolls out groups and puts them into batches; made by `open_scheduler`."""

    rollout: Rollout
    sampler: _Sampler
    plan: BatchPlan
    seed: int
    on_episode: EpisodeCallback | None
    tasks: TaskGroup
    stopping: Callable[[], bool] = lambda: False  # whether the run ends with the batch that it has asked for
    updates: int = 0  # of the policy
    restored: SchedulerState | None = None  # the state that the first batch starts from
    _slots: list[_Slot] = field(default_factory=list)  # of groups that are not taken, the oldest first
    _scheduled: int = 0
    _requested: int = 0  # batches, over the whole run
    _taken: int = 0
    _num_resampled: int = 0  # in this batch
    _num_draws: int = 0
    _resampled: list[Group] = field(default_factory=list)
    _draws: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))  # tasks, by step
    _changed: anyio.Event = field(default_factory=anyio.Event)

    async def next_batch(self) -> StepBatch:
        """Return the next batch, once it is complete.

        Raises:
            UserError: an environment, tool or reward broke its contract.
        """
        self._requested = self.updates + 1
        self._restore()
        self._fill_slots()
        while not self._batch_ready():
            self._changed = anyio.Event()
            await self._changed.wait()
        taken = [s for s in self._slots if s.group is not None][: self.plan.tasks]
        self._slots = [s for s in self._slots if s not in taken]
        staleness = [self.updates - s.started for s in taken]
        batch = StepBatch([s.group for s in taken if s.group], self._resampled, staleness)
        self._num_resampled, self._resampled, self._taken = 0, [], self._requested
        oldest = min((self._step_of(s.number) for s in self._slots), default=self._step_of(taken[-1].number) + 1)
        for step in [s for s in self._draws if s < oldest]:
            del self._draws[step]
        return batch

    def advance(self) -> None:
        """Count an update of the policy, which the engine has: start the groups that it allows."""
        self.updates += 1
        self._fill_slots()

    async def drain(self) -> None:
        """Wait until every group that was started is complete. None is started before the next batch is asked for."""
        while any(slot.group is None for slot in self._slots):
            self._changed = anyio.Event()
            await self._changed.wait()

    def state(self) -> SchedulerState:
        """Return what a later scheduler needs to resume where this one is."""
        slots = [(slot.number, slot.scheduled) for slot in self._slots]
        draws = {step: dict(tasks) for step, tasks in self._draws.items()}
        recorded = [slot.scheduled.number for slot in self._slots if slot.recorded]
        resampled = list(self._resampled)
        return SchedulerState(self._scheduled, slots, draws, resampled, self._num_resampled, self._num_draws, recorded)

    # -- the order of groups -----------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Restart the groups that were in progress when the state was written, with the same seeds."""
        if self.restored is None:
            return
        state, self.restored = self.restored, None
        self._scheduled, self._num_resampled, self._num_draws = state.scheduled, state.num_resampled, state.num_draws
        self._resampled = list(state.resampled)
        self._draws.update({step: Counter(tasks) for step, tasks in state.draws.items()})
        for number, scheduled in state.slots:
            slot = _Slot(number, self.updates, scheduled, recorded=scheduled.number in state.recorded)
            self._slots.append(slot)
            self._start(slot)

    def _fill_slots(self) -> None:
        ahead = self._requested if self.stopping() else self.updates + self.plan.max_staleness + 1
        batches = ahead if self.plan.steps is None else min(ahead, self.plan.steps)
        while self._scheduled < batches * self.plan.tasks:
            slot = _Slot(self._scheduled, self.updates, self._draw_task(self._step_of(self._scheduled)))
            self._scheduled += 1
            self._slots.append(slot)
            self._start(slot)

    def _start(self, slot: _Slot) -> None:
        self.tasks.start_soon(self._roll_out, slot, self.seed * 2**31 + self._step_of(slot.number))

    def _draw_task(self, step: int) -> ScheduledGroup:
        task, options = self.sampler.draw()
        size = self.plan.size + self.rollout.oversample
        first = self._draws[step][task] * size  # a task drawn twice gets other seeds
        self._draws[step][task] += 1
        number, self._num_draws = self._num_draws, self._num_draws + 1
        return ScheduledGroup(task, options, first, number)

    def _step_of(self, number: int) -> int:
        return number // self.plan.tasks + 1

    async def _roll_out(self, slot: _Slot, seed: int) -> None:
        for _ in range(slot.number % self.plan.tasks):
            await anyio.lowlevel.checkpoint()  # the engine begins with one group while the next is reset
        task, options, first, _ = slot.scheduled
        slot.complete = await self.rollout.group(
            task, self.plan.size, seed=seed, first=first, options=options, on_episode=self.on_episode
        )
        self._settle()

    def _settle(self) -> None:
        """Judge the groups that are complete, in the order of their draws."""
        for slot in sorted((s for s in self._slots if s.group is None), key=lambda s: s.scheduled.number):
            if slot.complete is not None:
                self._judge(slot, slot.complete)
            elif self.plan.ordered:
                break

    def _judge(self, slot: _Slot, group: Group) -> None:
        """Record the outcome of a draw; keep the group to be learned from, or draw another task in its place."""
        too_late = self.stopping() and self._taken == self._requested  # nobody learns from what is started now
        resample = self.plan.is_useless(group) and not too_late and self.plan.allows_resample(self._num_resampled)
        if not slot.recorded:
            self.sampler.record(_make_outcome(slot.scheduled, group, resample))
        if resample:
            self._num_resampled += 1
            self._resampled.append(group)
            slot.scheduled, slot.recorded, slot.complete = self._draw_task(self._step_of(slot.number)), False, None
            self._start(slot)
        else:
            slot.recorded, slot.complete, slot.group = True, None, group
            self._changed.set()

    def _batch_ready(self) -> bool:
        """Return True if there is a batch, and the groups left over can be learned from before they are too old.

        Of the groups started after ``v`` updates or fewer, ``v + max_staleness - updates`` more batches may be made
        after this one: whatever does not fit into those has to be in this one.
        """
        for started in {slot.started for slot in self._slots}:
            groups = [slot.group for slot in self._slots if slot.started <= started]
            later = (started + self.plan.max_staleness - self.updates) * self.plan.tasks
            if groups.count(None) > later:
                return False
        return sum(slot.group is not None for slot in self._slots) >= self.plan.tasks


@asynccontextmanager
async def open_scheduler(
    rollout: Rollout,
    sampler: _Sampler,
    plan: BatchPlan,
    *,
    seed: int = 0,
    step: int = 0,
    state: SchedulerState | None = None,
    on_episode: EpisodeCallback | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> AsyncIterator[RolloutScheduler]:
    """Roll out groups in the background while the block runs; on leaving, cancel them and close their environments.

    Args:
        step: updates of the policy so far.
        state: of an earlier scheduler, whose groups in progress are restarted.
        stopping: returns True once the run ends with the batch that it has asked for.
    """
    async with open_task_group() as tasks:
        state = state or SchedulerState(step * plan.tasks, (), {}, (), 0, step * plan.tasks)
        yield RolloutScheduler(rollout, sampler, plan, seed, on_episode, tasks, stopping, updates=step, restored=state)
        tasks.cancel_scope.cancel()


def _make_outcome(scheduled: ScheduledGroup, group: Group, resampled: bool) -> Outcome:
    rewards = tuple(t.reward for t in group.scored if t.reward is not None)
    mean = fmean(rewards) if rewards else None
    return Outcome(scheduled.task, scheduled.options, mean, rewards, number=scheduled.number, resampled=resampled)


def compute_staleness(episodes: Iterable[Trajectory], version: int) -> list[int]:
    """Return, for each sampled token, the number of versions between the one that sampled it and ``version``."""
    segments = [s for t in episodes for s in t.segments]
    return [version - v for s in segments for v in s.versions or ()]
