"""Groups, played ahead of the learner as far as staleness allows, and no further.

    taken          0        1        2       max_staleness = 1, four groups a step
    learns         |--------|--------|
    plays     0..7 |  8..11 | 12..15 |       what is learned from in a step was begun one step before at the earliest

A group that was begun after ``v`` updates is learned from after ``v + max_staleness`` at the latest: the learner takes
the oldest groups that are complete, and waits for others only where they would not find a batch in time. Hence no group
is ever too old, none is thrown away for having slow tools, which would teach the policy to avoid them, and with
``max_staleness = 0`` it is the plain loop: play, learn, play.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from agentrl.aside import together
from agentrl.rollout import Rollout, Watch
from agentrl.spread import is_flat
from agentrl.tasks import Deal, Outcome
from agentrl.types import Group


class Sampler(Protocol):
    """Draws tasks, and hears of every group that was rolled out, once: trained, resampled or lost."""

    def deal(self) -> Deal: ...
    def record(self, outcome: Outcome) -> None: ...


@dataclass(frozen=True)
class Plan:
    """What a step's batch is made of.

    Args:
        tasks: groups a step.
        size: episodes a group.
        max_staleness: updates that may lie between a group's beginning and its being learned from.
        min_group: a group with fewer scored members is lost.
        redraw: groups a step that may be played in the place of those that are lost, and, with ``dynamic``, of those
            whose rewards are all the same; ``tasks`` by default. Where they are not enough the step has fewer.
        steps: the last step. No group is begun that would be learned from after it; ``None``: it is not known.
        dynamic: whether groups that teach nothing are played anew, with other tasks (DAPO, arXiv 2503.14476).
        ordered: a complete group is judged once all that were drawn before it are. Then what a sampler hears, and which
            task takes a lost group's place, hangs on the draws alone and not on the clock; redraws begin later for it.
    """

    tasks: int
    size: int
    max_staleness: int = 0
    min_group: int = 2
    redraw: int | None = None
    dynamic: bool = False
    ordered: bool = False
    steps: int | None = None

    @property
    def most_redrawn(self) -> int:
        return self.tasks if self.redraw is None else self.redraw

    def is_lost(self, group: Group) -> bool:
        return len(group.scored) < self.min_group

    def is_flat(self, group: Group) -> bool:
        return is_flat(group.trajectories)


class Dealt(NamedTuple):
    """A task, its reset's options, the number of the first of its dice, and which of the run's draws it is."""

    task: int
    options: Mapping[str, Any]
    first: int
    number: int


class Ahead(NamedTuple):
    """What a checkpoint holds of a stream: all that was dealt and is not taken is played again, with the same dice."""

    admitted: int
    places: Sequence[tuple[int, Dealt]]
    dealt: Mapping[int, Mapping[int, int]]
    others: Sequence[Group]
    redrawn: int
    drawn: int = 0
    recorded: Sequence[int] = ()  # draws among the places of which the sampler has heard


@dataclass(eq=False)
class _Place:
    """A place in the order of groups, and what is played there."""

    number: int
    begun: int  # updates there had been
    dealt: Dealt
    recorded: bool = False
    complete: Group | None = None  # as it was rolled out, until it is judged
    group: Group | None = None  # to be learned from


@dataclass
class Batch:
    """What a step learns from; ``others`` were played in the same places before, and are not learned from."""

    groups: list[Group]
    others: list[Group]
    staleness: list[int]  # updates since each group was begun


@dataclass
class Stream:
    """Groups being played; made by ``streaming``."""

    rollout: Rollout
    sampler: Sampler
    plan: Plan
    seed: int
    watch: Watch | None
    players: TaskGroup
    stopping: Callable[[], bool] = lambda: False  # whether the run ends with the batch that it has asked for
    updates: int = 0  # of the policy
    ahead: Ahead | None = None  # of a stream that this one goes on with
    _places: list[_Place] = field(default_factory=list)  # of groups that are not taken, the oldest first
    _admitted: int = 0
    _asked: int = 0  # batches, over the whole run
    _taken: int = 0
    _redrawn: int = 0  # in this batch
    _drawn: int = 0
    _others: list[Group] = field(default_factory=list)
    _dealt: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))  # tasks, by step
    _changed: anyio.Event = field(default_factory=anyio.Event)

    async def take(self) -> Batch:
        """The next batch, once there is one.

        Raises:
            UserError: an environment, tool or reward broke its contract.
        """
        self._asked = self.updates + 1
        self._go_on()
        self._admit()
        while not self._ready():
            self._changed = anyio.Event()
            await self._changed.wait()
        chosen = [p for p in self._places if p.group is not None][: self.plan.tasks]
        self._places = [p for p in self._places if p not in chosen]
        batch = Batch([p.group for p in chosen if p.group], self._others, [self.updates - p.begun for p in chosen])
        self._redrawn, self._others, self._taken = 0, [], self._asked
        oldest = min((self._step_of(p.number) for p in self._places), default=self._step_of(chosen[-1].number) + 1)
        for step in [s for s in self._dealt if s < oldest]:
            del self._dealt[step]
        return batch

    def advance(self) -> None:
        """The policy was updated, and the engine has it: more may be played."""
        self.updates += 1
        self._admit()

    async def drain(self) -> None:
        """Wait until every group that was begun has been played. None is begun before the next batch is asked for."""
        while any(place.group is None for place in self._places):
            self._changed = anyio.Event()
            await self._changed.wait()

    # -- the order of groups -----------------------------------------------------------------------------------------

    def _admit(self) -> None:
        ahead = self._asked if self.stopping() else self.updates + self.plan.max_staleness + 1
        batches = ahead if self.plan.steps is None else min(ahead, self.plan.steps)
        while self._admitted < batches * self.plan.tasks:
            place = _Place(self._admitted, self.updates, self._deal(self._step_of(self._admitted)))
            self._admitted += 1
            self._places.append(place)
            self._start(place)

    def _go_on(self) -> None:
        """What another stream had begun is begun anew."""
        if self.ahead is None:
            return
        ahead, self.ahead = self.ahead, None
        self._admitted, self._redrawn, self._drawn = ahead.admitted, ahead.redrawn, ahead.drawn
        self._others = list(ahead.others)
        self._dealt.update({step: Counter(tasks) for step, tasks in ahead.dealt.items()})
        for number, dealt in ahead.places:
            place = _Place(number, self.updates, dealt, recorded=dealt.number in ahead.recorded)
            self._places.append(place)
            self._start(place)

    def _start(self, place: _Place) -> None:
        self.players.start_soon(self._play, place, self.seed * 2**31 + self._step_of(place.number))

    def _deal(self, step: int) -> Dealt:
        task, options = self.sampler.deal()
        first = self._dealt[step][task] * (self.plan.size + self.rollout.spare)  # a task dealt twice gets other dice
        self._dealt[step][task] += 1
        number, self._drawn = self._drawn, self._drawn + 1
        return Dealt(task, options, first, number)

    def state(self) -> Ahead:
        """For a stream that goes on where this one is."""
        places = [(place.number, place.dealt) for place in self._places]
        dealt = {step: dict(tasks) for step, tasks in self._dealt.items()}
        recorded = [place.dealt.number for place in self._places if place.recorded]
        return Ahead(self._admitted, places, dealt, list(self._others), self._redrawn, self._drawn, recorded)

    def _step_of(self, number: int) -> int:
        return number // self.plan.tasks + 1

    async def _play(self, place: _Place, seed: int) -> None:
        for _ in range(place.number % self.plan.tasks):
            await anyio.lowlevel.checkpoint()  # the engine begins with one group while the next is reset
        task, options, first, _ = place.dealt
        place.complete = await self.rollout.group(
            task, self.plan.size, seed=seed, first=first, options=options, watch=self.watch
        )
        self._settle()

    def _settle(self) -> None:
        """Judge the groups that are complete, in the order of their draws."""
        for place in sorted((p for p in self._places if p.group is None), key=lambda p: p.dealt.number):
            if place.complete is not None:
                self._judge(place, place.complete)
            elif self.plan.ordered:
                break

    def _judge(self, place: _Place, group: Group) -> None:
        """Record what came of a draw; keep the group to be learned from, or draw another task in its place."""
        no_use = self.plan.is_lost(group) or (self.plan.dynamic and self.plan.is_flat(group))
        too_late = self.stopping() and self._taken == self._asked  # nobody will learn from what is begun now
        resampled = no_use and not too_late and self._redrawn < self.plan.most_redrawn
        if not place.recorded:
            self.sampler.record(_outcome(place.dealt, group, resampled))
        if resampled:
            self._redrawn += 1
            self._others.append(group)
            place.dealt, place.recorded, place.complete = self._deal(self._step_of(place.number)), False, None
            self._start(place)
        else:
            place.recorded, place.complete, place.group = True, None, group
            self._changed.set()

    def _ready(self) -> bool:
        """Whether there is a batch, and what is left can be learned from before it is too old.

        Of the groups begun after ``v`` updates or fewer, ``v + max_staleness - updates`` more batches may be made after
        this one: whatever does not fit into those has to be in this one.
        """
        for begun in {place.begun for place in self._places}:
            own = [place.group for place in self._places if place.begun <= begun]
            later = (begun + self.plan.max_staleness - self.updates) * self.plan.tasks
            if own.count(None) > later:
                return False
        return sum(place.group is not None for place in self._places) >= self.plan.tasks


@asynccontextmanager
async def streaming(
    rollout: Rollout,
    sampler: Sampler,
    plan: Plan,
    *,
    seed: int = 0,
    step: int = 0,
    ahead: Ahead | None = None,
    watch: Watch | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> AsyncIterator[Stream]:
    """Inside, groups are played. After ``step`` updates it goes on with those that another stream had begun.

    What is still being played at the end is cancelled, and its environments closed.
    """
    async with together() as players:
        ahead = ahead or Ahead(step * plan.tasks, (), {}, (), 0, step * plan.tasks)
        yield Stream(rollout, sampler, plan, seed, watch, players, stopping, updates=step, ahead=ahead)
        players.cancel_scope.cancel()


def _outcome(dealt: Dealt, group: Group, resampled: bool) -> Outcome:
    rewards = tuple(t.reward for t in group.scored if t.reward is not None)
    mean = fmean(rewards) if rewards else None
    return Outcome(dealt.task, dealt.options, mean, rewards, number=dealt.number, resampled=resampled)


def stale(groups: Sequence[Group], version: int) -> list[int]:
    """Of each sampled token, how many versions lie between the one that sampled it and ``version``."""
    segments = [s for g in groups for t in g.scored for s in t.segments]
    return [version - v for s in segments for v in s.versions or ()]
