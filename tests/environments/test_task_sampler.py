"""A run's data cursor is one number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from agentrl_envs import math_tasks, shop_tasks
from hypothesis import given
from hypothesis import strategies as st

from agentrl import ContractError, Env, EnvSpec, Reply, Step, UserError
from agentrl.environments.task_sampler import HELD_OUT, TaskSampler, task_index, task_integer
from agentrl.evaluation.evaluate import list_tasks
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine
from agentrl.types import Observation


@given(st.integers(1, 40), st.integers(0, 5), st.lists(st.integers(1, 30), max_size=6))
def test_each_epoch_is_a_permutation_however_it_is_taken(count: int, seed: int, takes: list[int]) -> None:
    sampler = TaskSampler(count, seed)
    tasks = [task for n in takes for task in sampler.next_tasks(n)]
    assert sampler.cursor == len(tasks)
    for epoch in range(len(tasks) // count):
        assert sorted(tasks[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert TaskSampler(count, seed).next_tasks(len(tasks)) == tasks


@given(st.integers(1, 40), st.integers(0, 100))
def test_it_goes_on_from_its_cursor(count: int, cursor: int) -> None:
    assert TaskSampler(count, 3, cursor).next_tasks(5) == TaskSampler(count, 3).next_tasks(cursor + 5)[cursor:]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, second = TaskSampler(100, 0).next_tasks(100), TaskSampler(100, 0, 100).next_tasks(100)
    assert len({tuple(order) for order in (first, second, TaskSampler(100, 1).next_tasks(100), range(100))}) == 4


def test_a_generator_never_repeats_and_seeds_never_meet() -> None:
    assert TaskSampler(None, 0).next_tasks(3) == [0, 1, 2]
    assert TaskSampler(None, 2, 5).next_tasks(2) == [2 * 2**32 + 5, 2 * 2**32 + 6]
    assert TaskSampler(None, 2**31 - 1, 2**32 - 1).next_tasks(1)[0] < 2**63  # what a column of int64 holds


def test_nothing_to_train_on_is_told() -> None:
    with pytest.raises(ContractError, match="the environment has 0 tasks to train on"):
        TaskSampler(0, 0)


@given(st.integers(0, 2**31 - 1), st.integers(0, HELD_OUT - 1), st.integers(0, 2**31 - HELD_OUT - 1))
def test_no_run_trains_on_a_held_out_integer(seed: int, trained: int, held: int) -> None:
    integers = {task_integer("train", trained, seed), task_integer("test", held)}
    assert len(integers) == 2
    assert max(integers) < 2**63
    assert task_index(task_integer("test", held)) == held
    assert task_integer("test", task_integer("test", held)) == task_integer("test", held) < 2**31
    assert task_index(task_integer("train", trained, seed)) == task_integer("train", trained, seed)


def test_a_split_s_integers_end_somewhere() -> None:
    with pytest.raises(UserError, match="split 'test' has 147,483,648 tasks; there is no task 147,483,648"):
        task_integer("test", 2**31 - HELD_OUT)
    with pytest.raises(UserError, match="a run of seed 0 trains on 2,000,000,000 integers at most"):
        TaskSampler(None, 0, HELD_OUT).next_tasks(1)


class Generated(Env):
    """Makes its task of the seed alone, as README's CityQuiz does."""

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return f"task {seed}", {}


class Rows(Generated):
    def count(self, split: str) -> int | None:
        return 5


def test_what_is_held_out_are_other_integers_where_tasks_are_generated_and_own_rows_where_there_are_rows() -> None:
    held = list_tasks(EnvSpec(Generated), 3, "test", 7)
    assert held == [2_000_000_007, 2_000_000_008, 2_000_000_009]
    assert list_tasks(EnvSpec(Generated), 1, "test", held[0]) == held[:1]  # as a stored episode names it
    assert list_tasks(EnvSpec(Generated), 3, "train", 7) == [7, 8, 9]
    assert list_tasks(EnvSpec(Rows), 9, "test", 3) == [3, 4]


def test_environments_that_read_the_split_have_the_test_tasks_that_they_had() -> None:
    for index in range(4):
        for draw in (math_tasks.draw, shop_tasks.draw):
            assert draw(task_integer("test", index), split="test") == draw(index, split="test")


async def test_a_held_out_task_has_the_dice_of_its_index() -> None:
    """So that what was measured before held-out tasks had integers of their own is measured again, to the digit."""
    seen: list[int] = []

    class Dice(ScriptedEngine):
        async def generate(self, token_ids: Any, params: Any, *, session: str) -> Any:
            seen.append(params.seed)
            return await super().generate(token_ids, params, session=session)

    play = Rollout(EnvSpec(Once), Dice(["a"]), ByteRenderer(), split="test")
    await play.batch([3, task_integer("test", 3)], 1, seed=5)
    assert seen[0] == seen[1]


class Once(Generated):
    async def step(self, action: Reply) -> Step:
        return Step([], 0.0, True, False, {})
