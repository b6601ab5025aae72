"""What is printed ends no command: a reader who leaves, a terminal that is closed, a full disk silence it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli.output import silence_when_closed

AGENTRL = [sys.executable, "-m", "agentrl"]


@pytest.mark.parametrize("words", [["list"], ["train", "--help"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_who_leaves_after_a_line_is_no_error(words: list[str], unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    reading, writing = os.pipe()
    os.close(reading)
    command = subprocess.run([*AGENTRL, *words], stdout=writing, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(writing)
    assert command.returncode == 0
    assert command.stderr == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_no_error() -> None:
    with open("/dev/full", "wb") as full:
        command = subprocess.run([*AGENTRL, "--help"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert command.returncode == 0
    assert command.stderr == b""


@pytest.mark.slow
def test_a_training_goes_on_when_its_reader_leaves(tmp_path: Path) -> None:
    words = ["--steps", "2", "--rollout.tasks_per_step", "2", "--rollout.group_size", "2", "--eval.every", "0"]
    words += ["--eval.final_tasks", "2", "--run.dir", str(tmp_path / "run")]
    run = subprocess.Popen(
        [*AGENTRL, "train", "--env", "math-tools", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert run.stdout is not None
    run.stdout.readline()
    run.stdout.close()
    assert run.wait(300) == 0
    assert (tmp_path / "run" / "summary.json").is_file()


def test_the_streams_of_tests_and_notebooks_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with silence_when_closed():
        assert sys.stdout is before
        print("heard")
    assert capsys.readouterr().out == "heard\n"
