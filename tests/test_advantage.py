"""Advantages: TRL's numbers, and what no reward may do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.learner.advantage import ADVANTAGES, Advantage, dr_grpo, grpo
from agentrl.types import Stop, Trajectory

GOLDEN = json.loads((Path(__file__).parent / "golden" / "trl_advantages.json").read_text())
REWARDS = st.lists(st.one_of(st.none(), st.floats(-10, 10)), max_size=8)


def totals(columns: list[str], weights: dict[str, float]) -> list[float | None]:
    """What trajectories with these named parts are worth."""
    parts = zip(*(GOLDEN["inputs"][c] for c in columns), strict=True)
    rows = [dict(zip(columns, row, strict=True)) for row in parts]
    return [Trajectory(0, (), (), Stop.TERMINATED, rewards=row, weights=weights).reward for row in rows]


@pytest.mark.parametrize(
    ("case", "name", "columns", "weights"),
    [
        ("adv_group", "grpo", ["r1", "r2"], {}),
        ("adv_none", "dr_grpo", ["r1", "r2"], {}),
        ("adv_weights", "grpo", ["r1", "r2"], {"r1": 1.0, "r2": 0.5}),
        ("adv_single_with_none", "grpo", ["r3"], {}),
    ],
)
def test_the_numbers_of_trl(case: str, name: str, columns: list[str], weights: dict[str, float]) -> None:
    rewards, size = totals(columns, weights), GOLDEN["inputs"]["num_generations"]
    found = [a for i in range(0, len(rewards), size) for a in ADVANTAGES[name](rewards[i : i + size])]
    assert found == pytest.approx(GOLDEN["cases"][case], abs=1e-6)


@pytest.mark.parametrize("advantage", ADVANTAGES.values())
@given(rewards=REWARDS)
def test_who_has_no_reward_has_no_part(advantage: Advantage, rewards: list[float | None]) -> None:
    found = advantage(rewards)
    assert len(found) == len(rewards)
    assert [a for a, r in zip(found, rewards, strict=True) if r is None] == [0.0] * rewards.count(None)
    known = [r for r in rewards if r is not None]
    assert [a for a, r in zip(found, rewards, strict=True) if r is not None] == advantage(known)


@pytest.mark.parametrize("advantage", ADVANTAGES.values())
@given(rewards=REWARDS)
def test_they_sum_to_nothing_and_keep_the_order(advantage: Advantage, rewards: list[float | None]) -> None:
    found = advantage(rewards)
    assert sum(found) == pytest.approx(0.0, abs=1e-9)
    pairs = sorted((r, a) for r, a in zip(rewards, found, strict=True) if r is not None)
    assert [a for _, a in pairs] == sorted(a for _, a in pairs)


@pytest.mark.parametrize("advantage", [grpo, dr_grpo])
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7] * 7, [1.0, None], [None], [], [1e-9] * 5])
def test_without_a_difference_it_is_exactly_zero(advantage: Advantage, rewards: list[float | None]) -> None:
    assert advantage(rewards) == [0.0] * len(rewards)
