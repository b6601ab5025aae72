"""Intervals that hold what they say, by simulation; pass@k and pass^k by counting."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from agentrl.evaluation.statistics import (
    Estimate,
    estimate_difference,
    estimate_mean,
    estimate_passes,
    estimate_unpaired_difference,
    is_pass,
    pass_at_k,
    pass_hat_k,
    t_quantile,
)

SIMULATIONS, TASKS, TRIALS = 800, 200, 4  # of seeds that stay: the bounds are three standard errors wide
Floats = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator], Floats]


def solve_rates(rng: np.random.Generator, p: float, alike: float, *shape: int) -> Floats:
    """Draw the tasks' own chances: mean ``p``, and ``alike`` is the correlation of two trials of a task."""
    weight = 1 / alike - 1
    return rng.beta(p * weight, (1 - p) * weight, shape)


def play(rng: np.random.Generator, rates: Floats, trials: int = TRIALS) -> Floats:
    return (rng.random((*rates.shape, trials)) < rates[..., None]).astype(float)


def coverage(draw: Draw, true: float, simulations: int = SIMULATIONS) -> float:
    rng = np.random.default_rng(7)
    hits = sum(e.low <= true <= e.high for e in (estimate_mean(draw(rng)) for _ in range(simulations)))
    return hits / simulations


@pytest.mark.parametrize("alike", [0.1, 0.5])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.95])
def test_an_interval_of_95_percent_holds_the_mean_in_95_of_100(p: float, alike: float) -> None:
    assert 0.93 <= coverage(lambda rng: play(rng, solve_rates(rng, p, alike, TASKS)), p) <= 0.97


@pytest.mark.parametrize(
    ("draw", "true"),
    [
        (lambda rng: rng.normal(0, 1, (TASKS, 1)) + rng.normal(0, 1, (TASKS, TRIALS)), 0.0),
        (lambda rng: rng.exponential(1, (TASKS, 1)) + rng.exponential(1, (TASKS, TRIALS)), 2.0),
        (lambda rng: 2 * play(rng, solve_rates(rng, 0.1, 0.5, TASKS)) - 1, -0.8),
    ],
    ids=["normal", "exponential", "of -1 and 1"],
)
def test_rewards_of_any_range_are_held_as_often(draw: Draw, true: float) -> None:
    assert 0.93 <= coverage(draw, true) <= 0.97


def test_trials_of_a_task_are_no_tasks_of_their_own() -> None:
    """Counted as 800 episodes the interval would hold the mean in some 75 of 100."""
    rng = np.random.default_rng(0)
    played = play(rng, solve_rates(rng, 0.5, 0.5, TASKS))
    by_task, by_episode = estimate_mean(played), estimate_mean(played.reshape(-1, 1))
    assert by_task.mean == pytest.approx(by_episode.mean)
    assert by_task.high - by_task.low > 1.4 * (by_episode.high - by_episode.low)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("trials", [1, 4])
def test_equal_policies_are_seldom_called_different(p: float, trials: int) -> None:
    rng = np.random.default_rng(11)
    called = 0
    for _ in range(SIMULATIONS):
        rates = solve_rates(rng, p, 0.5, TASKS)
        called += estimate_difference(play(rng, rates, trials), play(rng, rates, trials)).excludes_zero
    assert called / SIMULATIONS <= 0.06


@pytest.mark.parametrize("tasks", [8, 20])
def test_nor_are_they_on_few_tasks(tasks: int) -> None:
    rng = np.random.default_rng(12)
    called = 0
    for _ in range(2000):
        rates = solve_rates(rng, 0.3, 0.5, tasks)
        called += estimate_difference(play(rng, rates, 1), play(rng, rates, 1)).excludes_zero
    assert called / 2000 <= 0.06


def test_a_true_difference_is_within_its_interval() -> None:
    rng, held = np.random.default_rng(13), 0
    for _ in range(2000):
        rates = solve_rates(rng, 0.4, 0.5, TASKS)
        found = estimate_difference(play(rng, rates), play(rng, 0.8 * rates + 0.2))
        held += found.low <= 0.12 <= found.high
    assert 0.93 <= held / 2000 <= 0.97


def test_pairs_that_correlate_have_intervals_that_are_a_third_narrower() -> None:
    rng = np.random.default_rng(14)
    ratios: list[float] = []
    while len(ratios) < 200:
        rates = solve_rates(rng, 0.5, 0.85, TASKS)
        before, after = play(rng, rates), play(rng, rates)
        if np.corrcoef(before.mean(1), after.mean(1))[0, 1] >= 0.8:
            paired = estimate_difference(before, after)
            apart = estimate_unpaired_difference(estimate_mean(before), estimate_mean(after))
            ratios.append((paired.high - paired.low) / (apart.high - apart.low))
    assert max(ratios) <= 0.7


def test_eight_of_eight_has_wilson_s_interval() -> None:
    assert estimate_mean([[1.0]] * 8)[:3] == pytest.approx((1.0, 0.6756, 1.0), abs=1e-4)
    assert estimate_mean([[1.0]] * 7 + [[0.0]])[1:3] == pytest.approx((0.5291, 0.9776), abs=1e-4)
    assert estimate_mean([[1.0] * 4] * 8) == estimate_mean([[1.0]] * 8)  # four trials of a task show no further task


def test_no_interval_is_without_width() -> None:
    for tasks in ([[0.5]] * 8, [[3.0, 3.0]] * 8, [[-1.0]] * 8, [[0.0]] * 200, [[1.0, 0.0]], [[0.2]]):
        found = estimate_mean(tasks)
        assert found.low <= found.mean <= found.high
        assert found.high - found.low > 0.01
    for before, after in (([[0.0]] * 8, [[0.0]] * 8), ([[0.0]] * 8, [[1.0]] * 8), ([[0.3]], [[0.4]])):
        found = estimate_difference(before, after)
        assert -1.0 <= found.low <= found.mean <= found.high <= 1.0
        assert found.high - found.low > 0.01


def test_four_won_and_none_lost_is_no_difference_yet_and_seven_are() -> None:
    def gained(tasks: int) -> Estimate:
        return estimate_difference([[0.0]] * 50, [[1.0]] * tasks + [[0.0]] * (50 - tasks))

    assert not gained(4).excludes_zero
    assert gained(7).excludes_zero


def test_a_task_weighs_the_same_whatever_was_lost_of_it() -> None:
    assert estimate_mean([[1.0, 1.0, 1.0, 1.0], [0.0], []])[::4] == (0.5, 2)
    assert estimate_difference([[0.0], [0.0, 1.0], []], [[1.0, 1.0], [0.5], [1.0]])[::4] == (0.5, 2)


def test_of_nothing_nothing_is_known() -> None:
    assert math.isnan(estimate_mean([[], []]).mean)
    assert not estimate_difference([[]], [[1.0]]).excludes_zero
    assert estimate_passes([[]]) == []


def test_pass_at_k_and_pass_hat_k_count_all_choices_of_k_trials() -> None:
    for passed in range(6):
        trials = [1] * passed + [0] * (5 - passed)
        for k in range(1, 6):
            chosen = list(itertools.combinations(trials, k))
            assert pass_at_k(5, passed, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
            assert pass_hat_k(5, passed, k) == pytest.approx(sum(map(all, chosen)) / len(chosen))


def test_passes_are_told_for_powers_of_two_and_all_trials() -> None:
    found = estimate_passes([[1, 0, 0, 0, 1, 0], [1.0] * 6, [0.0] * 6, [1, 0]])
    assert [(p.k, p.any.tasks) for p in found] == [(1, 4), (2, 4), (4, 3), (6, 3)]
    assert found[0].any == pytest.approx(found[0].all)
    assert found[-1].any.mean == pytest.approx(2 / 3)
    assert found[-1].all.mean == pytest.approx(1 / 3)
    assert [p.any.mean for p in estimate_passes([[0.4], [0.6]], pass_at=0.5)] == [0.5]


def test_the_rounding_of_a_sum_fails_nobody() -> None:
    assert is_pass(0.1 * 3 + 0.7)
    assert is_pass(0.7 + 0.2 + 0.1)
    assert not is_pass(0.999)


def test_student_s_quantiles_are_those_of_the_tables() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 19: 2.093, 60: 2.000, 199: 1.972}
    for freedom, quantile in table.items():
        assert t_quantile(freedom) == pytest.approx(quantile, abs=0.004)
