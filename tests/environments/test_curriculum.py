"""Samplers that heed what came of the tasks before."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import ContractError, UserError
from agentrl.environments.curriculum import CurriculumSampler, DifficultySampler, Outcome
from agentrl.environments.task_sampler import TaskDraw
from agentrl.settings.loader import build_config


def came(deal: int | TaskDraw, *rewards: float) -> Outcome:
    task, options = (deal, {}) if isinstance(deal, int) else deal
    return Outcome(task, options, fmean(rewards) if rewards else None, rewards)


def test_tasks_that_teach_come_oftener_than_those_always_or_never_solved() -> None:
    sampler, dealt = DifficultySampler(6, 0), Counter[int]()
    solved = {0: [0.0, 0.0], 1: [1.0, 1.0], 2: [0.0, 1.0], 3: [1.0, 0.0], 4: [0.0, 0.0], 5: [0.0, 1.0]}
    assert sorted(sampler.draw().task for _ in range(6)) == list(range(6))  # each once, before anything is known
    for task, rewards in solved.items():
        sampler.record(came(task, *rewards))
    for _ in range(600):
        task = sampler.draw().task
        dealt[task] += 1
        sampler.record(came(task, *solved[task]))
    assert min(dealt[t] for t in (2, 3, 5)) > 5 * max(dealt[t] for t in (0, 1, 4))
    assert min(dealt.values()) > 0


def test_a_task_that_becomes_easier_is_known_anew() -> None:
    sampler = DifficultySampler(2, 0)
    for rewards in ([0.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], []):
        sampler.record(came(0, *rewards))
    solved = 1 - 0.5**4
    assert sampler.known[0].mean == pytest.approx(solved)
    assert sampler.known[0].spread ** 2 == pytest.approx(solved * (1 - solved))


@given(
    st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 3), min_size=2, max_size=4)), max_size=30),
    st.sampled_from([2.0**e for e in (-20, -3, 0, 4, 30)]),
    st.sampled_from([-1024.0, -1.0, 0.0, 3.0, 4096.0]),
)
def test_what_is_drawn_hangs_neither_on_the_rewards_scale_nor_on_their_sign(
    groups: list[tuple[int, list[int]]], scale: float, shift: float
) -> None:
    plain, other = DifficultySampler(5, 1), DifficultySampler(5, 1)
    for task, rewards in groups:
        plain.record(came(task, *map(float, rewards)))
        other.record(came(task, *(scale * (r + shift) for r in rewards)))
    assert [plain.draw() for _ in range(20)] == [other.draw() for _ in range(20)]


def test_one_extreme_reward_does_not_hide_the_tasks_that_teach() -> None:
    sampler = DifficultySampler(10, 0)
    for task in range(9):
        sampler.record(came(task, 0.0, 1.0) if task % 2 else came(task, 0.0, 0.0))
    sampler.record(came(9, -1e6, 0.0))
    dealt = Counter(sampler.draw().task for _ in range(600))
    assert min(dealt[task] for task in (1, 3, 5, 7, 9)) > 3 * max(dealt[task] for task in (0, 2, 4, 6, 8))


def test_a_group_equal_but_for_rounding_has_no_spread() -> None:
    sampler = DifficultySampler(2, 0)
    sampler.record(came(0, 0.1 + 0.2, 0.3))
    assert sampler.known[0].spread == 0.0


def test_the_state_goes_through_json_and_the_same_tasks_follow() -> None:
    for make in (lambda: DifficultySampler(7, 3), lambda: CurriculumSampler(7, 3, curriculum=harder)):
        one, other = make(), make()
        for _ in range(9):
            one.record(came(one.draw(), 0.0, 1.0, 1.0))
        other.load(json.loads(json.dumps(one.state())))
        assert [one.draw() for _ in range(20)] == [other.draw() for _ in range(20)]


def harder(history: Sequence[Outcome]) -> Mapping[str, Any]:
    known = [o for o in history if o.reward is not None]
    return {"level": 1 + sum(o.reward > 0.5 for o in known)}  # type: ignore[operator]


def test_a_curriculum_sees_what_came_and_sets_the_options() -> None:
    sampler = CurriculumSampler(None, 0, curriculum=harder)
    first = sampler.draw()
    assert first.options == {"level": 1}
    sampler.record(came(first, 1.0, 1.0))
    second = sampler.draw()
    assert second.options == {"level": 2}
    sampler.record(came(second))
    assert sampler.history == [
        Outcome(first.task, {"level": 1}, 1.0, (1.0, 1.0)),
        Outcome(second.task, {"level": 2}, None),
    ]


def test_a_task_drawn_twice_has_its_own_options_each_time_and_nothing_is_kept_of_those_never_heard_of() -> None:
    """The first of two groups of one task used to take the second one's options, and the second none."""
    sampler = CurriculumSampler(1, 0, curriculum=lambda history: {"level": len(history)})
    first = sampler.draw()
    sampler.record(came(first, 0.0))
    second, third = sampler.draw(), sampler.draw()
    for deal in (third, second):
        sampler.record(came(deal, 1.0))
    assert [o.options for o in sampler.history] == [{"level": 0}, {"level": 1}, {"level": 1}]
    before = len(json.dumps(sampler.state()))
    for _ in range(50):
        sampler.draw()
    assert len(json.dumps(sampler.state())) <= before + 1  # the cursor


def test_mistakes_are_sentences() -> None:
    with pytest.raises(ContractError, match=r"difficulty needs an environment whose count\(\) is a number"):
        DifficultySampler(None, 0)
    with pytest.raises(ContractError, match="the curriculum returned 3; it must return a dict"):
        CurriculumSampler(None, 0, curriculum=lambda history: 3).draw()  # type: ignore[arg-type, return-value]
    both = {"curriculum": "a:b", "sampler": "difficulty"}
    with pytest.raises(UserError, match="do not go together"):
        build_config(("test", {"env": "shop", "rollout": both}))


def test_a_curriculum_that_raises_or_chooses_the_split_is_a_sentence() -> None:
    def missing(history: Any) -> dict[str, Any]:
        return {"level": history[0].reward}

    with pytest.raises(ContractError, match=r"the curriculum raised IndexError: .* \(test_curriculum\.py, line \d+\)"):
        CurriculumSampler(None, 0, curriculum=missing).draw()
    with pytest.raises(ContractError, match="the curriculum returned the option 'split', which is set for it"):
        CurriculumSampler(None, 0, curriculum=lambda history: {"split": "test"}).draw()
