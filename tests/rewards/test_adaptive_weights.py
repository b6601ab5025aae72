"""Rewards that set their own weight: it is kept with the episode, told by the metrics, and the same after a kill."""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import agentrl_envs
import pyarrow.parquet as pq
import pytest

from agentrl import Callback, UserError, train
from agentrl.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "adaptive_rewards.py"
DATA = Path(agentrl_envs.__file__).parent / "data"
SMALL: dict[str, Any] = {
    "steps": 4,
    "deterministic": True,
    "rollout": {"tasks_per_step": 3, "group_size": 2, "max_tokens": 16},
    "eval": {"every": 0, "final_tasks": 2},
}


class Killed(Callback):
    """Ends the run in the middle of a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.at:
            raise ProcessLookupError("killed")


def long(completions: list[str], set_weight: Any, trainer_state: Any, **columns: Any) -> list[float]:
    """The weight is the step, then the mean of the step before."""
    history = trainer_state.log_history
    assert [row["step"] for row in history] == list(range(1, trainer_state.global_step + 1))
    set_weight(0.25 + (history[-1]["rewards/long/mean"] if history else 0.0))
    return [len(text) % 5 / 5 for text in completions]


def env_args(*rewards: Any) -> dict[str, Any]:
    return {"data": str(DATA / "symbols.jsonl"), "test_data": str(DATA / "symbols-test.jsonl"), "rewards": [*rewards]}


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(run / "trajectories" / f"{name}.parquet").to_pylist()
    return found


def steps(run: Path) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "step_time" in line]


@pytest.mark.long
def test_the_weight_is_kept_told_and_the_same_after_a_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_rewards.py").write_text(
        "def long(completions, set_weight, trainer_state, **columns):\n"
        "    history = trainer_state.log_history\n"
        "    set_weight(0.25 + (history[-1]['rewards/long/mean'] if history else 0.0))\n"
        "    return [len(text) % 5 / 5 for text in completions]\n"
    )
    args = env_args("own_rewards.py:long")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train("prompts", env_args=args, run={"dir": str(whole), "save_every": 1}, **SMALL)
    again = {"dir": str(broken), "save_every": 1, "resume": True}
    with pytest.raises(ProcessLookupError):
        train("prompts", env_args=args, run=again, callbacks=[Killed(3)], **SMALL)
    train("prompts", env_args=args, run=again, **SMALL)
    told = steps(whole)
    expected = [0.25, *(0.25 + row["rewards/long/mean"] for row in told[:-1])]
    assert len(set(expected)) > 1
    assert [row["rewards/long/weight"] for row in told] == pytest.approx(expected)
    assert [row["rewards/long/weight"] for row in steps(broken)] == pytest.approx(expected)
    for number, weight in enumerate(expected, 1):
        for row in rows(whole, f"train-{number:06d}"):
            assert row["weights"] == [{"name": "long", "value": pytest.approx(weight)}]
            assert row["reward"] == pytest.approx(weight * row["rewards"][0]["value"])
    assert [w["value"] for row in rows(whole, "test-000004") for w in row["weights"]] == [1.0] * 4  # they compare
    capsys.readouterr()
    assert main(["explain", str(whole), "train-2:0"]) == 0
    assert f"x {expected[1]:g}" in capsys.readouterr().out
    assert main(["rescore", str(whole), "--out", str(tmp_path / "again.parquet")]) == 0
    for row in pq.read_table(tmp_path / "again.parquet").to_pylist():
        assert row["reward"] == pytest.approx(row["reward_before"])


@pytest.mark.slow
def test_the_history_is_of_each_step_before(tmp_path: Path) -> None:
    train("prompts", env_args=env_args(long), run={"dir": str(tmp_path / "run")}, **SMALL)


@pytest.mark.parametrize("weight", ["'much'", pytest.param("float('nan')", marks=pytest.mark.slow)])
def test_a_weight_that_is_no_number_is_refused(weight: str, tmp_path: Path) -> None:
    def wrong(completions: list[str], set_weight: Any, **columns: Any) -> list[float]:
        set_weight(eval(weight))
        return [0.0] * len(completions)

    with pytest.raises(UserError, match=r"set_weight\(.*\) in reward 'wrong': a weight is a finite number"):
        train("prompts", env_args=env_args(wrong), run={"dir": str(tmp_path / "run")}, **SMALL)


@pytest.mark.long
def test_the_example_learns_the_format_and_then_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLE))["main"](steps=60)
    told = steps(tmp_path / "runs" / "last")
    first, last = told[0], told[-1]
    assert first["rewards/exact/weight"] < 0.5 < 1.0 < last["rewards/exact/weight"]
    assert last["rewards/boxed/mean"] > 0.9
    assert last["rewards/exact/mean"] > first["rewards/exact/mean"] + 0.2
