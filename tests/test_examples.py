"""The examples run."""

from __future__ import annotations

import runpy
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from agentrl.cli import main

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = [
    *("--steps", "1", "--rollout.tasks_per_step", "2", "--rollout.group_size", "2"),
    *("--eval.final_tasks", "4", "--eval.every", "0"),
]

SLOW = ("prompt_dataset", "adaptive_rewards", "stages", "warm_start")


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    "name",
    [
        "hello",
        *(pytest.param(n, marks=pytest.mark.long if n == "warm_start" else pytest.mark.slow) for n in SLOW),
    ],
)
def test_scripts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](steps=1)
    assert "held-out reward" in capsys.readouterr().out


def test_the_sandbox_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "sandbox.py"))["main"]()
    walls, alone, hostile, total = capsys.readouterr().out.splitlines()
    assert walls.startswith("sandbox: ")
    assert alone == "ok: 42"
    assert hostile.startswith("raised: ")
    assert total == "6"


def test_gymnasium_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "frozen_lake.py"))["main"](episodes=8)
    out = capsys.readouterr().out
    assert "who knows the way: mean reward 1.00 of 8 episodes" in out
    assert "who says nothing: mean reward 0.00 of 8 episodes" in out
    assert out.endswith("reward 1\n")


@pytest.mark.parametrize("env", ["my_env.py:Ledger", "my_tool.py:Convert"])
def test_environments_are_sound(env: str) -> None:
    assert main(["check", "env", f"{EXAMPLES}/{env}", "--tasks", "4"]) == 0


@pytest.mark.parametrize("env", ["my_env.py:Ledger", "my_tool.py:Convert"])
def test_environments(env: str) -> None:
    assert main(["train", "--env", f"{EXAMPLES}/{env}", *SMALL]) == 0


def test_step_rewards_branches_and_a_curriculum() -> None:
    ahead = ["--learner.advantage", "gigpo", "--rollout.branches", "2", "--rollout.max_staleness", "1"]
    words = ["--env", f"{EXAMPLES}/warmer.py:Warmer", "--rollout.curriculum", f"{EXAMPLES}/warmer.py:harder", *ahead]
    assert main(["train", *words, *SMALL, "--steps", "2"]) == 0
    rows = pq.read_table("runs/last/trajectories/train-000001.parquet").to_pylist()
    assert all(len(row["step_rewards"]) >= 1 for row in rows)
    assert all(len(row["advantages"]) == sum(s["author"] == "model" for s in row["segments"]) for row in rows)


@pytest.mark.slow
def test_the_plugin_is_found_by_its_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is when installed: its package and its metadata are on the path."""
    project = tomllib.loads((EXAMPLES / "third_party/pyproject.toml").read_text())["project"]
    info = tmp_path / "agentrl_dice-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n")
    groups = ((g, "".join(f"{n} = {v}\n" for n, v in e.items())) for g, e in project["entry-points"].items())
    (info / "entry_points.txt").write_text("".join(f"[{g}]\n{entries}" for g, entries in groups))
    monkeypatch.syspath_prepend(str(EXAMPLES / "third_party/src"))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["train", "--env", "dice", *SMALL]) == 0
    assert main(["check", "env", "dice"]) == 0
    assert main(["check", "tool", "roll"]) == 0


@pytest.mark.long
def test_the_plugin_installs_and_registers(tmp_path: Path) -> None:
    """In a venv of its own that sees this one's packages."""
    venv.create(tmp_path / "venv", with_pip=True, symlinks=True)
    python = tmp_path / "venv/bin/python"
    outer = next(p for p in sys.path if p.endswith("site-packages"))
    site = subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    Path(site, "outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n")
    install: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--no-deps", str(EXAMPLES / "third_party")]
    subprocess.run(install, check=True)
    listed = subprocess.check_output([python, "-m", "agentrl", "list"], text=True)
    assert "dice" in listed
    assert "roll" in listed
    subprocess.run([python, "-m", "pytest", "-q", str(EXAMPLES / "third_party")], check=True, cwd=tmp_path)
    command: list[str | Path] = [python, "-m", "agentrl", "train", "--env", "dice", *SMALL]
    subprocess.run(command, check=True, cwd=tmp_path)


@pytest.mark.slow
def test_an_environment_of_files_and_a_command_that_works_in_them() -> None:
    agent = f"{sys.executable} {EXAMPLES / 'file_agent.py'}"
    assert (
        main(["train", "--env", f"{EXAMPLES / 'file_env.py'}:Sums", "--agent", agent, *SMALL, "--run.dir", "run"]) == 0
    )
    rows = pq.read_table("run/trajectories/train-000001.parquet").to_pylist()
    assert [row["fault"] for row in rows] == [None] * 4
    assert any(part == {"name": "written", "value": 0.1} for row in rows for part in row["rewards"])


def test_an_agent_of_several_contexts(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["train", "--env", "math-tools", "--agent", f"{EXAMPLES / 'subagents_agent.py'}:solve", *SMALL]
    assert main([*given, "--run.dir", "run"]) == 0
    rows = pq.read_table("run/trajectories/train-000001.parquet").to_pylist()
    roles = {thread["role"] for row in rows for thread in row["threads"]}
    assert {"main", "sub-agent", "side call"} <= roles
    for row in rows:
        assert len(row["threads"]) == sum(s["author"] == "prompt" for s in row["segments"])
    capsys.readouterr()
    assert main(["explain", "run", "train-1:0"]) == 0
    assert "sub-agent: a conversation of its own, opened by thread 1 (main)" in capsys.readouterr().out
    assert main(["replay", "run", "train-1:0"]) == 2
    assert "whose program decides what is asked" in capsys.readouterr().err
