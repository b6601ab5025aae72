"""Credit turn by turn: against the definitions, written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.learner.advantages.group import grpo
from agentrl.learner.advantages.turn import first_turn, gigpo, rebn, split_reward
from agentrl.settings.entries import Entry
from agentrl.types import Segment, Stop, Thread, ThreadRole, Trajectory


def played(rewards: Sequence[float], score: float | None = None, seen: Sequence[int] | None = None) -> Trajectory:
    """An episode of so many turns; ``seen`` are the observations before them."""
    seen = seen if seen is not None else [100 * i for i in range(len(rewards))]
    segments = [
        s
        for i, token in enumerate(seen)
        for s in (Segment("env" if i else "prompt", (token,)), Segment("model", (7,), (-1.0,), (0,)))
    ]
    total = sum(rewards) if score is None else score
    return Trajectory(0, tuple(segments), (), Stop.TERMINATED, {"reward": total}, step_rewards=tuple(rewards))


EPISODES = st.lists(
    st.lists(st.floats(-5, 5).map(lambda x: round(x, 3)), min_size=1, max_size=4).map(played), max_size=6
)


def normal(values: Sequence[float], pool: Sequence[float]) -> list[float]:
    mean = sum(pool) / len(pool)
    std = sqrt(sum((p - mean) ** 2 for p in pool) / (len(pool) - 1))
    return [(v - mean) / (std + 1e-4) for v in values]


def test_a_turns_return_is_what_came_after_it() -> None:
    one, two = played([1.0, 0.0, 2.0]), played([0.0, 4.0])
    (first, second), *_ = rebn([[one, two]], gamma=0.5)
    returns = [1.5, 1.0, 2.0, 2.0, 4.0]
    assert [*first, *second] == pytest.approx(normal(returns, returns))
    (first, second), *_ = first_turn([[one, two]], gamma=0.5)
    assert [*first, *second] == pytest.approx(normal(returns, [1.5, 2.0]))


def test_what_the_score_adds_is_the_last_turn_s() -> None:
    assert split_reward(played([0.5, 0.0], score=1.5)) == [0.5, 1.0]
    assert split_reward(played([0.0, 0.0, 0.0], score=1.0)) == [0.0, 0.0, 1.0]
    cut = Trajectory(0, played([0.0, 0.0]).segments, (), Stop.MAX_TOKENS, {"reward": 0.25}, step_rewards=(0.5,))
    assert split_reward(cut) == [0.5, -0.25]


def test_returns_run_in_the_order_of_time_over_all_threads() -> None:
    """A sub-agent's turns 1 and 2 stand behind the caller's 0 and 3, and come before the answer."""
    in_time, sub_agent = played([1.0, 2.0, 4.0, 8.0], score=31.0), Thread(ThreadRole.SUB_AGENT, 0, 0, (1, 2))
    stored = replace(played([1.0, 8.0, 2.0, 4.0], score=31.0), threads=(Thread(turns=(0, 3)), sub_agent))
    side_call = Thread(ThreadRole.SIDE_CALL, 0, 0, (4,))
    assert split_reward(stored) == [1.0, 24.0, 2.0, 4.0]
    for told in (stored, replace(stored, threads=(*stored.threads, side_call))):
        ((a, b, c, d),) = rebn([[in_time]], gamma=0.5)[0]
        assert rebn([[told]], gamma=0.5) == [[pytest.approx((a, d, b, c))]]


def test_the_first_turn_is_the_first_in_time_in_whatever_thread() -> None:
    """Two conversations begin at once, and the second one is answered first."""
    in_time, other = played([1.0, 2.0, 4.0], score=8.0), played([3.0], score=3.0)
    threads = (Thread(turns=(1, 2)), Thread(ThreadRole.SUB_AGENT, turns=(0,)))
    stored = replace(played([2.0, 4.0, 1.0], score=8.0), threads=threads)
    for rule in (rebn, first_turn):
        ((a, b, c), rest) = rule([[in_time, other]], gamma=0.5)[0]
        assert rule([[stored, other]], gamma=0.5) == [[pytest.approx((b, c, a)), pytest.approx(rest)]]


def test_what_a_turn_answers_is_of_its_own_context_and_not_of_a_side_call_before_it() -> None:
    """A title that an agent asks for first leaves the first turn the observation that it has without."""
    plain = played([0.0, 1.0])
    side, main = Thread(ThreadRole.SIDE_CALL, turns=(0,)), Thread(turns=(1, 2))
    titled = replace(plain, segments=(Segment("prompt", (5, 6)), *plain.segments), threads=(side, main))
    assert titled.observed == plain.observed
    worse = played([0.0, 0.0])
    assert gigpo([[titled, worse]]) == gigpo([[plain, worse]])


@given(EPISODES)
def test_with_the_outcome_alone_and_no_discount_it_is_grpo(group: list[Trajectory]) -> None:
    outcomes = [played([0.0] * t.turns, score=t.step_rewards[0]) for t in group]
    (found,) = first_turn([outcomes])
    (wanted,) = grpo([outcomes])
    for turns, whole in zip(found, wanted, strict=True):
        assert list(turns) == pytest.approx([whole] * len(turns), abs=1e-9)


def test_where_the_same_was_observed_turns_are_compared() -> None:
    """Two of three met observation 20, and one of them did better from there."""
    group = [played([0, 1], seen=[10, 20]), played([0, 0], seen=[10, 20]), played([0, 0], seen=[10, 30])]
    (found,), (episodes,) = gigpo([group], step_weight=2.0), grpo([group])
    firsts, seconds = normal([1, 0, 0], [1, 0, 0]), normal([1, 0], [1, 0])
    assert [f[0] for f in found] == pytest.approx([e + 2 * s for e, s in zip(episodes, firsts, strict=True)])
    assert [f[1] for f in found[:2]] == pytest.approx([e + 2 * s for e, s in zip(episodes, seconds, strict=False)])
    assert found[2][1] == pytest.approx(episodes[2])  # nobody else was there


def test_the_same_observation_twice_in_an_episode_counts_twice() -> None:
    group = [played([0, 0, 1], seen=[10, 20, 20]), played([0, 0], seen=[10, 20])]
    (found,), (episodes,) = gigpo([group], gamma=0.5), grpo([group])
    at_20 = normal([0.5, 1.0, 0.0], [0.5, 1.0, 0.0])
    assert [found[0][1], found[0][2], found[1][1]] == pytest.approx(
        [episodes[0] + at_20[0], episodes[0] + at_20[1], episodes[1] + at_20[2]]
    )


@pytest.mark.parametrize("credit", [rebn, first_turn, gigpo])
@given(group=EPISODES)
def test_who_has_no_reward_has_no_part(credit: Entry, group: list[Trajectory]) -> None:
    lost = Trajectory(0, played([3.0, 1.0]).segments, (), Stop.FAULT, {}, step_rewards=(9.0,))
    (alone,), (found,) = credit([group]), credit([[lost, *group]])
    assert found[1:] == alone
    assert not any(found[0])


@pytest.mark.parametrize("credit", [rebn, first_turn, gigpo])
def test_without_a_difference_it_is_exactly_zero(credit: Entry) -> None:
    """Under rebn a step's reward makes even equal episodes differ from turn to turn; an outcome alone does not."""
    for group in ([played([0.0, 0.0], 0.7)] * 2, [played([0.1])] * 3, [played([0.3])], []):
        (found,) = credit([group])
        assert not any(a for turns in found for a in turns)
    (found,) = gigpo([[played([0.1, 0.0])] * 3])
    assert not any(a for turns in found for a in turns)
