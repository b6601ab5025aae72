"""Each sign of trouble is told where it is, in words, and not where it is not."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from agentrl.health.monitor import HealthMonitor
from agentrl.health.signs import WINDOW
from agentrl.types import Group, Message, Stop, Trajectory

FINE = {
    "reward": 0.5,
    "frac_reward_zero_std": 0.2,
    "grad_norm": 0.5,
    "entropy": 0.8,
    "completions/clipped_ratio": 0.02,
    "groups/kept": 16.0,
    "groups/dropped": 0.0,
    "sampling/sampling_logp_difference/mean": 1e-6,
    "rewards/correct/std": 0.4,
    "rewards/format/std": 0.3,
}


def told(*steps: dict[str, float], weights: dict[str, float] | None = None) -> list[str]:
    monitor = HealthMonitor(weights=weights or {})
    return [text for values in steps for text in monitor.check_step({**FINE, **values}, [])]


def rising(steps: int) -> list[dict[str, float]]:
    return [{"reward": i / steps} for i in range(steps)]


def test_a_run_that_goes_well_is_left_alone() -> None:
    assert told(*rising(60)) == []


@pytest.mark.parametrize(
    ("late", "sign"),
    [
        (
            {"frac_reward_zero_std": 0.9, "reward": 0.1},
            "83% of the groups of 10 steps had zero variance.* easier tasks",
        ),
        ({"frac_reward_zero_std": 0.9, "reward": 0.97}, "harder tasks, --rollout.sampler difficulty"),
        ({"kl": 3.0}, "the policy is . nats a token from its reference: try a lower --learner.lr"),
        ({"sampling/sampling_logp_difference/mean": 0.4}, "the engine's logprobs differ .* nats a token"),
        ({"entropy": 0.01, "reward": 0.6}, r"the entropy fell from 0.8 to 0.0.*the reward stopped at 0.60"),
        (
            {"completions/clipped_ratio": 0.4},
            "25% of the episodes ran out of tokens: try a higher --rollout.max_tokens",
        ),
        ({"stops/max_turns": 0.5}, "% of the episodes ran out of turns"),
        (
            {"rewards/correct/std": 0.0},
            "100% of the reward's spread is its component 'format': nothing is learned from 'correct'",
        ),
        ({"groups/kept": 8.0, "groups/dropped": 8.0}, "20% of the groups were lost: too few of their episodes"),
    ],
)
def test_each_sign_is_told_once(late: dict[str, float], sign: str) -> None:
    found = told(*rising(30), *[late] * 25)
    assert len(found) == 1, found
    assert re.search(sign, found[0]), found[0]


def test_a_gradient_that_explodes_is_told_at_once() -> None:
    (found,) = told(*rising(30), {"grad_norm": 50.0})
    assert found.startswith("the gradient's norm is 50, 100 times its median: try a lower --learner.lr")


def test_a_step_that_changed_nothing_is_told() -> None:
    for norm in (math.nan, math.inf):
        (sentence,) = told({"forwarded_rows": 8.0, "grad_norm": norm, "loss": norm})
        assert "the gradient is not finite, so the step changed nothing" in sentence
    idle = {name: value for name, value in FINE.items() if name != "grad_norm"}
    assert not HealthMonitor().check_step({**idle, "forwarded_rows": 0.0}, [])


def test_what_came_back_is_told_again() -> None:
    bad = [{"kl": 3.0}] * 3
    assert len(told(*rising(30), *bad, *[{"kl": 0.1}] * 5, *bad)) == 1
    assert len(told(*rising(30), *bad, *[{"kl": 0.1}] * (2 * WINDOW + 5), *bad)) == 2


def test_a_part_without_weight_rules_nothing() -> None:
    late = [{"rewards/format/std": 0.0}] * 20
    assert told(*rising(30), *late, weights={"format": 0.0}) == []
    assert len(told(*rising(30), *late)) == 1


def winner(task: int, text: str, reward: float) -> Trajectory:
    messages: tuple[Message, ...] = ({"role": "user", "content": "q"}, {"role": "assistant", "content": text})
    return Trajectory(task, (), messages, Stop.TERMINATED, rewards={"correct": reward})


def test_winners_that_all_say_the_same_are_told() -> None:
    def groups(text: str) -> list[Group]:
        return [
            Group(k, (winner(k, text.format(k), 1.0), winner(k, "no", 0.0), replace(winner(k, "", 1.0), rewards={})))
            for k in range(10)
        ]

    assert HealthMonitor().check_step(FINE, groups("the answer is {0}")) == []
    (found,) = HealthMonitor().check_step(FINE, groups("the answer"))
    assert found.startswith("the winners of 10 of 10 tasks say the same, 'the answer': can the reward be had without")


def test_a_reward_that_could_not_judge_is_told_once_with_its_count() -> None:
    none = {"rewards/accuracy/unscorable": 12.0}
    sentences = told(none, none, {}, none)
    assert len(sentences) == 1
    assert "a reward was None, so is in no mean ('accuracy' in 12 episodes of this step)" in sentences[0]
    assert told({"rewards/accuracy/unscorable": 0.0}) == []


def test_a_part_whose_name_has_a_slash_is_told_by_its_whole_name() -> None:
    (sentence,) = told({"rewards/style/brief/unscorable": 2.0})
    assert "('style/brief' in 2 episodes of this step)" in sentence
    late = [{"rewards/correct/std": 0.0, "rewards/format/std": 0.0, "rewards/a/b/std": 0.5}] * 20
    (sentence,) = told(*rising(30), *late)
    assert "is its component 'a/b'" in sentence


def test_lost_groups_are_a_share_of_all_that_were_played_in_the_same_steps() -> None:
    lost = {"groups/kept": 4.0, "groups/dropped": 4.0, "groups/rolled_out": 40.0}
    assert told(*rising(30), *[lost] * 10) == []  # 10 %: the others were flat, and resampled
    few = {"groups/kept": 14.0, "groups/dropped": 2.0, "groups/rolled_out": 16.0}
    assert told(*rising(30), *[few] * 4, {"groups/kept": 1.0, "groups/rolled_out": 1.0}) == []  # 8 of 65


@pytest.mark.parametrize("kind", ["faults/provoked", "faults/sandbox_gone"])
def test_a_policy_that_faults_more_and_more_is_told_with_the_way_out(kind: str) -> None:
    few, many = {"episodes": 100.0, kind: 1.0}, {"episodes": 100.0, kind: 12.0}
    (sentence,) = told(*[few] * 20, *[many] * 20)
    assert re.match(r"faults went from 1\.0% to \d+\.\d% of the episodes in \d+ steps; .* provoked theirs", sentence)
    assert "give the tool or the environment a health_check (docs/faults.md)" in sentence
    assert (" 0.0% provoked" in sentence) is (kind != "faults/provoked")


def test_faults_that_stay_as_rare_or_as_frequent_as_they_were_are_no_sign() -> None:
    assert told(*[{"episodes": 100.0, "faults/provoked": 1.0}] * 60) == []
    assert told(*[{"episodes": 100.0, "faults/provoked": 5.0}] * 60) == []
