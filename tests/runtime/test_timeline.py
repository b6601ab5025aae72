"""A run's time in numbers and pictures, over whole rollouts whose clock is the test's."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import EnvSpec, InfraError, ToolEnv, Trajectory, tool
from agentrl.credit import OUTCOMES, assign_credit
from agentrl.environments.task_sampler import TaskSampler
from agentrl.learner.advantages.group import grpo
from agentrl.rollout.rollout import Rollout
from agentrl.rollout.scheduler import BatchPlan, open_scheduler
from agentrl.runtime.critical_path import EPISODES
from agentrl.runtime.lanes import IDLE
from agentrl.runtime.timeline import DRAWN, MeasuredStretch, Timeline, thin_pieces
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.types import Observation


def ticking(rng: random.Random) -> Callable[[], float]:
    """A clock that goes on by a whole number whenever it is looked at: sums of its intervals are exact."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += rng.choice((0, 1, 7))
        return now

    return clock


class World(ToolEnv):
    """Tools that take some turns of the event loop; an episode in ten fails."""

    begun = 0

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    @tool
    async def near(self) -> str:
        """Answer soon."""
        await self._pause(2)
        return "near"

    @tool
    async def far(self) -> str:
        """Answer later."""
        await self._pause(6)
        return "far"

    async def _pause(self, most: int) -> None:
        for _ in range(self.rng.randint(0, most)):
            await anyio.lowlevel.checkpoint()

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        type(self).begun += 1
        await self._pause(3)
        return self.ask("?"), {}

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        await self._pause(2)
        if self.rng.random() < 0.1:
            raise InfraError("broken", "it broke")
        return {"r": float(self.rng.random() < 0.5)}


def said(rng: random.Random) -> Callable[[str, int], str]:
    turns = [
        "",
        call("near"),
        call("far"),
        call("near") + call("far"),
        call("nowhere"),
    ]
    return lambda session, turn: rng.choice(turns)


def assert_true(measured: MeasuredStretch) -> None:
    """Lanes within the wall clock; those and idle cover it; what was waited for sums to it."""
    values, picture = measured.values, measured.picture
    assert sum(v for name, v in values.items() if name.startswith("wait/")) == measured.wall
    assert all(0 <= v <= measured.wall for name, v in values.items() if name.startswith("time/"))
    edges = sorted({0.0, measured.wall, *(t for its in picture["lanes"].values() for i in its for t in i)})
    for a, b in pairwise(edges):
        busy = {o for o, its in picture["lanes"].items() if o != IDLE and any(x <= a and b <= y for x, y in its)}
        idle = any(x <= a and b <= y for x, y in picture["lanes"].get(IDLE, []))
        assert idle != bool(busy)
    assert all(a[1] == b[0] for a, b in pairwise(picture["waited"]))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(2, 3), st.integers(0, 2), st.booleans())
def test_over_any_schedule_time_is_whole_and_every_episode_is_accounted_for(
    seed: int, tasks: int, size: int, staleness: int, dynamic_sampling: bool
) -> None:
    async def run() -> None:
        rng = random.Random(seed)
        time = Timeline(0.0, ticking(rng), lambda: 0.0, lambda: 0.0)
        play = Rollout(EnvSpec(World, rng=rng), ScriptedEngine(said(rng)), ByteRenderer(), lanes=time.lanes)
        plan = BatchPlan(tasks, size, staleness, dynamic_sampling=dynamic_sampling, steps=3)
        outcomes: Counter[str] = Counter()
        World.begun = 0
        async with open_scheduler(play, TaskSampler(9, seed=seed % 99), plan, seed=1) as stream:
            for step in range(1, 4):
                time.at(EPISODES)
                taken = await stream.next_batch()
                time.at("learn")
                for _ in range(rng.randint(0, 20)):
                    await anyio.lowlevel.checkpoint()  # others play meanwhile
                credit = assign_credit(taken.groups, grpo, reduce=lambda n: [1.0] * len(n), resampled=taken.resampled)
                outcomes.update(e.outcome.partition(":")[0] for own in credit.entries for e in own)
                if step == 2:
                    time.at(EPISODES)
                    await stream.drain()
                    assert not play.running  # nothing is in flight where an evaluation begins
                stream.advance()
                assert_true(time.cut())
                in_flight = World.begun - sum(outcomes.values())
                assert 0 <= in_flight <= (staleness + 1 + dynamic_sampling) * tasks * size
        assert set(outcomes) <= set(OUTCOMES)
        assert World.begun == sum(outcomes.values())  # the scheduler knows the last step: none is in flight

    anyio.run(run)


def test_a_picture_has_few_pieces_and_no_gaps() -> None:
    pieces = [(float(i), i + 1.0, "ab"[i % 2]) for i in range(5 * DRAWN)]
    drawn = thin_pieces(pieces, 0.0)
    assert len(drawn) <= DRAWN
    assert (drawn[0][0], drawn[-1][1]) == (0.0, 5.0 * DRAWN)
    assert all(a[1] == b[0] for a, b in pairwise(drawn))


def test_a_run_that_is_resumed_counts_on() -> None:
    clock = ticking(random.Random(0))
    before = Timeline(0.0, clock)
    elapsed = before.elapsed
    again = Timeline(elapsed, clock)
    assert again.cut().values["clock/elapsed"] == pytest.approx(elapsed, abs=30)
    assert again.elapsed > elapsed
