"""What a run says of its own time: evaluations are charged to themselves, and nothing is begun for nothing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from agentrl_envs.math_tools import MathTools

from agentrl import train
from agentrl.environments.task_sampler import HELD_OUT
from agentrl.errors import ConfigError
from agentrl.training.callbacks import Callback
from agentrl.types import Observation

LOG: list[tuple[str, str]] = []


class Logged(MathTools):
    """Writes down what begins and ends, and of which split."""

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        self.split = (options or {})["split"]
        LOG.append(("begin", self.split))
        return await super().reset(seed=seed, options=options)

    async def close(self) -> None:
        LOG.append(("end", self.split))


class Bars(Callback):
    """Counts the episodes of each phase against what was announced."""

    def __init__(self) -> None:
        self.phases: list[list[Any]] = []

    def on_phase_begin(self, name: str, episodes: int) -> None:
        self.phases.append([name, episodes, 0])

    def on_episode_end(self, trajectory: Any) -> None:
        if self.phases[-1][0] != "evaluate" or trajectory.task >= HELD_OUT:  # the next batch may begin as it is saved
            self.phases[-1][2] += 1


Rows = list[dict[str, Any]]


def run(folder: Path, callback: Callback | None = None, **more: Any) -> tuple[Rows, Rows, dict[str, Any], Bars]:
    LOG.clear()
    own = more.pop("eval", {})
    every = {} if own.get("every") == 0 else {"every": 1, "tasks": 2}
    settings: dict[str, Any] = {
        "steps": 3,
        "rollout": {"tasks_per_step": 2, "group_size": 2, "max_tokens": 32, **more.pop("rollout", {})},
        "eval": {**every, "final_tasks": 2, **own},
        "run": {"dir": str(folder), "save_every": 1},
    }
    bars = Bars()
    summary = train(Logged, callbacks=[callback or bars], **{**settings, **more}).summary
    rows, pictures = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "timeline.jsonl")
    )
    return rows, pictures, summary, bars


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_evaluation_has_the_run_to_itself_and_its_time_is_in_no_step(staleness: int, tmp_path: Path) -> None:
    rows, pictures, summary, bars = run(tmp_path / "run", rollout={"max_staleness": staleness})
    assert LOG.count(("begin", "train")) == 3 * 2 * 2  # not one for after the last step
    playing = 0
    for what, split in LOG:
        playing += {"begin": 1, "end": -1}[what] if split == "train" else 0
        assert split == "train" or playing == 0
    steps, evaluations = ([r for r in rows if name in r] for name in ("step_time", "eval/runtime"))
    assert (len(steps), len(evaluations)) == (3, 4)
    assert all(done <= announced for name, announced, done in bars.phases if name == "evaluate")
    for row in steps:
        waited = sum(v for k, v in row.items() if k.startswith("wait/"))
        assert waited == pytest.approx(row["step_time"], abs=1e-6)
        assert 0 <= row["time/generate"] <= row["step_time"]
        assert (row["time/generate"] > 0) == (row["tokens_per_second"] > 0)
        assert "time/evaluate" not in row
    tokens = sum(r["tokens_per_second"] * r["step_time"] for r in steps)
    assert tokens == pytest.approx(summary["sampled_tokens"])
    drawn = [p for p in pictures if p["kind"] != "save"]
    assert [(p["kind"], p["step"]) for p in drawn] == [
        ("evaluation", 0),
        *[(kind, step) for step in (1, 2) for kind in ("step", "evaluation")],
        ("step", 3),
        ("evaluation", 3),
    ]
    for one, other in pairwise(pictures):  # none is counted twice
        assert one["begin"] + one["seconds"] <= other["begin"] + 1e-3
    assert [r["total/episodes"] for r in steps] == [4, 8, 12]
    assert steps[-1]["total/sampled_tokens"] == summary["sampled_tokens"] == sum(r["sampled_tokens"] for r in steps)
    elapsed = [r["clock/elapsed"] for r in rows]
    assert elapsed == sorted(elapsed)
    saved = sum(p["seconds"] for p in pictures if p["kind"] == "save")
    assert summary["train_seconds"] == pytest.approx(sum(r["step_time"] for r in steps) + saved, abs=0.5)


def test_an_evaluation_may_be_a_lane_of_its_own_and_measures_one_policy(tmp_path: Path) -> None:
    rows, _, _, _ = run(tmp_path / "run", eval={"mode": "overlap"})
    steps, evaluations = ([r for r in rows if name in r] for name in ("step_time", "eval/runtime"))
    assert [r["step"] for r in evaluations] == [0, 1, 2, 3]
    assert all("time/evaluate" in r and r["time/evaluate"] <= r["step_time"] for r in steps[1:])
    begun = [i for i, what in enumerate(LOG) if what == ("begin", "train")]
    ended = [i for i, what in enumerate(LOG) if what == ("end", "test")]
    assert begun[4] < ended[7]  # the second batch was begun before the first of the evaluations in mid-run was over
    for step in (1, 2):  # the update after it waited for it
        order = [("eval/runtime" in r, r["step"]) for r in rows]
        assert order.index((True, step)) < order.index((False, step + 1))


def test_overlapping_evaluations_and_determinism_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"deterministic and eval\.mode overlap"):
        run(tmp_path / "run", eval={"mode": "overlap"}, deterministic=True)


@pytest.mark.parametrize("staleness", [0, 1])
def test_after_an_interrupt_nothing_is_begun_that_is_not_learned_from(staleness: int, tmp_path: Path) -> None:
    class Interrupted(Callback):
        def on_episode_end(self, trajectory: Any) -> None:
            if LOG.count(("begin", "train")) and not self.sent:
                self.sent = True
                os.kill(os.getpid(), signal.SIGINT)

        sent = False

    rows, _, summary, _ = run(
        tmp_path / "run", Interrupted(), steps=9, eval={"every": 0}, rollout={"max_staleness": staleness}
    )
    assert summary["interrupted"]
    learned = 4 * sum("step_time" in row for row in rows)
    assert LOG.count(("begin", "train")) <= learned + 4 * staleness  # what was ahead already when it came


@pytest.mark.slow
def test_an_evaluation_beside_that_a_kill_cuts_is_made_when_the_run_goes_on(tmp_path: Path) -> None:
    class Killed(Callback):
        def on_step_end(self, step: int, values: Mapping[str, float]) -> None:
            if step == 2:
                raise ProcessLookupError("killed")

    with pytest.raises(ProcessLookupError):
        run(tmp_path / "run", Killed(), eval={"mode": "overlap"})
    folder = {"dir": str(tmp_path / "run"), "save_every": 1, "resume": True}
    rows, pictures, _, _ = run(tmp_path / "run", eval={"mode": "overlap"}, run=folder)
    assert [row["step"] for row in rows if "eval/runtime" in row] == [0, 1, 2, 3]
    assert [row["step"] for row in rows if "step_time" in row] == [1, 2, 3]
    elapsed = [row["clock/elapsed"] for row in rows]
    assert elapsed == sorted(elapsed)  # it counts on
    assert {(p["kind"], p["step"]) for p in pictures} >= {("evaluation", 1), ("step", 2)}
