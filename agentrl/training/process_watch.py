"""The watch over a run's processes: what each is at, summed by step, and in one sentence who waits on whom now."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import anyio

from agentrl.learner.distributed import ProcessGroup
from agentrl.learner.roll_call import RankPlace
from agentrl.rollout.engine_protocol import ServerLister
from agentrl.runtime.activity import OWN_WORK, ActivityCount, ProcessActivity, describe_activities, sum_waits
from agentrl.runtime.critical_path import EPISODES
from agentrl.runtime.lanes import IDLE
from agentrl.runtime.stalls import Wait, describe_waits
from agentrl.runtime.threads import open_task_group
from agentrl.training.loop import TrainingLoop

LOOK_S, COST = 0.25, 0.02  # between two looks, which take no larger share of the time than that
WRITE_S = 2.0  # between two writes of waits.json
TOLD_S = 5.0  # that a rank has kept others waiting, when it is named

# Beside what the run itself is at, by that: what a player without an episode waits for; the learner for all else.
_IDLE_FOR = {EPISODES: "a group", "evaluate": "a group", "sync": "new weights"}


@asynccontextmanager
async def watch_processes(training: TrainingLoop, process_group: ProcessGroup) -> AsyncIterator[None]:
    """Sum what the run's processes are at while the block runs, and keep ``waits.json`` up to date."""
    watch = ProcessWatch(training, process_group)
    activity = training.recorder.activity
    async with open_task_group() as tasks:
        activity.look = watch.look
        tasks.start_soon(watch.run)
        try:
            yield
        finally:
            activity.look = lambda: None
            tasks.cancel_scope.cancel()


class ProcessWatch:
    """Looks at every process of a run, several times a second."""

    def __init__(
        self, training: TrainingLoop, process_group: ProcessGroup, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._training, self._process_group, self._clock = training, process_group, clock
        self._looked = clock()
        self._written = self._looked - WRITE_S

    async def run(self) -> None:
        """Look until this is cancelled."""
        pause = LOOK_S
        while True:
            await anyio.sleep(pause)
            self.look()
            pause = max(LOOK_S, (self._clock() - self._looked) / COST)

    def look(self) -> None:
        """Charge the seconds since the last look to what is seen in this one; write ``waits.json`` now and then."""
        before, self._looked = self._looked, self._clock()
        activities = self.list_activities()
        self._training.recorder.activity.add(activities, self._looked - before)
        if self._looked - self._written >= WRITE_S:
            self._written = self._looked
            self._training.recorder.run.write_waits(self.describe(activities))

    def list_activities(self) -> list[ProcessActivity]:
        """List what each process is at: ranks, servers, players, or the rollouts of this process."""
        training = self._training
        resources, (at, _) = training.trainer.resources, training.recorder.timeline.find_current()
        evaluates = bool(training.evaluations.waits())
        at = "evaluate" if evaluates and at == IDLE else at
        own = "rollouts" if at == EPISODES else OWN_WORK.get(at, OWN_WORK[IDLE])
        idle = _IDLE_FOR.get(at, "the learner")
        activities = list_ranks(self._process_group.list_places(), own)
        controller, engine = resources.controller, resources.engine
        if isinstance(engine, ServerLister):
            activities += engine.list_servers(() if controller is None else controller.count_requests())
        if controller is not None:
            return activities + controller.list_players(idle)
        if not training.recorder.demonstrates:
            doing = sum_waits(training.waits(), training.trainer.rollout.concurrency.queued, idle)
            activities.append(ProcessActivity("rollouts", "in the run's process", doing))
        return activities

    def describe(self, activities: Sequence[ProcessActivity]) -> dict[str, Any]:
        """Describe who waits on whom now, as plain data."""
        training = self._training
        at, seconds = training.recorder.timeline.find_current()
        waits, evaluation = training.trainer.rollout.waits(), training.evaluations.waits()
        sentence = describe_now(
            at,
            seconds,
            waits,
            evaluation,
            self._process_group.list_places(),
            demonstrates=training.recorder.demonstrates,
        )
        return {
            "step": training.recorder.step,
            "unix": round(time.time(), 3),
            "elapsed": round(training.recorder.timeline.elapsed, 3),
            "sentence": sentence,
            "processes": describe_activities(activities),
        }


def list_ranks(places: Mapping[int, RankPlace], own: str) -> list[ProcessActivity]:
    """List what each of the learner's processes is at; ``own``: what rank 0 is at while it does not learn."""
    computing = [rank for rank, place in places.items() if place.computes]
    return [
        ProcessActivity(
            "rank", f"rank {rank}", {_describe_rank(rank, places, computing, own): ActivityCount(1, place.seconds)}
        )
        for rank, place in places.items()
    ]


def _describe_rank(rank: int, places: Mapping[int, RankPlace], computing: Sequence[int], own: str) -> str:
    place = places[rank]
    if place.computes:
        return "learns"
    if rank == 0 and place.location == "idle":
        return own
    others = [other for other in computing if other != rank]
    if others:
        return f"rank {others[0]}" if len(others) == 1 else "other ranks"
    if place.location == "idle" or (0 in places and places[0].location == "idle"):  # until rank 0 has an update for it
        return "rollouts" if own == "rollouts" else "rank 0"
    return "exchanges"  # all are in a collective


def describe_now(
    at: str,
    seconds: float,
    waits: Sequence[Wait],
    evaluation: Sequence[Wait],
    places: Mapping[int, RankPlace],
    *,
    demonstrates: bool = False,
) -> str:
    """Say in a sentence who waits on whom.

    Args:
        at: what the run is at, in the words of its timeline, and for how many seconds.
        waits: of the rollouts that are trained on; ``evaluation``: of those that are not.
        places: of the learner's processes.
        demonstrates: the run learns from demonstrations: no rollouts wait for it.
    """
    age = f"{seconds:.0f} s"
    if evaluation and (at in (IDLE, "evaluate") or (at == EPISODES and demonstrates)):
        return f"The learner waits for an evaluation: {describe_waits(evaluation)}."
    if at == EPISODES and demonstrates:
        return f"The learner takes its next demonstrations ({age})."
    if at == EPISODES:
        of = describe_waits(waits) if waits else "the first of them begin"
        return f"The learner waits for rollouts ({age}): {of}."
    if at == "learn":
        doing = _name_slow_rank(places) or f"The learner updates the policy ({age})"
        if demonstrates:
            return f"{doing}."
        return f"{doing}; {describe_waits(waits)}." if waits else f"{doing}. Rollouts wait for the learner."
    word = {"sync": "The engine is given new weights", "checkpoint": "A checkpoint is written"}.get(at)
    rest = f"meanwhile {describe_waits(waits)}" if waits else "rollouts wait for that"
    return f"{word or 'The run is between two steps'} ({age}){'' if demonstrates else f'; {rest}'}."


def _name_slow_rank(places: Mapping[int, RankPlace]) -> str:
    """Name the rank that the others have waited for; empty where none has kept them long."""
    computing = [(rank, place) for rank, place in places.items() if place.computes and place.seconds > TOLD_S]
    waiting = [rank for rank, place in places.items() if place.location == "waits" and place.seconds > TOLD_S]
    if len(computing) != 1 or not waiting:
        return ""
    (rank, place), names = computing[0], " and ".join(map(str, waiting[:4]))
    who = f"Rank {names} of the learner waits" if len(waiting) == 1 else f"Ranks {names} of the learner wait"
    more = f" (and {len(waiting) - 4} more)" if len(waiting) > 4 else ""
    return f"{who}{more} for rank {rank}, which has been at {place.location} for {place.seconds:.0f} s"
