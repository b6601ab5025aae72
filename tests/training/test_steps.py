"""Steps: passes over a data set instead of their number, and batches cut into several optimizer steps; also resumed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from agentrl import Callback, UserError, train
from agentrl.settings.loader import build_config, read_overrides, read_toml

SMALL: dict[str, Any] = {
    "steps": 4,
    "rollout": {"tasks_per_step": 2, "group_size": 4, "max_tokens": 24},
    "eval": {"every": 0, "final_tasks": 1},
}


class Killed(Callback):
    """Ends the run in the middle of a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.at:
            raise ProcessLookupError("killed")


def lines(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "policy_version" in row]


@pytest.mark.slow
def test_a_batch_cut_in_three_makes_three_updates_and_resumes_to_the_bit(tmp_path: Path) -> None:
    settings = SMALL | {"deterministic": True, "learner": {"lr": 1e-3, "steps_per_generation": 3, "num_iterations": 2}}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train("math-tools", run={"dir": str(whole), "save_every": 2}, **settings)
    again = {"dir": str(broken), "save_every": 2, "resume": True}
    with pytest.raises(ProcessLookupError):
        train("math-tools", run=again, callbacks=[Killed(3)], **settings)
    train("math-tools", run=again, **settings)
    one, other = (load_file(next((run / "model").glob("*.safetensors"))) for run in (whole, broken))
    assert [n for n in one if not torch.equal(one[n], other[n])] == []
    assert all(row["staleness/max"] == 0 for row in lines(whole) if "staleness/max" in row)
    versions = [0.0, *(row["policy_version"] for row in lines(whole))]
    assert all(0 <= b - a <= 6 and (b - a) % 2 == 0 for a, b in itertools.pairwise(versions))
    assert versions[-1] > 6  # a step's rows of advantage 0 may leave an optimizer step empty
    for path in sorted((whole / "trajectories").glob("train-*.parquet")):
        rows = pq.read_table(path, columns=["weight", "credit", "segments"]).to_pylist()
        tokens = [sum(len(s["token_ids"]) for s in r["segments"] if s["author"] == "model") for r in rows]
        total = sum(n for n, r in zip(tokens, rows, strict=True) if r["weight"] is not None)
        assert [r["weight"] * total for r in rows if r["weight"]] == pytest.approx([3.0] * sum(map(bool, tokens)))


@pytest.mark.parametrize(
    ("epochs", "steps"),
    [(2, 5), pytest.param(1, 3, marks=pytest.mark.slow), pytest.param(0.5, 2, marks=pytest.mark.slow)],
)
def test_epochs_are_passes_over_the_tasks_there_are(epochs: float, steps: int, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Say {i}.", "solution": str(i)}) + "\n" for i in range(5)))
    run = {"dir": str(tmp_path / "run"), "save_every": 1}
    settings = {k: v for k, v in SMALL.items() if k != "steps"}
    own = {"data": str(data), "test_data": str(data), "rewards": "accuracy"}
    summary = train("prompts", env_args=own, run=run, epochs=epochs, **settings).summary
    assert summary["steps"] == len(list((tmp_path / "run" / "trajectories").glob("train-*"))) == steps
    seen = [
        row["task"]
        for path in sorted((tmp_path / "run" / "trajectories").glob("train-*.parquet"))
        for row in pq.read_table(path, columns=["task", "sample"]).to_pylist()
        if row["sample"] == 0
    ]
    assert all(seen.count(task) >= int(epochs) for task in range(5))
    assert read_toml(tmp_path / "run" / "config.toml")[1]["steps"] == steps


def test_what_no_epoch_can_be_made_of_is_refused(tmp_path: Path) -> None:
    run, own = {"dir": str(tmp_path / "run")}, {k: v for k, v in SMALL.items() if k != "steps"}
    for more, sentence in (
        ({"epochs": 1}, "epochs 1: env 'math-tools' generates tasks without end; give steps instead"),
        ({"epochs": 1, "steps": 5}, "epochs 1 and steps 5 say the same twice"),
        ({"epochs": 0}, "epochs: input should be greater than 0, not 0"),
        ({"epochs": 1, "rollout": {"sampler": "difficulty"}}, "epochs are passes over all tasks in turn; sampler diff"),
        ({"learner": {"steps_per_generation": 9}}, "steps_per_generation 9 is over the 8 episodes of a step"),
        ({"learner": {"steps_per_generation": 0}}, "greater than or equal to 1, not 0"),
    ):
        with pytest.raises(UserError, match=sentence):
            train("math-tools", run=run, **{**own, **more})
    assert not (tmp_path / "run").exists()


def test_the_later_of_steps_and_epochs_holds(tmp_path: Path) -> None:
    file = ("file", {"env": "math-tools", "steps": 7})
    by_epochs = build_config(file, read_overrides(["--epochs", "2"]))
    assert (by_epochs.epochs, by_epochs.steps) == (2, 100)
    by_steps = build_config(("file", {"env": "math-tools", "epochs": 2}), read_overrides(["--steps", "7"]))
    assert (by_steps.epochs, by_steps.steps) == (None, 7)
