"""A killed run goes on as if nothing had happened; what is half-written is never read."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from agentrl import UserError, checkpoint, train
from agentrl.cli import main
from agentrl.watching import Watcher

EXACT: dict[str, Any] = {
    "steps": 5,
    "deterministic": True,
    "rollout": {"tasks": 3, "group_size": 3},
    "eval": {"every": 2, "tasks": 3, "final_tasks": 6},
    "learner": {"lr": 1e-3, "beta": 0.01},
}


class Killed(Watcher):
    """Ends the run in the middle of a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def step(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.at:
            raise ProcessLookupError("killed")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(next((run / "model").glob("*.safetensors"))))


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without what the clock says."""
    return {
        k: v
        for k, v in row.items()
        if not k.startswith(("time/", "tools/")) and "seconds" not in k and k != "step_time"
    }


@pytest.mark.parametrize(
    "more", [{}, {"lora": {"rank": 4}}, pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow)]
)
def test_it_ends_with_the_same_weights_to_the_bit(more: dict[str, Any], tmp_path: Path) -> None:
    settings = EXACT | more
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train("math-tools", run={"dir": str(whole), "save_every": 2}, **settings)
    for at in (3, 4):  # after the checkpoint of step 2, and once more from there
        run = {"dir": str(broken), "save_every": 2, "resume": True}
        with pytest.raises(ProcessLookupError):
            train("math-tools", run=run, watcher=Killed(at), **settings)
    summary = train("math-tools", run={"dir": str(broken), "save_every": 2, "resume": True}, **settings)
    one, other = weights(whole), weights(broken)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [timeless(row) for row in lines(whole)] == [timeless(row) for row in lines(broken)]
    assert summary["steps"] == 5
    names = sorted(p.name for p in (whole / "trajectories").iterdir())
    assert names == sorted(p.name for p in (broken / "trajectories").iterdir())
    for name in names:
        a, b = (
            pq.read_table(run / "trajectories" / name).drop_columns(["timings", "calls"]) for run in (whole, broken)
        )
        assert a.column_names == b.column_names
        assert [n for n in a.column_names if not a[n].equals(b[n])] == []


def test_ahead_of_the_learner_no_task_is_lost_or_learned_from_twice(tmp_path: Path) -> None:
    ahead = {"tasks": 3, "group_size": 2, "max_staleness": 2}
    settings = EXACT | {"rollout": ahead, "steps": 6, "deterministic": False}
    run = {"dir": str(tmp_path / "run"), "save_every": 1, "resume": True}
    for at in (2, 4, 5):
        with pytest.raises(ProcessLookupError):
            train("math-tools", run=run, watcher=Killed(at), **settings)
    train("math-tools", run=run, **settings)
    tasks = [
        row["task"]
        for step in range(1, 7)
        for row in pq.read_table(tmp_path / "run" / "trajectories" / f"train-{step:06d}.parquet").to_pylist()
        if row["member"] == 0
    ]
    assert len(tasks) == len(set(tasks)) == 18
    assert max(tasks) < 3 * (6 + 2 + 1)


def test_a_checkpoint_that_is_damaged_is_passed_over(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {"step": step})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000003"]
    file = tmp_path / "step-000003" / "state.pt"
    file.write_bytes(file.read_bytes()[:-1])
    assert checkpoint.load(tmp_path) == (2, {"step": 2})
    (tmp_path / "step-000002" / "digest").unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole: step-000002, step-000003 do not match"):
        checkpoint.load(tmp_path)
    assert checkpoint.load(tmp_path / "none") is None


def test_a_full_disk_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 1, {"step": 1})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, 2, {"step": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    said: list[str] = []

    class Listening(Watcher):
        def said(self, text: str) -> None:
            said.append(text)

    train("math-tools", run={"dir": str(tmp_path / "run")}, watcher=Listening(), **EXACT | {"steps": 1})
    assert said == ["no checkpoint of step 1: No space left on device; the one before is whole"]


def test_other_settings_and_another_process_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "run")
    train("math-tools", run={"dir": folder}, **EXACT | {"steps": 1})
    with pytest.raises(UserError, match=r"other settings: learner\.lr 0.001 -> 0.5; to begin anew from its model"):
        train("math-tools", run={"dir": folder, "resume": True}, **EXACT | {"learner": {"lr": 0.5, "beta": 0.01}})
    with pytest.raises(UserError, match=r"holds a run already; .* agentrl train --resume"):
        train("math-tools", run={"dir": folder}, **EXACT)
    assert main(["train", "--resume", f"{folder}x"]) == 2
    assert "--resume: there is no run in" in capsys.readouterr().err
    assert main(["train", "--resume", folder, "--steps", "2"]) == 0
    assert "going on after step 1" in capsys.readouterr().out
    lock = f"f = open({folder + '/.lock'!r}, 'a'); fcntl.flock(f, 2)"
    code = f"import fcntl, time; {lock}; print(1, flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(UserError, match="another process is at the run in"):
            train("math-tools", run={"dir": folder, "resume": True}, **EXACT)
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.slow
def test_killed_again_and_again_it_ends_as_if_never(tmp_path: Path) -> None:
    """SIGKILL at random moments, also while a checkpoint is written: each time the same command again."""
    words = [
        sys.executable,
        "-m",
        "agentrl",
        "train",
        "--env",
        "math-tools",
        "--steps",
        "12",
        "--deterministic",
        "true",
    ]
    words += ["--rollout.tasks", "2", "--rollout.group_size", "2", "--eval.every", "0", "--eval.final_tasks", "2"]
    words += ["--run.save_every", "1"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run([*words, "--run.dir", str(whole)], check=True, capture_output=True, timeout=120)
    rng, kills = random.Random(0), 0
    while True:
        again = [*words, "--run.dir", str(broken), "--run.resume", "true"]
        process = subprocess.Popen(again, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(rng.uniform(4.5, 8.0) if kills < 12 else 120)
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            time.sleep(0.1)
    assert process.returncode == 0
    assert kills >= 3
    one, other = weights(whole), weights(broken)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [timeless(row) for row in lines(whole)] == [timeless(row) for row in lines(broken)]
