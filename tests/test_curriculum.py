"""Samplers that heed what came of the tasks before."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from agentrl import ContractError, UserError
from agentrl.curriculum import CurriculumSampler, DifficultySampler, Outcome
from agentrl.layers import build
from agentrl.types import Group, Stop, Trajectory


def came(task: int, *rewards: float | None) -> Group:
    return Group(task, tuple(Trajectory(task, (), (), Stop.TERMINATED, {"r": r}) for r in rewards))


def test_tasks_that_teach_come_oftener_than_those_always_or_never_solved() -> None:
    sampler, dealt = DifficultySampler(6, 0), Counter[int]()
    solved = {0: [0.0, 0.0], 1: [1.0, 1.0], 2: [0.0, 1.0], 3: [1.0, 0.0], 4: [0.0, 0.0], 5: [0.0, 1.0]}
    assert sorted(sampler.deal().task for _ in range(6)) == list(range(6))  # each once, before anything is known
    for task, rewards in solved.items():
        sampler.record(came(task, *rewards))
    for _ in range(600):
        task = sampler.deal().task
        dealt[task] += 1
        sampler.record(came(task, *solved[task]))
    assert min(dealt[t] for t in (2, 3, 5)) > 5 * max(dealt[t] for t in (0, 1, 4))
    assert min(dealt.values()) > 0


def test_a_task_that_becomes_easier_is_known_anew() -> None:
    sampler = DifficultySampler(2, 0)
    for rewards in ([0.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [None, None]):
        sampler.record(came(0, *rewards))
    assert sampler.passes[0] == pytest.approx(1 - 0.5**4)


def test_the_state_goes_through_json_and_the_same_tasks_follow() -> None:
    for make in (lambda: DifficultySampler(7, 3), lambda: CurriculumSampler(7, 3, curriculum=harder)):
        one, other = make(), make()
        for _ in range(9):
            one.record(came(one.deal().task, 0.0, 1.0, 1.0))
        other.load(json.loads(json.dumps(one.state())))
        assert [one.deal() for _ in range(20)] == [other.deal() for _ in range(20)]


def harder(history: Sequence[Outcome]) -> Mapping[str, Any]:
    known = [o for o in history if o.reward is not None]
    return {"level": 1 + sum(o.reward > 0.5 for o in known)}  # type: ignore[operator]


def test_a_curriculum_sees_what_came_and_sets_the_options() -> None:
    sampler = CurriculumSampler(None, 0, curriculum=harder)
    first = sampler.deal()
    assert first.options == {"level": 1}
    sampler.record(came(first.task, 1.0, 1.0))
    second = sampler.deal()
    assert second.options == {"level": 2}
    sampler.record(came(second.task, None, None))
    assert sampler.history == [Outcome(first.task, {"level": 1}, 1.0), Outcome(second.task, {"level": 2}, None)]


def test_mistakes_are_sentences() -> None:
    with pytest.raises(ContractError, match=r"difficulty needs an environment whose count\(\) is a number"):
        DifficultySampler(None, 0)
    with pytest.raises(ContractError, match="the curriculum returned 3; it must return a dict"):
        CurriculumSampler(None, 0, curriculum=lambda history: 3).deal()  # type: ignore[arg-type, return-value]
    both = {"curriculum": "a:b", "sampler": "difficulty"}
    with pytest.raises(UserError, match="do not go together"):
        build(("test", {"env": "shop", "rollout": both}))
