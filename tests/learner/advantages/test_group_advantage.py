"""Advantages: TRL's numbers, and what no reward may do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.learner.advantages import group as by_group
from agentrl.settings.entries import Entry
from agentrl.types import Stop, Trajectory

ADVANTAGES = {n: e for n, e in vars(by_group).items() if isinstance(e, Entry)}

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "trl_advantages.json").read_text())
REWARDS = st.lists(st.one_of(st.none(), st.floats(-10, 10)), max_size=8)


def member(rewards: dict[str, float | None], weights: dict[str, float] | None = None) -> Trajectory:
    return Trajectory(0, (), (), Stop.TERMINATED, rewards=rewards, weights=weights or {})


def of(advantage: Entry, rewards: Sequence[float | None]) -> list[float]:
    """Of one group with one reward function."""
    (advantages,) = advantage([[member({"r": r}) for r in rewards]])
    return list(advantages)


@pytest.mark.parametrize(
    ("case", "name", "columns", "weights"),
    [
        ("adv_group", "grpo", ["r1", "r2"], {}),
        ("adv_batch", "batch", ["r1", "r2"], {}),
        ("adv_none", "dr_grpo", ["r1", "r2"], {}),
        ("adv_gdpo", "gdpo", ["r1", "r2"], {}),
        ("adv_weights", "grpo", ["r1", "r2"], {"r1": 1.0, "r2": 0.5}),
        ("adv_single_with_none", "grpo", ["r3"], {}),
    ],
)
def test_the_numbers_of_trl(case: str, name: str, columns: list[str], weights: dict[str, float]) -> None:
    parts = zip(*(GOLDEN["inputs"][c] for c in columns), strict=True)
    members = [member(dict(zip(columns, row, strict=True)), weights) for row in parts]
    size = GOLDEN["inputs"]["num_generations"]
    groups = [members[i : i + size] for i in range(0, len(members), size)]
    found = [a for group in ADVANTAGES[name](groups) for a in group]
    assert found == pytest.approx(GOLDEN["cases"][case], abs=1e-5)


@pytest.mark.parametrize("advantage", ADVANTAGES.values())
@given(rewards=REWARDS)
def test_who_has_no_reward_has_no_part(advantage: Entry, rewards: list[float | None]) -> None:
    found = of(advantage, rewards)
    assert len(found) == len(rewards)
    assert [a for a, r in zip(found, rewards, strict=True) if r is None] == [0.0] * rewards.count(None)
    known = [r for r in rewards if r is not None]
    assert [a for a, r in zip(found, rewards, strict=True) if r is not None] == pytest.approx(of(advantage, known))


@pytest.mark.parametrize("advantage", ADVANTAGES.values())
@given(rewards=REWARDS)
def test_they_sum_to_nothing_and_keep_the_order(advantage: Entry, rewards: list[float | None]) -> None:
    found = of(advantage, rewards)
    assert sum(found) == pytest.approx(0.0, abs=1e-9 * max(1.0, *map(abs, found), 0.0) * 10)
    pairs = sorted((r, a) for r, a in zip(rewards, found, strict=True) if r is not None)
    assert [a for _, a in pairs] == sorted(a for _, a in pairs)


@pytest.mark.parametrize("advantage", ADVANTAGES.values())
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7] * 7, [1.0, None], [None], [], [1e-9] * 5])
def test_without_a_difference_it_is_exactly_zero(advantage: Entry, rewards: list[float | None]) -> None:
    assert of(advantage, rewards) == [0.0] * len(rewards)


def test_leave_one_out_compares_with_the_others() -> None:
    assert of(ADVANTAGES["rloo"], [1.0, 0.0, None, 0.5]) == pytest.approx([0.75, -0.75, 0.0, 0.0])


def test_a_batch_s_std_is_that_of_all_groups() -> None:
    groups = [[member({"r": r}) for r in own] for own in ([0.0, 1.0], [10.0, 30.0])]
    (a, b), (c, d) = ADVANTAGES["batch"](groups)
    assert (a + b, c + d) == (0.0, 0.0)
    assert d / b == pytest.approx(20.0)
