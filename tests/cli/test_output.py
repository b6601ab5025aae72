"""What is printed ends no command: a reader who leaves, a terminal that is closed, a full disk silence it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pexpect
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


HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp.exe\x00"


def shown(program: str, terminal: bool, **environment: str) -> str:
    """Return what a program under `silence_when_closed` writes to a pipe, or to a terminal."""
    text = f"from agentrl.cli.output import *\nHOSTILE = {HOSTILE!r}\nwith silence_when_closed():\n    {program}"
    command, variables = [sys.executable, "-c", text], {**os.environ, "TERM": "xterm", **environment}
    if not terminal:
        done = subprocess.run(command, capture_output=True, env=variables, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout
    output: str = pexpect.run(shlex.join(command), env=variables, encoding="utf-8")
    return output


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    "program",
    [
        "print(HOSTILE)",
        "Console(highlight=False).print(HOSTILE)",
        "sys.stdout.write(HOSTILE)",
        "print_line(Console(), HOSTILE)",
    ],
)
def test_what_others_wrote_reaches_no_terminal_as_a_command(program: str, terminal: bool) -> None:
    text = shown(program, terminal)
    assert "[ESC][2J[ESC]]0;owned" in text
    assert not set(text) & set("\x1b\x07\x9b\u202e\x00")


def test_a_consoles_own_colours_reach_the_terminal() -> None:
    program = "Console(force_terminal=True, color_system='standard', highlight=False).print('[red]x[/red]' + HOSTILE)"
    assert "\x1b[31mx\x1b[0m[ESC]" in shown(program, True)


def test_no_secret_is_printed() -> None:
    for program in ("print('it said sk-0123456789')", "Console().print('it said sk-0123456789')"):
        assert shown(program, False, MY_API_KEY="sk-0123456789").strip() == "it said $MY_API_KEY"


def test_a_traceback_has_no_secret_and_no_command() -> None:
    program = "import sys; from agentrl.cli import main; main(['--version']); raise ValueError('sk-0123456789\\x1b[2J')"
    variables = {**os.environ, "MY_API_KEY": "sk-0123456789"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: $MY_API_KEY[ESC][2J"
