"""Checkpoints of several processes in a training: written beside it, and gone on with by another number of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = (
    "--env math-tools --eval.final_tasks 2 --eval.every 0 --rollout.tasks_per_step 2 --rollout.group_size 4 "
    "--run.save_every 1 --learner.lr_scheduler constant"
)


def train(processes: int, *words: str) -> str:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] * (processes > 1)
    command = [sys.executable, *launch, "-m", "agentrl", "train", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
def test_other_numbers_of_processes_go_on_with_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(2, *SETTINGS.split(), "--steps", "3", "--run.dir", str(run))
    newest = run / "checkpoints" / "step-000003"
    assert sorted(p.name for p in newest.iterdir()) == [
        *("digest", "shard-00001-of-00002.safetensors", "shard-00002-of-00002.safetensors"),
        *("state.json", "tensors.safetensors", "version"),
    ]
    assert sorted(p.name for p in newest.parent.iterdir()) == ["step-000002", "step-000003"]
    part = newest / "shard-00002-of-00002.safetensors"
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    said = train(3, "--resume", str(run), "--steps", "4")
    assert "going on after step 2" in said
    assert len(list((run / "checkpoints" / "step-000004").glob("shard-*"))) == 3
    said += train(1, "--resume", str(run), "--steps", "5")
    assert "going on after step 4" in said
    assert not list((run / "checkpoints" / "step-000005").glob("shard-*"))
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == [0, 1, 2, 3, 4, 5]
    assert "no checkpoint of" not in said
