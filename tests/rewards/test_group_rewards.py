"""Reward functions as TRL calls them: all completions of a group at once, and what they log beside their rewards."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from agentrl_envs.prompts import Prompts

from agentrl import ContractError, Env, EnvSpec, Reply, Step, Trajectory, train
from agentrl.rewards.functions import per_episode, resolve_rewards
from agentrl.rewards.trainer_state import TrainerState, set_trainer_state
from agentrl.rollout.episode import Branching, EpisodeLimits
from agentrl.rollout.rollout import Rollout
from agentrl.runs.metrics import add_logged_metrics
from agentrl.testing import ByteRenderer, ScriptedEngine
from agentrl.types import Group, Observation

ROWS = [{"prompt": f"How long is {n}?", "wanted": n} for n in range(20)]


def say_in_turn() -> ScriptedEngine:
    """Each session says one ``a`` more than the one before it."""
    told: dict[str, str] = {}
    return ScriptedEngine(lambda session, _: told.setdefault(session, "a" * (len(told) + 1)))


class Holding(ScriptedEngine):
    """Says ``a``; all sessions but the first wait until they are released."""

    def __init__(self) -> None:
        super().__init__(["a"])
        self.released = anyio.Event()

    async def generate(self, *arguments: Any, **named: Any) -> Any:
        if self.turns:
            await self.released.wait()
        return await super().generate(*arguments, **named)


async def play(size: int, *rewards: Any, engine: ScriptedEngine | None = None, **settings: Any) -> Group:
    own = {name: settings.pop(name) for name in ("oversample", "limits", "on_episode") if name in settings}
    on_episode = own.pop("on_episode", None)
    spec = EnvSpec(Prompts, data=ROWS, rewards=list(rewards), **settings)
    async with spec.open():
        rollout = Rollout(spec, engine or say_in_turn(), ByteRenderer(), **own)
        return await rollout.group(3, size, on_episode=on_episode)


def rank(completions: list[str], **_: Any) -> list[float]:
    """The share of the others that are shorter."""
    lengths = [len(c) for c in completions]
    return [sum(other < own for other in lengths) / max(len(lengths) - 1, 1) for own in lengths]


@per_episode
def alone(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completions))]


async def test_a_function_is_called_once_with_all_completions_of_the_group() -> None:
    given: list[dict[str, Any]] = []

    def look(prompts: Any, completions: Any, completion_ids: Any, wanted: Any, **_: Any) -> list[float]:
        given.append({"prompts": prompts, "completions": completions, "ids": completion_ids, "wanted": wanted})
        return [0.0] * 3

    group = await play(3, look)
    said = [t.messages[-1]["content"] for t in group]
    assert sorted(said) == ["a", "aa", "aaa"]
    ids = [list(t.segments[-1].token_ids) for t in group]
    assert given == [{"prompts": ["How long is 3?"] * 3, "completions": said, "ids": ids, "wanted": [3, 3, 3]}]


async def test_a_comparison_is_worth_what_it_says_of_each_member() -> None:
    group = await play(5, rank, alone, reward_weights=[1.0, 0.5])
    found = {t.messages[-1]["content"]: (dict(t.rewards), t.reward) for t in group}
    for n in range(5):
        assert found["a" * (n + 1)] == ({"rank": n / 4, "alone": 1.0}, n / 4 + 0.5)


async def test_async_functions_are_awaited_and_all_of_them_run_together() -> None:
    meeting = threading.Barrier(2, timeout=60)
    met = anyio.Event()

    async def one(completions: list[str], **_: Any) -> list[float]:
        await anyio.to_thread.run_sync(meeting.wait)
        met.set()
        return [1.0] * len(completions)

    def two(completions: list[str], **_: Any) -> list[float]:
        meeting.wait()
        return [2.0] * len(completions)

    async def three(completions: list[str], **_: Any) -> list[float]:
        await met.wait()
        return [3.0] * len(completions)

    with anyio.fail_after(60):
        group = await play(2, one, two, three)
    assert [t.reward for t in group] == [6.0, 6.0]


async def test_members_that_the_world_failed_are_not_compared() -> None:
    seen: list[int] = []

    def count(completions: list[str], **_: Any) -> list[float]:
        seen.append(len(completions))
        return [1.0] * len(completions)

    group = await play(4, count, engine=Holding(), limits=EpisodeLimits(episode_timeout_s=2.0))
    assert seen == [1]
    assert sorted(str(t.fault and t.fault.kind) for t in group) == ["None"] + ["episode_timeout"] * 3
    assert len(group.scored) == 1


async def test_where_a_comparison_fails_each_compared_member_is_the_worlds_fault() -> None:
    def broken(**_: Any) -> list[float]:
        raise ConnectionError("the ranking is down")

    group = await play(3, alone, broken)
    assert [t.fault.kind for t in group if t.fault] == ["env_score"] * 3
    assert group.scored == ()
    assert all("the ranking is down" in t.fault.message for t in group if t.fault)


async def test_a_comparison_has_the_deadline_of_a_turn() -> None:
    async def hang(**_: Any) -> list[float]:
        await anyio.sleep_forever()
        return []

    group = await play(2, hang, limits=EpisodeLimits(turn_timeout_s=0.05))
    assert [t.fault and (t.fault.kind, t.fault.message) for t in group] == [
        ("turn_timeout", "Prompts.score_group of task 3 took over 0.05 s")
    ] * 2


async def test_who_waits_for_a_comparison_is_told() -> None:
    started, release = anyio.Event(), anyio.Event()

    async def slow(completions: list[str], **_: Any) -> list[float]:
        started.set()
        await release.wait()
        return [0.0] * len(completions)

    spec = EnvSpec(Prompts, data=ROWS, rewards=[slow])
    async with spec.open(), anyio.create_task_group() as tasks:
        rollout = Rollout(spec, say_in_turn(), ByteRenderer())
        tasks.start_soon(rollout.group, 0, 2)
        with anyio.fail_after(60):
            await started.wait()
        assert [w.what for w in rollout.waits()] == ["Prompts.score_group"]
        release.set()
    assert rollout.waits() == []


async def test_none_and_gates_hold_for_compared_rewards() -> None:
    def some(completions: list[str], **_: Any) -> list[float | None]:
        return [None if len(c) == 1 else 1.0 for c in completions]

    @per_episode
    def brief(completions: list[str], **_: Any) -> list[float]:
        return [float(len(c) < 3) for c in completions]

    group = await play(3, some, brief, gate="brief")
    found = {t.messages[-1]["content"]: dict(t.rewards) for t in group}
    assert found == {
        "a": {"some": None, "brief": 1.0},
        "aa": {"some": 1.0, "brief": 1.0},
        "aaa": {"some": 0.0, "brief": 0.0},
    }
    assert [t.reward for t in await play(2, lambda completions, **_: [None, None])] == [None, None]


async def test_whoever_watches_is_told_of_an_episode_once_it_has_its_reward() -> None:
    told: list[float | None] = []
    await play(3, rank, on_episode=lambda t: told.append(t.reward))
    assert sorted(r for r in told if r is not None) == [0.0, 0.5, 1.0]


async def test_functions_that_look_at_one_episode_do_not_wait_for_the_group() -> None:
    told: list[float | None] = []
    engine = Holding()

    def watch(t: Trajectory) -> None:
        told.append(t.reward)
        engine.released.set()  # only once the first has its reward

    with anyio.fail_after(60):
        await play(3, alone, engine=engine, on_episode=watch)
    assert told == [1.0] * 3


async def test_spare_members_are_left_out() -> None:
    with anyio.fail_after(60):
        group = await play(1, rank, engine=Holding(), oversample=3)
    assert len(group.scored) == 1


class Walk(Env):
    """Two turns; branches after the first; compared by its last word."""

    scores_groups = True

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        self.turns = 0
        return "walk", {}

    def clone(self) -> Env:
        other = Walk()
        other.turns = self.turns
        return other

    async def step(self, action: Reply) -> Step:
        self.turns += 1
        return Step("on", 0.0, self.turns == 2, False, {})

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"done": 1.0}

    async def score_group(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        return [t.with_rewards({"rank": float(n)}) for n, t in enumerate(trajectories)]


async def test_environments_of_your_own_compare_branches_too() -> None:
    rollout = Rollout(EnvSpec(Walk), ScriptedEngine(["a"]), ByteRenderer(), branching=Branching(1, 2))
    group = await rollout.group(0, 4)
    assert [dict(t.rewards) for t in group] == [{"done": 1.0, "rank": float(n)} for n in range(4)]
    assert dict((await rollout.episode(0)).rewards) == {"done": 1.0, "rank": 0.0}


@pytest.mark.parametrize("returned", [None, [], [1.0, 2.0], "both"])
async def test_an_environment_that_returns_something_else_is_told(returned: Any) -> None:
    class Odd(Walk):
        async def score_group(self, trajectories: Sequence[Trajectory]) -> Any:
            return returned

    with pytest.raises(ContractError, match="must return the 2 trajectories that it was given, in their order"):
        await Rollout(EnvSpec(Odd), ScriptedEngine(["a"]), ByteRenderer()).group(0, 2)


async def test_the_trainers_state_is_given_as_trl_gives_it() -> None:
    seen: list[tuple[int, int, float]] = []

    def scheduled(completions: list[str], trainer_state: TrainerState, **_: Any) -> list[float]:
        seen.append((trainer_state.global_step, trainer_state.max_steps, trainer_state.epoch))
        return [trainer_state.global_step / trainer_state.max_steps if trainer_state.max_steps else 0.0] * len(
            completions
        )

    assert [t.reward for t in await play(2, scheduled)] == [0.0, 0.0]
    set_trainer_state(TrainerState(5, 10, 0.25))
    assert [t.reward for t in await play(2, scheduled)] == [0.5, 0.5]
    assert seen == [(0, 0, 0.0), (5, 10, 0.25)]


async def test_a_function_that_names_its_columns_only_is_not_given_more() -> None:
    def narrow(prompts: Any, completions: Any, completion_ids: Any, wanted: Any) -> list[float]:
        return [1.0] * len(completions)

    assert [t.reward for t in await play(2, narrow)] == [1.0, 1.0]


async def test_metrics_and_columns_that_a_function_logs_are_kept() -> None:
    def log(completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
        log_metric("mean_words", 2.0)
        log_metric("mean_words", 4.0)
        log_extra("length", [len(c) for c in completions])
        return [0.0] * len(completions)

    @per_episode
    def log_own(completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
        log_metric("own", len(completions[0]))
        log_extra("upper", [completions[0].upper()])
        return [0.0]

    group = await play(3, log, log_own)
    for t in group:
        text = t.messages[-1]["content"]
        assert (t.info["length"], t.info["upper"]) == (len(text), text.upper())
        assert dict(t.metrics) == {"mean_words": 3.0, "own": float(len(text))}
    assert add_logged_metrics({"loss": 1.0}, [group]) == {"loss": 1.0, "mean_words": 3.0, "own": 2.0}
    with pytest.raises(ContractError, match=r"log_metric\('own', \.\.\.\): agentrl logs a number of that name itself"):
        add_logged_metrics({"own": 1.0}, [group])


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        (lambda metric, extra: metric("x", "much"), r"log_metric\('x', 'much'\): the value must be a finite number"),
        (lambda metric, extra: metric("x", float("nan")), "must be a finite number"),
        (lambda metric, extra: extra("x", [1]), r"log_extra\('x', ...\) was given 1 values for 2 completions"),
    ],
)
async def test_what_cannot_be_logged_is_told(log: Any, sentence: str) -> None:
    def odd(completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
        log(log_metric, log_extra)
        return [0.0] * len(completions)

    with pytest.raises(ContractError, match=sentence):
        await play(2, odd)


@pytest.mark.parametrize("result", [1.0, [1.0], [1.0, 2.0, 3.0], None, [1.0, "2"], [float("nan"), 1.0]])
async def test_a_list_of_another_length_or_of_no_numbers_is_told(result: Any) -> None:
    def odd(**_: Any) -> Any:
        return result

    with pytest.raises(ContractError, match="reward 'odd' returned"):
        await play(2, odd)


def test_two_functions_of_one_name_are_refused_with_the_place_of_both() -> None:
    named = functools.partial(rank, level=2)
    assert list(resolve_rewards([named, alone])) == ["rank", "alone"]
    with pytest.raises(ContractError) as told:
        resolve_rewards([rank, named])
    assert f"two rewards are called 'rank': {__name__}:rank (line " in str(told.value)
    assert f"and a partial of {__name__}:rank (line " in str(told.value)
    with pytest.raises(
        ContractError, match=r"two rewards are called '<lambda>': .*<lambda> \(line .*__name__ = 'NAME'"
    ):
        resolve_rewards([lambda completions: [1.0], lambda completions: [2.0]])
    other = functools.partial(rank, level=3)
    other.__name__ = "rank_3"  # type: ignore[attr-defined]
    assert list(resolve_rewards([rank, other])) == ["rank", "rank_3"]


@pytest.mark.slow
def test_a_training_by_comparison_logs_what_its_rewards_log(tmp_path: Path) -> None:
    states: list[tuple[int, int, float]] = []

    def longest(completions: list[str], trainer_state: TrainerState, log_metric: Any, **_: Any) -> list[float]:
        states.append((trainer_state.global_step, trainer_state.max_steps, trainer_state.epoch))
        log_metric("spread", float(max(map(len, completions)) - min(map(len, completions))))
        return [float(len(c) == max(map(len, completions))) for c in completions]

    small = {"tasks_per_step": 2, "group_size": 4, "max_tokens": 8}
    settings = {"data": ROWS, "rewards": [longest]}
    run = {"dir": str(tmp_path / "run")}
    train("prompts", env_args=settings, steps=2, rollout=small, eval={"every": 0, "final_tasks": 1}, run=run)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "spread" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert set(states) == {(0, 2, 0.0), (1, 2, 2 / 18), (2, 2, 4 / 18)}
