"""Numbers about groups: what is in them, and what is not."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.runs import metrics
from agentrl.types import CallRecord, Fault, Group, Segment, Stop, Trajectory


def played(reward: float | None, *, tokens: int = 2, stop: Stop = Stop.TERMINATED, **more: Any) -> Trajectory:
    row = (Segment("prompt", (1, 2, 3)), Segment("model", (4,) * tokens, (-0.5,) * tokens, (0,) * tokens))
    return Trajectory(0, row, (), stop, {"correct": reward}, **more)


def lost(kind: str, *calls: CallRecord) -> Trajectory:
    return played(9.0, tokens=99, stop=Stop.FAULT, fault=Fault(kind, "..."), calls=calls)


def test_rewards_and_groups() -> None:
    groups = [
        Group(0, (played(0.0), played(1.0), played(None))),
        Group(1, (played(1.0), played(1.0), lost("tool_timeout"))),
        Group(2, (played(0.0), lost("tool_timeout"), lost("env_step"))),
    ]
    found = metrics.group_metrics(groups, min_group_size=2)
    assert found["reward"] == found["rewards/correct/mean"] == pytest.approx(3 / 5)
    assert found["rewards/correct/std"] == pytest.approx((5 * 0.24 / 4) ** 0.5)
    assert (found["groups/kept"], found["groups/dropped"]) == (2, 1)
    assert found["frac_reward_zero_std"] == 0.5
    assert found["reward_std"] == pytest.approx(0.5**0.5 / 2)
    assert (found["faults/tool_timeout"], found["faults/env_step"]) == (2, 1)
    assert found["completions/max_length"] == 2
    assert found["num_tokens"] == 6 * 5
    assert found["stops/terminated"] == 1.0
    assert "stops/fault" not in found


def test_lengths_with_and_without_those_cut_short() -> None:
    found = metrics.group_metrics([Group(0, (played(1.0, tokens=4, stop=Stop.MAX_TOKENS), played(0.0), played(0.0)))])
    assert found["completions/mean_length"] == pytest.approx(8 / 3)
    assert (found["completions/min_length"], found["completions/max_length"]) == (2, 4)
    assert found["completions/max_terminated_length"] == found["completions/mean_terminated_length"] == 2
    assert found["completions/clipped_ratio"] == found["stops/max_tokens"] == pytest.approx(1 / 3)
    assert found["sampled_tokens"] == 8
    assert found["turns/mean"] == 1


def test_tools_by_name_and_names_that_were_invented() -> None:
    calls = [CallRecord(0, "search", "ok", seconds / 100) for seconds in range(20)]
    calls += [CallRecord(0, "search", "tool", 0.0), CallRecord(0, "serch", "unknown_tool", 0.0)]
    calls += [CallRecord(0, "", "parse", 0.0)]
    late = CallRecord(0, "search", "tool_timeout", 5.0)
    found = metrics.group_metrics(
        [Group(0, (played(1.0, calls=tuple(calls)), played(0.0), lost("tool_timeout", late)))]
    )
    assert found["tools/call_frequency"] == 23 / 2
    assert found["tools/failure_frequency"] == 3 / 23
    assert found["tools/error/parse"] == found["tools/error/unknown_tool"] == found["tools/error/tool"] == 1 / 23
    assert found["tools/search/calls"] == 22
    assert found["tools/search/failures"] == 1
    assert found["tools/search/timeouts"] == 1
    assert (found["tools/search/p50_s"], found["tools/search/p95_s"]) == (0.1, 0.19)
    assert not any("serch" in name for name in found)


def test_nothing_but_faults_makes_no_reward_up() -> None:
    found = metrics.group_metrics([Group(0, (lost("x"), lost("x")))], min_group_size=2)
    assert found == {
        "reward_std": 0.0,
        "frac_reward_zero_std": 0.0,
        "groups/rolled_out": 1.0,
        "groups/kept": 0.0,
        "groups/dropped": 1.0,
        "faults/x": 2.0,
    }
    assert metrics.group_metrics([]).keys() == found.keys() - {"faults/x"}


def test_unscored_episodes_alone_have_lengths_and_no_reward() -> None:
    found = metrics.group_metrics([Group(0, (played(None), played(None)))])
    assert "reward" not in found
    assert found["completions/mean_length"] == 2
    assert found["tools/call_frequency"] == 0.0


def test_episodes_that_a_reward_could_not_judge_are_counted() -> None:
    segment = Segment("prompt", (1,))
    trajectories = [Trajectory(0, (segment,), (), Stop.TERMINATED, {"a": r, "b": 1.0}) for r in (None, 1.0, None)]
    values = metrics.group_metrics([Group(0, tuple(trajectories))])
    assert (values["rewards/a/unscorable"], values["rewards/a/mean"]) == (2.0, 1.0)
    assert "rewards/b/unscorable" not in values
