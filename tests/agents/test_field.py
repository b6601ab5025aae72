"""Agents of the field, as the package index has them: each trains a step on math-tools, in the process form.

AGENTRL_AGENTS_PYTHON is the interpreter that has their packages (`make .venv-agents/.installed`); without it those on
what the tests have anyway are tried (make long ARGS=agents).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from agentrl.cli import main
from agentrl.models.source import locate_model

AGENTS = Path(__file__).parents[2] / "examples" / "agents"
PYTHON = os.environ.get("AGENTRL_AGENTS_PYTHON")
NAMES = sorted(file.stem for file in AGENTS.glob("*_agent.py")) if PYTHON else ["responses_agent"]
WRITES_ANEW = ("mini_swe_agent", "smolagents_agent")  # its history at each step
SMALL = [
    *("--steps", "1", "--rollout.tasks_per_step", "2", "--rollout.group_size", "4"),
    *("--eval.final_tasks", "1", "--eval.every", "0", "--rollout.max_tokens", "64"),
]


def widen_nano(folder: Path) -> None:
    """Write nano with room for the prompts of agents: they are longer than 1,024 tokens."""
    shutil.copytree(locate_model("nano"), folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 1 << 15}))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the agent asks for")  # a temperature: the run's stands
@pytest.mark.parametrize("name", NAMES)
def test_it_trains_a_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    widen_nano(tmp_path / "model")
    monkeypatch.chdir(tmp_path)  # what an agent writes
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = f"{PYTHON or sys.executable} {AGENTS / name}.py"
    words = ["--env", "math-tools", "--model", str(tmp_path / "model"), "--agent", command, "--run.dir", "run"]
    assert main(["train", *words, *SMALL]) == 0
    rows: list[dict[str, Any]] = pq.read_table("run/trajectories/train-000001.parquet").to_pylist()
    assert len(rows) == 8
    for row in rows:
        assert row["fault"] is None, row["fault"]
        assert sum(s["author"] == "model" for s in row["segments"]) >= 1
    threads = [sum(s["author"] == "prompt" for s in row["segments"]) for row in rows]
    turns = [sum(s["author"] == "model" for s in row["segments"]) for row in rows]
    assert max(turns) > 1
    if name not in WRITES_ANEW:
        assert threads == [1] * len(rows)
    with capfd.disabled():
        print(f"{name}: {sum(turns)} turns in {sum(threads)} threads, {sum(len(r['calls']) for r in rows)} calls")
