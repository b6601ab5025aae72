"""Groups ahead of the learner: never too old, none lost for being slow, and the plain loop where nothing may be old."""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import ContractError, Env, EnvSpec, InfraError, Reply, Step, Trajectory
from agentrl.environments.curriculum import CurriculumSampler
from agentrl.environments.task_sampler import Outcome, TaskDraw, TaskSampler
from agentrl.rollout.rollout import Rollout
from agentrl.rollout.scheduler import BatchPlan, RolloutScheduler, StepBatch, compute_staleness, open_scheduler
from agentrl.testing import STOP, ByteRenderer, ScriptedEngine
from agentrl.types import Completion, Observation


class Slow(Env):
    """Two turns; between them as long as ``seconds`` says of its task; worth the parity of its seeds."""

    open = 0

    def __init__(self, seconds: Any = lambda task: 0.0, worth: Any = lambda task: random.random()) -> None:
        self.seconds, self.worth = seconds, worth

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        type(self).open += 1
        self.task, self.turn = seed, 0
        return f"task {seed}", {}

    async def step(self, action: Reply) -> Step:
        self.turn += 1
        await anyio.sleep(self.seconds(self.task))
        return Step("go on", 0.0, self.turn == 2, False, {})

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        return {"r": self.worth(self.task)}

    async def close(self) -> None:
        type(self).open -= 1


def rollout(**env: Any) -> Rollout:
    return Rollout(EnvSpec(Slow, **env), ScriptedEngine(["a", "b"]), ByteRenderer())


async def learned(scheduler: RolloutScheduler, engine: Any, steps: int, seconds: float = 0.0) -> list[StepBatch]:
    """A learner that takes its time."""
    batches = []
    for step in range(steps):
        batches.append(await scheduler.next_batch())
        await anyio.sleep(seconds)
        await engine.update_weights(None, step + 1)
        scheduler.advance()
    return batches


async def test_where_nothing_may_be_old_it_is_the_plain_loop() -> None:
    runner, sampler = rollout(worth=lambda task: float(task % 2)), TaskSampler(5, seed=3)
    async with open_scheduler(runner, sampler, BatchPlan(4, 2), seed=7) as scheduler:
        batches = await learned(scheduler, runner.engine, 3)
    tasks = TaskSampler(5, seed=3).next_tasks(12)
    for number, batch in enumerate(batches):
        own = tasks[4 * number : 4 * number + 4]
        runner.engine.version = number  # type: ignore[attr-defined]
        plain = await runner.batch(own, 2, seed=7 * 2**31 + number + 1)
        assert [g.task for g in batch.groups] == own
        assert [[t.segments for t in g] for g in batch.groups] == [[t.segments for t in g] for g in plain]
        assert batch.staleness == [0] * 4


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 3),
    st.lists(st.floats(0, 0.004), min_size=1, max_size=9),
    st.floats(0, 0.004),
)
def test_no_group_is_too_old_and_each_is_learned_from_once(
    tasks: int, k: int, seconds: list[float], learning: float
) -> None:
    runner = rollout(seconds=lambda task: seconds[task % len(seconds)])
    steps = 5

    async def run() -> list[StepBatch]:
        async with open_scheduler(runner, TaskSampler(None, 0), BatchPlan(tasks, 2, k)) as scheduler:
            return await learned(scheduler, runner.engine, steps, learning)

    batches = anyio.run(run)
    assert [len(b.groups) for b in batches] == [tasks] * steps
    taken = [g.task for b in batches for g in b.groups]
    assert len(set(taken)) == len(taken)
    for version, batch in enumerate(batches):
        assert max(batch.staleness) <= k
        assert all(0 <= age <= k for age in compute_staleness([t for g in batch.groups for t in g.scored], version))
    assert set(range(tasks * max(steps - k, 0))) <= set(taken)  # whoever was slow is not left out
    assert Slow.open == 0


async def test_while_the_learner_learns_others_play_or_nobody_does() -> None:
    for k in (0, 1):
        runner = rollout(seconds=lambda task: 0.2 * (task // 4))  # later ones are still at it when a batch is there
        async with open_scheduler(runner, TaskSampler(None, 0), BatchPlan(4, 2, k)) as scheduler:
            for step in range(3):
                await scheduler.next_batch()
                if k:
                    with anyio.fail_after(60):
                        while not Slow.open:  # noqa: ASYNC110 - nobody tells
                            await anyio.sleep(0.001)
                else:
                    await anyio.sleep(0.01)
                    assert not Slow.open
                await runner.engine.update_weights(None, step + 1)
                scheduler.advance()


async def test_a_slow_group_is_waited_for_when_its_time_has_come_and_not_before() -> None:
    runner = rollout(seconds=lambda task: 0.2 if task == 0 else 0.0)
    async with open_scheduler(runner, TaskSampler(None, 0), BatchPlan(2, 2, 2)) as scheduler:
        batches = await learned(scheduler, runner.engine, 4)
    homes = [i for i, b in enumerate(batches) for g in b.groups if g.task == 0]
    assert homes == [2]


def lost_of(task: int) -> float:
    if task % 3 == 0:
        raise InfraError("gone", "the world is gone")
    return random.random()


async def test_a_lost_group_is_played_anew_with_another_task() -> None:
    runner = rollout(worth=lost_of)
    async with open_scheduler(runner, TaskSampler(None, 0), BatchPlan(4, 2)) as scheduler:
        batch = await scheduler.next_batch()
    assert [g.task for g in batch.resampled] == [0, 3]
    assert sorted(g.task for g in batch.groups) == [1, 2, 4, 5]
    async with open_scheduler(runner, TaskSampler(None, 0), BatchPlan(4, 2, max_resamples=1)) as scheduler:
        batch = await scheduler.next_batch()
    assert len(batch.resampled) == 1
    assert sum(not g.scored for g in batch.groups) == 1


async def test_flat_groups_are_played_anew_if_that_is_wanted_and_so_often_at_most() -> None:
    worth = {0: 1.0, 1: 0.0}
    runner = rollout(worth=lambda task: worth.get(task, random.random()))
    for dynamic, others in ((True, [0, 1]), (False, [])):
        async with open_scheduler(runner, TaskSampler(None, 0), BatchPlan(3, 4, dynamic_sampling=dynamic)) as scheduler:
            batch = await scheduler.next_batch()
        assert [g.task for g in batch.resampled] == others
        assert len(batch.groups) == 3
    hopeless = rollout(worth=lambda task: 0.0)
    async with open_scheduler(
        hopeless, TaskSampler(None, 0), BatchPlan(3, 2, max_resamples=7, dynamic_sampling=True)
    ) as scheduler:
        first, second = await learned(scheduler, hopeless.engine, 2)
    assert (len(first.resampled), len(first.groups), len(second.resampled)) == (7, 3, 7)


@pytest.mark.parametrize("oversample", [0, 3])
async def test_a_task_drawn_twice_gets_another_seed(oversample: int) -> None:
    runner = rollout(worth=lambda task: 0.0)
    runner.oversample = oversample
    seen: list[Any] = []

    class Dice(ScriptedEngine):
        async def generate(self, token_ids: Any, params: Any, *, session: str) -> Any:
            seen.append(params.seed)
            return await super().generate(token_ids, params, session=session)

    runner.engine = Dice(["a"])
    async with open_scheduler(
        runner, TaskSampler(1, 0), BatchPlan(3, 2, max_resamples=2, dynamic_sampling=True)
    ) as scheduler:
        await scheduler.next_batch()
    assert len(seen) >= 2 * 2 * (3 + 2)
    assert len(set(seen)) == len(seen)
    seen.clear()
    await runner.batch([0, 0, 0], 2)
    assert len(set(seen)) == len(seen)


async def test_a_broken_contract_ends_it_and_everything_is_closed() -> None:
    def broken(task: int) -> Any:
        return 0.0 if task < 3 else "ten"

    runner = rollout(worth=broken, seconds=lambda task: 0.001 * task)
    with pytest.raises(ContractError, match="score"):
        async with open_scheduler(runner, TaskSampler(None, 0), BatchPlan(2, 2, 1)) as scheduler:
            await learned(scheduler, runner.engine, 5)
    assert Slow.open == 0


async def test_what_is_being_played_at_the_end_is_cancelled() -> None:
    runner = rollout(seconds=lambda task: 0.0 if task < 2 else 60.0)
    with anyio.fail_after(60):
        async with open_scheduler(runner, TaskSampler(None, 0), BatchPlan(2, 2, 1)) as scheduler:
            await scheduler.next_batch()
            assert Slow.open > 0
    assert Slow.open == 0


class Listening(TaskSampler):
    """Keeps what it hears."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.heard: list[Outcome] = []

    def record(self, outcome: Outcome) -> None:
        self.heard.append(outcome)


async def test_the_sampler_hears_of_every_group_once_also_of_those_that_are_resampled_or_lost() -> None:
    worth = {0: 1.0, 1: 0.0}
    runner = rollout(worth=lambda task: lost_of(task) if task > 5 else worth.get(task, random.random()))
    sampler = Listening(None, 0)
    async with open_scheduler(runner, sampler, BatchPlan(3, 4, dynamic_sampling=True, max_resamples=3)) as scheduler:
        batches = await learned(scheduler, runner.engine, 3)
    assert sorted(o.number for o in sampler.heard) == list(range(len(sampler.heard)))
    assert sorted(o.task for o in sampler.heard) == sorted(g.task for b in batches for g in [*b.groups, *b.resampled])
    assert {o.task for o in sampler.heard if o.resampled} == {g.task for b in batches for g in b.resampled} >= {0, 1, 6}
    heard = {o.task: o for o in sampler.heard}
    assert (heard[0].rewards, heard[6].rewards, heard[6].reward) == ((1.0,) * 4, (), None)


async def test_a_task_drawn_twice_is_heard_of_with_each_draw_s_options() -> None:
    sampler = CurriculumSampler(1, 0, curriculum=lambda history: {"after": len(history)})
    runner = rollout(worth=lambda task: 0.0)
    async with open_scheduler(runner, sampler, BatchPlan(2, 2, dynamic_sampling=True, max_resamples=3)) as scheduler:
        await scheduler.next_batch()
    assert sorted(o.number for o in sampler.history) == [0, 1, 2, 3, 4]
    assert all(o.options == {"after": max(o.number - 1, 0)} for o in sampler.history)


def deals(clock: list[float], drawn: list[Any], kills: Sequence[int] = ()) -> list[Any]:
    """Play four steps of an ordered scheduler whose turns take what the clock says, killed after some steps.

    Returns what each step learned from, with its seeds, and what the sampler heard; ``drawn`` gets each draw.
    """
    ticks = iter(clock * 1000)

    class Clock(ScriptedEngine):
        async def generate(self, token_ids: Any, params: Any, *, session: str) -> Any:
            await anyio.sleep(next(ticks))
            ids = (*str(params.seed % 7).encode(), STOP)
            return Completion(ids, (-0.5,) * 2, (0,) * 2, "stop")

    def worth(trajectory: Trajectory) -> float:
        if trajectory.task % 5 == 4:
            raise InfraError("gone", "the world is gone")
        return float(any(int(m["content"]) == 0 for m in trajectory.messages if m["role"] == "assistant"))

    def curriculum(history: Sequence[Outcome]) -> Mapping[str, Any]:
        return {"heard": [(o.number, o.reward) for o in history[-3:]]}

    runner = Rollout(EnvSpec(Judged, judge=worth), Clock([""]), ByteRenderer())
    plan = BatchPlan(4, 3, max_resamples=6, dynamic_sampling=True, ordered=True)
    ledger: list[Any] = []
    saved: list[bytes] = [pickle.dumps((CurriculumSampler(7, 3).state(), None))]

    async def go_on(steps: int) -> None:
        sampler = CurriculumSampler(7, 3, curriculum=curriculum)
        state, resumed = pickle.loads(saved[-1])
        sampler.load(state)
        async with open_scheduler(runner, sampler, plan, seed=5, step=len(ledger), state=resumed) as scheduler:
            for _ in range(steps):
                batch = await scheduler.next_batch()
                ledger.append(
                    [[(g.task, [t.messages for t in g]) for g in some] for some in (batch.groups, batch.resampled)]
                )
                saved.append(pickle.dumps((sampler.state(), scheduler.state())))
                scheduler.advance()
            await anyio.sleep(0.002)  # the next step begins, and is lost
        drawn[:] = [(o.number, o.task, o.options, o.rewards, o.resampled) for o in heard_of(saved[-1])]

    for steps in [*kills, 4 - sum(kills)]:
        anyio.run(go_on, steps)
    return ledger


def heard_of(saved: bytes) -> list[Outcome]:
    sampler = CurriculumSampler(7, 3)
    sampler.load(pickle.loads(saved)[0])
    return sampler.history


class Judged(Slow):
    """Worth what a judge says of the episode."""

    def __init__(self, judge: Any) -> None:
        super().__init__()
        self.judge = judge

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        return {"r": self.judge(trajectory)}


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.0005, 0.003]), min_size=3, max_size=11),
    st.sampled_from([(), (1,), (2,), (1, 2), (3,), (1, 1, 1)]),
)
def test_in_order_the_same_tasks_are_drawn_whatever_the_clock_and_the_kills(
    clock: list[float], kills: tuple[int, ...]
) -> None:
    plain: list[Any] = []
    other: list[Any] = []
    assert deals([0.0], plain) == deals(clock, other, kills)
    assert plain == other
    assert [number for number, *_ in plain] == list(range(len(plain)))
    assert any(resampled for *_, resampled in plain)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 2),
    st.lists(st.floats(0, 0.003), min_size=1, max_size=7),
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 0.004)), max_size=6),
    st.booleans(),
)
def test_killed_anywhere_no_task_is_lost_and_none_learned_from_twice(
    k: int, seconds: list[float], kills: list[tuple[int, float]], some_lost: bool
) -> None:
    """A kill comes so many steps and seconds after the checkpoint from which the run went on; each step saves one."""
    worth = lost_of if some_lost else lambda task: random.random()
    runner, plan = (
        rollout(seconds=lambda task: seconds[task % len(seconds)], worth=worth),
        BatchPlan(3, 2, k, max_resamples=2),
    )
    ledger: list[StepBatch] = []
    sampler, saved = TaskSampler(None, 0), None

    async def go_on(steps: int, then_s: float) -> None:
        """Learns and saves, and is gone in the middle of the next step."""
        nonlocal sampler, saved
        again = TaskSampler(None, 0)
        again.load(sampler.state())
        async with open_scheduler(
            runner, again, plan, step=len(ledger), state=pickle.loads(pickle.dumps(saved))
        ) as scheduler:
            for _ in range(steps):
                ledger.append(await scheduler.next_batch())
                scheduler.advance()
                saved = scheduler.state()
                sampler = TaskSampler(None, 0, again.cursor)
            with anyio.move_on_after(then_s):
                await scheduler.next_batch()

    for steps, then_s in [*kills, (3, 0.0)]:
        anyio.run(go_on, steps, then_s)
    assert saved is not None
    learned = [g.task for b in ledger for g in b.groups]
    others = [g.task for g in [*(g for b in ledger for g in b.resampled), *saved.resampled]]
    pending = [drawn.task for _, drawn in saved.slots]
    assert sorted([*learned, *others, *pending]) == list(range(sampler.cursor))
    assert max(age for b in ledger for age in b.staleness) <= k
    assert all(len(b.groups) == 3 for b in ledger)
    assert Slow.open == 0


async def test_restarted_groups_keep_their_seeds() -> None:
    """A task drawn twice, before the kill and after it, is not played twice alike."""
    runner, sampler = rollout(), TaskSampler(2, 0)
    async with open_scheduler(runner, sampler, BatchPlan(3, 2, 1)) as scheduler:
        await learned(scheduler, runner.engine, 2)
        before = scheduler.state()
    async with open_scheduler(runner, sampler, BatchPlan(3, 2, 1), step=2, state=before) as scheduler:
        batch = await scheduler.next_batch()
        after = scheduler.state()
        kept = [place for place in after.slots if place in before.slots]
        assert len(kept) == len(before.slots) - len(batch.groups)
        assert after.scheduled == before.scheduled
        scheduler.advance()
        seeds = [(number // 3, drawn.task, drawn.first) for number, drawn in scheduler.state().slots]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("staleness", [0, 2])
async def test_no_group_is_begun_that_would_be_learned_from_after_the_last_step(staleness: int) -> None:
    runner, sampler = rollout(), Counted(9, seed=0)
    async with open_scheduler(runner, sampler, BatchPlan(2, 2, staleness, steps=3)) as scheduler:
        await learned(scheduler, runner.engine, 3)
        await anyio.sleep(0.02)
    assert sampler.drawn == 6


@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_run_that_stops_begins_nothing_but_the_batch_it_waits_for(staleness: int) -> None:
    stop = anyio.Event()
    runner, sampler = rollout(worth=lambda task: 0.0), Counted(9, seed=0)
    async with open_scheduler(
        runner, sampler, BatchPlan(2, 2, staleness, dynamic_sampling=True), stopping=stop.is_set
    ) as scheduler:
        await scheduler.next_batch()
        stop.set()
        begun = sampler.drawn
        await scheduler.drain()  # what was begun ahead is flat, and nothing takes its place
        scheduler.advance()
        assert sampler.drawn == begun
        state = scheduler.state()
    async with open_scheduler(runner, sampler, BatchPlan(2, 2, staleness, steps=2), step=1, state=state) as scheduler:
        await learned(scheduler, runner.engine, 1)
    assert scheduler._scheduled == max(4, state.scheduled)  # a run that goes on has the batch that it needs


async def test_draining_leaves_nothing_in_play_and_loses_nothing() -> None:
    runner, sampler = rollout(seconds=lambda task: 0.01 * (task % 3)), Counted(9, seed=0)
    async with open_scheduler(runner, sampler, BatchPlan(2, 2, 1, steps=4)) as scheduler:
        await scheduler.next_batch()
        assert runner.running
        await scheduler.drain()
        assert not runner.running
        scheduler.advance()
        rest = await learned(scheduler, runner.engine, 3)
    assert sampler.drawn == 2 + sum(len(b.groups) for b in rest)


class Counted(TaskSampler):
    """Counts its draws."""

    drawn = 0

    def draw(self) -> TaskDraw:
        self.drawn += 1
        return super().draw()
