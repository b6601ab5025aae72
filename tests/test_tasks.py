"""A run's data cursor is one number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import ContractError
from agentrl.tasks import TaskSampler


@given(st.integers(1, 40), st.integers(0, 5), st.lists(st.integers(1, 30), max_size=6))
def test_each_epoch_is_a_permutation_however_it_is_taken(count: int, seed: int, takes: list[int]) -> None:
    sampler = TaskSampler(count, seed)
    tasks = [task for n in takes for task in sampler.take(n)]
    assert sampler.cursor == len(tasks)
    for epoch in range(len(tasks) // count):
        assert sorted(tasks[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert TaskSampler(count, seed).take(len(tasks)) == tasks


@given(st.integers(1, 40), st.integers(0, 100))
def test_it_goes_on_from_its_cursor(count: int, cursor: int) -> None:
    assert TaskSampler(count, 3, cursor).take(5) == TaskSampler(count, 3).take(cursor + 5)[cursor:]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, second = TaskSampler(100, 0).take(100), TaskSampler(100, 0, 100).take(100)
    assert len({tuple(order) for order in (first, second, TaskSampler(100, 1).take(100), range(100))}) == 4


def test_a_generator_never_repeats_and_seeds_never_meet() -> None:
    assert TaskSampler(None, 0).take(3) == [0, 1, 2]
    assert TaskSampler(None, 2, 5).take(2) == [2 * 2**32 + 5, 2 * 2**32 + 6]
    assert TaskSampler(None, 2**31 - 1, 2**32 - 1).take(1)[0] < 2**63  # what a column of int64 holds


def test_nothing_to_train_on_is_told() -> None:
    with pytest.raises(ContractError, match="the environment has 0 tasks to train on"):
        TaskSampler(0, 0)
