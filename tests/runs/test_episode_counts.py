"""Every episode that was begun is counted once, whatever became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import cycle
from typing import Any

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import Env, EnvSpec, InfraError, Reply, Step, Trajectory
from agentrl.credit import OUTCOMES, assign_credit
from agentrl.environments.task_sampler import TaskSampler
from agentrl.rollout.rollout import Rollout
from agentrl.rollout.scheduler import BatchPlan, open_scheduler
from agentrl.settings.catalogue import list_own_entries
from agentrl.testing import STOP, ByteRenderer, ScriptedEngine
from agentrl.types import Completion, Observation, Stop

ADVANTAGES = dict(list_own_entries("advantage"))

FATES = ("lost", "no reward", "cut", "0", "0", "1")
MASKED = frozenset({Stop.TRUNCATED})


class Fate(Env):
    """Two turns; what becomes of it is in the last word."""

    begun = 0

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        type(self).begun += 1
        self.turn = 0
        return "go", {}

    async def step(self, action: Reply) -> Step:
        self.turn, self.word = self.turn + 1, action.content
        if self.word == "lost":
            raise InfraError("gone", "the world is gone")
        return Step("on", 0.0, self.turn == 2 and self.word != "cut", self.turn == 2 and self.word == "cut", {})

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        return {"r": float(self.word) if self.word in "01" else None if self.word == "no reward" else 1.0}


class Sayings(ScriptedEngine):
    """Says fates, each as late as the schedule has it."""

    def __init__(self, fates: list[str], seconds: list[float]) -> None:
        super().__init__([""])
        self.fates, self.seconds = cycle(fates), cycle(seconds)

    async def generate(self, token_ids: Any, params: Any, *, session: str) -> Any:
        await anyio.sleep(next(self.seconds))
        ids = (*next(self.fates).encode(), STOP)
        return Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), "stop")


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(2, 4),
    st.integers(0, 2),
    st.integers(0, 3),
    st.sampled_from([None, 0, 1, 5]),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from(FATES), min_size=1, max_size=11),
    st.lists(st.sampled_from([0.0, 0.0005, 0.003]), min_size=1, max_size=7),
)
def test_episodes_begun_are_those_of_all_outcomes_those_cancelled_and_those_not_yet_taken(
    tasks: int,
    size: int,
    staleness: int,
    oversample: int,
    max_resamples: int | None,
    dynamic_sampling: bool,
    ordered: bool,
    fates: list[str],
    seconds: list[float],
) -> None:
    Fate.begun = 0
    play = Rollout(EnvSpec(Fate), Sayings(fates, seconds), ByteRenderer(), oversample=oversample)
    plan = BatchPlan(
        tasks, size, staleness, max_resamples=max_resamples, dynamic_sampling=dynamic_sampling, ordered=ordered
    )
    counts: Counter[str] = Counter()

    async def run() -> int:
        async with open_scheduler(play, TaskSampler(3, 0), plan) as stream:
            for _ in range(3):
                batch = await stream.next_batch()
                credit = assign_credit(
                    batch.groups,
                    ADVANTAGES["dr_grpo"],
                    reduce=lambda lengths: [1.0] * len(lengths),
                    mask_stop_reasons=MASKED,
                    resampled=batch.resampled,
                )
                counts.update(credit.counts())
                assert sum(credit.counts().values()) == sum(
                    len(g.trajectories) for g in (*batch.groups, *batch.resampled)
                )
                stream.advance()
            await stream.drain()
            waiting = [p.group for p in stream._slots if p.group is not None] + stream._resampled
            return sum(len(g.trajectories) for g in waiting)

    waiting = anyio.run(run)
    assert set(counts) <= set(OUTCOMES)
    assert sum(counts.values()) + play.cancelled + waiting == Fate.begun
    assert oversample or not play.cancelled
