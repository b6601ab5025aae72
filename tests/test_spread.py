"""Distances from a mean, rounding left out."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.spread import center, center_rewards, has_zero_variance
from agentrl.types import Stop, Trajectory


def member(*parts: float | None, weights: tuple[float, ...] = ()) -> Trajectory:
    named = {f"p{i}": part for i, part in enumerate(parts)}
    return Trajectory(0, (), (), Stop.TERMINATED, rewards=named, weights={f"p{i}": w for i, w in enumerate(weights)})


def test_a_sum_of_parts_in_another_order_is_no_difference() -> None:
    one, other = member(0.1, 0.2), member(0.3, 0.0)
    assert one.reward != other.reward
    assert has_zero_variance([one, other])
    assert not has_zero_variance([one, member(0.3, 1e-9)])


def test_rounding_is_relative_to_the_parts_and_not_to_what_is_left_of_them() -> None:
    """1e6 + .1 - 1e6 is not .1: eleven digits are gone, though the reward is small."""
    one, other = member(1e6 + 0.1, 1e6, weights=(1.0, -1.0)), member(0.1, 0.0)
    assert abs((one.reward or 0.0) - 0.1) > 1e-12
    assert has_zero_variance([one, other])
    assert not has_zero_variance([member(1e-9), member(2e-9)])


def test_a_member_at_the_mean_is_exactly_there() -> None:
    assert 0.2 - sum([0.1, 0.2, 0.3]) / 3 != 0.0
    low, middle, high = center([0.1, 0.2, 0.3])
    assert middle == 0.0
    assert (low, high) == pytest.approx((-0.1, 0.1))


def test_what_is_not_known_is_in_no_mean() -> None:
    assert center([None, 1.0, 3.0]) == [0.0, -1.0, 1.0]
    assert center([None]) == center([None, 5.0])[:1] == [0.0]
    assert center([]) == []
    assert center_rewards([member(None), member(1.0)]) == [0.0, 0.0]
    assert has_zero_variance([])


PARTS = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=4)


@given(PARTS)
def test_every_order_of_the_same_parts_is_flat(parts: list[float]) -> None:
    assert has_zero_variance([member(*order) for order in permutations(parts)])


@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=8), st.floats(0.01, 100.0))
def test_values_that_differ_are_never_flat(values: list[int], scale: float) -> None:
    assert has_zero_variance([member(v * scale) for v in values]) == (len(set(values)) < 2)
