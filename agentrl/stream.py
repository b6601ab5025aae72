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
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from agentrl.aside import together
from agentrl.rollout import Rollout, Watch
from agentrl.tasks import Deal
from agentrl.types import Group


class Sampler(Protocol):
    """Which tasks come next."""

    def deal(self) -> Deal: ...
    def record(self, group: Group) -> None: ...


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
        dynamic: whether groups that teach nothing are played anew, with other tasks (DAPO, arXiv 2503.14476).
    """

    tasks: int
    size: int
    max_staleness: int = 0
    min_group: int = 2
    redraw: int | None = None
    dynamic: bool = False

    @property
    def most_redrawn(self) -> int:
        return self.tasks if self.redraw is None else self.redraw

    def is_lost(self, group: Group) -> bool:
        return len(group.scored) < self.min_group

    def is_flat(self, group: Group) -> bool:
        return len({t.reward for t in group.scored}) < 2


class Dealt(NamedTuple):
    """A task, its reset's options, and the number of the first of its dice."""

    task: int
    options: Mapping[str, Any]
    first: int


class Ahead(NamedTuple):
    """What a checkpoint holds of a stream: all that was dealt and is not taken is played again, with the same dice."""

    admitted: int
    places: Sequence[tuple[int, Dealt]]
    dealt: Mapping[int, Mapping[int, int]]
    others: Sequence[Group]
    redrawn: int


@dataclass(eq=False)
class _Place:
    """A place in the order of groups, and what is played there."""

    number: int
    begun: int  # updates there had been
    group: Group | None = None
    dealt: Dealt | None = None


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
    updates: int = 0  # of the policy
    ahead: Ahead | None = None  # of a stream that this one goes on with
    _places: list[_Place] = field(default_factory=list)  # of groups that are not taken, the oldest first
    _admitted: int = 0
    _redrawn: int = 0  # in this batch
    _others: list[Group] = field(default_factory=list)
    _dealt: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))  # tasks, by step
    _changed: anyio.Event = field(default_factory=anyio.Event)

    async def take(self) -> Batch:
        """The next batch, once there is one.

        Raises:
            UserError: an environment, tool or reward broke its contract.
        """
        self._go_on()
        self._admit()
        while not self._ready():
            self._changed = anyio.Event()
            await self._changed.wait()
        chosen = [p for p in self._places if p.group is not None][: self.plan.tasks]
        self._places = [p for p in self._places if p not in chosen]
        batch = Batch([p.group for p in chosen if p.group], self._others, [self.updates - p.begun for p in chosen])
        self._redrawn, self._others = 0, []
        for group in batch.groups:
            self.sampler.record(group)
        oldest = min((self._step_of(p) for p in self._places), default=self._step_of(chosen[-1]) + 1)
        for step in [s for s in self._dealt if s < oldest]:
            del self._dealt[step]
        return batch

    def advance(self) -> None:
        """The policy was updated, and the engine has it: more may be played."""
        self.updates += 1
        self._admit()

    # -- the order of groups -----------------------------------------------------------------------------------------

    def _admit(self) -> None:
        allowed = (self.updates + self.plan.max_staleness + 1) * self.plan.tasks
        while self._admitted < allowed:
            place = _Place(self._admitted, self.updates)
            self._admitted += 1
            self._places.append(place)
            self._begin(place)

    def _go_on(self) -> None:
        """What another stream had begun is begun anew."""
        if self.ahead is None:
            return
        (self._admitted, places, dealt, others, self._redrawn), self.ahead = self.ahead, None
        self._others = list(others)
        self._dealt.update({step: Counter(tasks) for step, tasks in dealt.items()})
        for number, task in places:
            place = _Place(number, self.updates, dealt=task)
            self._places.append(place)
            self._start(place, task)

    def _begin(self, place: _Place) -> None:
        place.dealt = self._deal(self._step_of(place))
        self._start(place, place.dealt)

    def _start(self, place: _Place, dealt: Dealt) -> None:
        self.players.start_soon(self._play, place, dealt, self.seed * 2**31 + self._step_of(place))

    def _deal(self, step: int) -> Dealt:
        task, options = self.sampler.deal()
        first = self._dealt[step][task] * self.plan.size  # a task dealt twice gets other dice
        self._dealt[step][task] += 1
        return Dealt(task, options, first)

    def state(self) -> Ahead:
        """For a stream that goes on where this one is."""
        places = [(place.number, place.dealt) for place in self._places if place.dealt is not None]
        dealt = {step: dict(tasks) for step, tasks in self._dealt.items()}
        return Ahead(self._admitted, places, dealt, list(self._others), self._redrawn)

    def _step_of(self, place: _Place) -> int:
        return place.number // self.plan.tasks + 1

    async def _play(self, place: _Place, dealt: Dealt, seed: int) -> None:
        for _ in range(place.number % self.plan.tasks):
            await anyio.lowlevel.checkpoint()  # the engine begins with one group while the next is reset
        task, options, first = dealt
        group = await self.rollout.group(
            task, self.plan.size, seed=seed, first=first, options=options, watch=self.watch
        )
        lost = self.plan.is_lost(group)
        if (lost or (self.plan.dynamic and self.plan.is_flat(group))) and self._redrawn < self.plan.most_redrawn:
            self._redrawn += 1
            self._others.append(group)
            self._begin(place)
            return
        place.group = group
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
) -> AsyncIterator[Stream]:
    """Inside, groups are played. After ``step`` updates it goes on with those that another stream had begun.

    What is still being played at the end is cancelled, and its environments closed.
    """
    async with together() as players:
        ahead = ahead or Ahead(step * plan.tasks, (), {}, (), 0)
        yield Stream(rollout, sampler, plan, seed, watch, players, updates=step, ahead=ahead)
        players.cancel_scope.cancel()


def stale(groups: Sequence[Group], version: int) -> list[int]:
    """Of each sampled token, how many versions lie between the one that sampled it and ``version``."""
    segments = [s for g in groups for t in g.scored for s in t.segments]
    return [version - v for s in segments for v in s.versions or ()]
