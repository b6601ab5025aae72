"""Things that a stranger hands over run nothing, with any verb, and cost neither the memory nor a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import main
from tests.helpers.strangers import (
    DATASETS,
    MODELS,
    RUNS,
    make_run,
    make_strange_dataset,
    make_strange_model,
    make_strange_run,
)

RUN_VERBS = {
    "report": "report {0} --out out.html",
    "explain": "explain {0} 1:0",
    "rescore": "rescore {0}",
    "replay": "replay {0} 1:0",
    "compare": "compare {0} {0}",
    "train": "train --resume {0}",
    "eval": "eval --resume {0}",
}
MODEL_VERBS = {
    "eval": "eval --env math-tools --tasks 1 --model {0} --out out",
    "train": "train --env math-tools --steps 1 --model {0} --run.dir out",
    "check": "check model {0}",
    "export": "export {0} --out out",
}
DATA_VERBS = {
    "eval": "eval --env prompts --env.data {0} --tasks 1 --out out",
    "train": "train --env prompts --env.data {0} --steps 1 --run.dir out",
    "play": "play --env prompts --env.data {0} --script /dev/null",
    "index": "index {0} --text_column prompt --out out.db",
}


def pair(things: Iterable[str], verbs: Iterable[str]) -> list[Any]:
    """Pair each thing with one verb in turn, two of three long; with every verb where AGENTRL_EVERY_VERB is set."""
    things, verbs = list(things), list(verbs)
    if "AGENTRL_EVERY_VERB" in os.environ:
        return [pytest.param(thing, verb) for thing in things for verb in verbs]
    return [
        pytest.param(thing, verbs[n % len(verbs)], marks=[pytest.mark.long] if n % 3 else [])
        for n, thing in enumerate(things)
    ]


# A process counts the memory of the one that it was forked from: this one is small, the tests' own is not.
LAUNCHER = """
import json, os, sys
process = os.posix_spawn(sys.executable, sys.argv[2:], os.environ)
_, status, usage = os.wait4(process, 0)
with open(sys.argv[1], "w") as file:
    json.dump([os.waitstatus_to_exitcode(status), usage.ru_maxrss, usage.ru_utime + usage.ru_stime], file)
"""


def check_harmless(command: str, folder: Path, mark: Path) -> str:
    """Run a command line in a process of its own; check that it runs nothing, and what it took. Return its words."""
    words = [sys.executable, "-m", "agentrl", *command.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "said").open("w+b") as said:
        launcher = [sys.executable, "-c", LAUNCHER, str(folder / "usage"), *words]
        subprocess.run(
            launcher, cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment, timeout=300
        )
        said.seek(0)
        text = said.read().decode()
    status, memory, seconds = json.loads((folder / "usage").read_text())
    assert not mark.exists(), text
    assert "Traceback" not in text, text
    assert status in (0, 1, 2), text
    assert memory < 1 << 20, f"{memory >> 10} MiB: {text}"
    assert seconds < 60, text
    return text


@pytest.mark.slow
@pytest.mark.parametrize(("name", "verb"), pair(RUNS, RUN_VERBS))
def test_a_run_folder(name: str, verb: str, tmp_path: Path) -> None:
    run = make_strange_run(name, tmp_path / "run", tmp_path / "ran")
    said = check_harmless(RUN_VERBS[verb].format(run), tmp_path, tmp_path / "ran")
    if (name, verb) == ("a pickled checkpoint", "train"):
        assert "the checkpoint" in said
        assert "cannot be read" in said


@pytest.mark.slow
@pytest.mark.parametrize(("name", "verb"), pair(MODELS, MODEL_VERBS))
def test_a_model(name: str, verb: str, tmp_path: Path) -> None:
    model = make_strange_model(name, tmp_path / "model", tmp_path / "ran")
    check_harmless(MODEL_VERBS[verb].format(model), tmp_path, tmp_path / "ran")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "verb"), pair(DATASETS, DATA_VERBS))
def test_a_dataset(name: str, verb: str, tmp_path: Path) -> None:
    rows = make_strange_dataset(name, tmp_path)
    check_harmless(DATA_VERBS[verb].format(rows), tmp_path, tmp_path / "ran")


def test_one_bad_row_costs_that_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_strange_run("a row without a task", tmp_path / "run", tmp_path / "ran")
    assert main(["rescore", str(run)]) == 0
    assert "1 damaged episodes are left out, such as train-1:1: it has no task" in capsys.readouterr().out
    assert main(["explain", str(run), "1:0"]) == 0
    assert main(["explain", str(run), "1:1"]) == 2
    assert "train-1:1 is damaged: it has no task" in capsys.readouterr().err
    assert main(["report", str(run)]) == 0
    assert "row 1 is damaged and left out: it has no task" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["rescore", "replay", "train"])
def test_code_of_a_run_folder_is_run_after_trust_alone(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = make_strange_run("tools that are commands", tmp_path / "run", tmp_path / "ran")
    words = RUN_VERBS[verb].format(run).split()
    assert main(words) == 2
    assert "tools = ['mcp:touch" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    if verb == "rescore":
        main([*words, "--trust"])  # the command is no MCP server, but it was started
        assert (tmp_path / "ran").exists()


def test_trust_is_for_the_settings_of_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("train", "eval"):
        assert main([verb, "--env", "math-tools", "--trust"]) == 2
        assert "--trust is for --resume" in capsys.readouterr().err


def test_a_run_that_is_as_it_should_be_is_opened(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert main(["rescore", str(run)]) == 0
