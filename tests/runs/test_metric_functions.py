"""Metrics of a user's own: a function of episodes becomes a number of each step and of each evaluation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl import ContractError, Trajectory, UserError, train
from agentrl.errors import ConfigError
from agentrl.runs.metric_functions import MetricFunctions
from agentrl.types import Fault
from tests.desk import SMALL
from tests.helpers import runs


def calls_made(episodes: Sequence[Trajectory]) -> float:
    return float(sum(len(t.calls) for t in episodes))


def by_half(episodes: Sequence[Trajectory]) -> dict[str, float]:
    return {"first": 0.5, "second": len(episodes)}


def nothing(episodes: Sequence[Trajectory]) -> None:
    return None


def test_numbers_have_the_functions_name_and_faulted_episodes_are_not_in_them() -> None:
    lost = runs.played(7, [{"role": "user", "content": "a"}], 0.0, fault=Fault("env", "gone"))
    functions = MetricFunctions([calls_made, by_half, nothing])
    numbers = functions.compute([runs.solved(7), lost], {}, "eval/")
    assert numbers["eval/by_half/second"] == 1.0
    assert numbers["eval/calls_made"] == len(runs.solved(7).calls)
    assert sorted(numbers) == ["eval/by_half/first", "eval/by_half/second", "eval/calls_made"]


def test_what_is_no_number_is_refused_by_name() -> None:
    def worse(episodes: Sequence[Trajectory]) -> Any:
        return "high"

    def raises(episodes: Sequence[Trajectory]) -> float:
        raise KeyError("answer")

    with pytest.raises(ContractError, match=r"run\.metrics: worse is no finite number: 'high'"):
        MetricFunctions([worse]).compute([], {})
    with pytest.raises(ContractError, match=r"run\.metrics: raises raised KeyError: 'answer'"):
        MetricFunctions([raises]).compute([], {})
    with pytest.raises(ContractError, match=r"agentrl logs a number 'calls_made' itself"):
        MetricFunctions([calls_made]).compute([], {"calls_made": 1.0})


def test_what_is_no_function_is_refused_before_a_run_begins() -> None:
    async def later(episodes: Sequence[Trajectory]) -> float:
        return 0.0

    with pytest.raises(ConfigError, match="two functions are called 'calls_made'"):
        MetricFunctions([calls_made, calls_made])
    for wrong in (later, Trajectory, 3):
        with pytest.raises(ConfigError, match="takes plain functions of a list of episodes"):
            MetricFunctions([wrong])  # type: ignore[list-item]
    with pytest.raises(UserError, match=r"there is no file none\.py"):
        MetricFunctions(["none.py:f"])


def step(episodes: Sequence[Trajectory]) -> float:
    return 1.0


def test_a_function_does_not_take_the_name_of_a_rows_step_or_of_evaluations() -> None:
    with pytest.raises(ConfigError, match=r"a row's 'step' is agentrl's own; rename the function step"):
        MetricFunctions([step])


def test_what_one_function_does_to_its_list_no_other_sees() -> None:
    def clears(episodes: list[Trajectory]) -> float:
        episodes.clear()
        return 0.0

    def counts(episodes: Sequence[Trajectory]) -> float:
        return len(episodes)

    functions = MetricFunctions([clears, counts])  # type: ignore[list-item]
    assert functions.compute([runs.solved(7)], {}) == {"clears": 0.0, "counts": 1.0}


@pytest.mark.slow
def test_a_training_logs_them_at_each_step_and_each_evaluation(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings: dict[str, Any] = SMALL | {"run": {"dir": str(folder), "metrics": [calls_made]}}
    train("math-tools", steps=1, **settings)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["calls_made"] for row in rows if "loss" in row or "frac_reward_zero_std" in row]
    assert len([row for row in rows if "eval/calls_made" in row]) == 2
    assert "tests.runs.test_metric_functions:calls_made" in (folder / "config.toml").read_text()
