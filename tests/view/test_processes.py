"""The page of who waits on whom, as it is told: over some steps, and now; of old and of damaged folders too."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from agentrl.runs.folder import RunFolder
from agentrl.types import Group
from agentrl.view.processes import MOST_MESSAGES, Processes, describe_steps
from agentrl.view.server import build_app
from agentrl.view.store import Store
from tests.helpers import runs

WAITED: dict[str, Any] = {
    "wait/generate": 1.0,
    "wait/tool/search": 6.0,
    "wait/learn": 2.0,
    "wait/sync": 0.5,
    "wait/write": 0.5,
}
HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[31m"


def player(name: str, groups: int = 2, **at: float) -> list[Any]:
    return ["player", name, groups, {what.replace("_", " "): seconds for what, seconds in at.items()}]


def record(folder: Path, steps: int = 3) -> RunFolder:
    run = runs.start(folder, steps)
    for step in range(1, steps + 1):
        runs.write(run, step, [Group(step, (runs.solved(step), runs.wrong(step)))], **WAITED)
        players = [player("rack-10", the_engine=5.0, the_learner=5.0), player("rack-2", the_engine=2.5, a_tool=2.5)]
        run.log_processes(step, {"seconds": 10.0, "processes": players})
    return run


def tell(run: RunFolder, **state: Any) -> None:
    run.write_waits({"step": 3, "unix": time.time(), "elapsed": 9.0, "sentence": "", "processes": [], **state})


def ask(folder: Path, query: str = "") -> dict[str, Any]:
    with TestClient(build_app([Store(folder)]), base_url="http://127.0.0.1") as client:
        client.get("/api/runs")
        answer = client.get(f"/api/processes{query}")
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told


def test_shares_are_of_the_seconds_of_the_steps_that_are_shown(tmp_path: Path) -> None:
    record(tmp_path / "run")
    told = ask(tmp_path / "run")
    assert (told["steps"], told["shown"], told["seconds"]) == ([1, 2, 3], [1, 3], 30.0)
    learner, rack_2, rack_10 = told["rows"]  # by number
    assert learner["did"] == [["rollouts", 0.7], ["learns", 0.2], ["new weights", 0.05], ["writes", 0.05]]
    assert rack_10 == {
        "kind": "player",
        "name": "rack-10",
        "did": [["the engine", 0.5], ["the learner", 0.5]],
        "there": 1.0,
        "groups": 6,
        "now": None,
    }
    assert (rack_2["name"], rack_2["there"]) == ("rack-2", 0.5), "it was there half of the time"
    one = ask(tmp_path / "run", "?step=2&steps=1")
    assert (one["shown"], one["seconds"], one["rows"][1]["groups"]) == ([2, 2], 10.0, 2)
    assert ask(tmp_path / "run", "?step=0")["shown"] == []
    assert ask(tmp_path / "run", "?steps=0")["shown"] == [3, 3]


def test_a_run_that_goes_on_says_who_waits_now(tmp_path: Path) -> None:
    run = record(tmp_path / "run")
    doing = {"tool 'search'": [3, 94.0]}
    process = {"kind": "player", "name": "rack-2", "doing": doing, "groups": 4, "oldest_group": 120.0}
    late = {**process, "name": "rack-1", "doing": {"the engine": [1, 0.0]}}
    tell(run, sentence="The learner waits.", processes=[process, late])
    told = ask(run.folder)
    assert (told["now"], told["age"]) == ("The learner waits.", 0)
    by_name = {row["name"]: row["now"] for row in told["rows"]}
    assert list(by_name) == ["", "rack-1", "rack-2", "rack-10"], "one that joined in this step is there too"
    assert by_name["rack-2"] == {"doing": [["tool 'search'", 3.0, 94.0]], "groups": 4, "oldest_group": 120.0}
    assert by_name["rack-10"] is None
    tell(run, unix=time.time() - 400, sentence="The learner waits.")
    assert ask(run.folder)["age"] == pytest.approx(400, abs=60)
    run.write_summary({})
    assert (ask(run.folder)["now"], ask(run.folder)["age"]) == ("", 0), "a run that has ended waits for nothing"


def test_an_older_run_has_its_learner_alone_and_says_so(tmp_path: Path) -> None:
    run = record(tmp_path / "run")
    (run.folder / "processes.jsonl").unlink()
    told = ask(run.folder)
    assert (told["recorded"], told["steps"], [row["kind"] for row in told["rows"]]) == (False, [1, 2, 3], ["learner"])
    assert told["sentence"].startswith("In steps 1 to 3 the learner waited for rollouts 70 % of the time")
    runs.write(runs.start(tmp_path / "oldest"), 1, [Group(1, (runs.solved(1), runs.wrong(1)))])
    oldest = ask(tmp_path / "oldest")
    assert (oldest["sentence"], oldest["rows"], oldest["now"]) == ("", [], "")
    empty = ask(runs.start(tmp_path / "empty").folder)
    assert (empty["steps"], empty["rows"], empty["evaluates"]) == ([], [], False)


@pytest.mark.parametrize(
    ("learner", "waited", "sentence"),
    [
        (
            {"rollouts": 70.0, "learns": 30.0},
            {"tool 'a'": 40.0, "the engine": 20.0, "rewards": 10.0, "render": 0.1},
            "In steps 2 to 4 the learner waited for rollouts 70 % of the time: for tool 'a' (40 %), the engine (20 %) "
            "and rewards (10 %); it learned 30 %.",
        ),
        (
            {"rollouts": 0.1, "learns": 99.9},
            {},
            "In steps 2 to 4 rollouts waited for the learner: it learned 100 % of the time, and waited for none.",
        ),
        ({"rollouts": 5.0, "learns": 5.0}, {"the engine": 5.0}, "50 % of the time: for the engine (50 %); it learned"),
        ({}, {}, ""),
    ],
)
def test_a_sentence_says_who_waited_for_whom(
    learner: dict[str, float], waited: dict[str, float], sentence: str
) -> None:
    said = describe_steps([2, 3, 4], learner, waited)
    assert said == sentence or (sentence and sentence in said)
    assert bool(said) == bool(sentence)


def test_of_a_run_on_demonstrations_no_rollouts_are_told(tmp_path: Path) -> None:
    run = record(tmp_path / "run")
    with (run.folder / "config.toml").open("a") as file:
        file.write('\n[sft]\ndata = ["expert"]\n')
    assert ask(run.folder)["sentence"] == "In steps 1 to 3 the learner learned from demonstrations 20 % of the time."


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 4, "kind": "step", "seconds": 1, "processes": 7}',
        '{"step": 4, "kind": "step", "seconds": 1, "processes": [["player", "a", 1]]}',
        '{"step": 4, "kind": "step", "seconds": 1, "processes": [["player", "a", 1, {"x": "y"}]]}',
        '{"step": 4, "kind": "step", "processes": []}',
        '{"step": 4, "kind": "step", "seconds": 1, "processes": [["player", "a", 1e999, {}]]}',
        '{"step": 4, "kind": "step", "seconds": ',
    ],
)
def test_a_damaged_line_hides_no_other(tmp_path: Path, line: str) -> None:
    run = record(tmp_path / "run")
    with (run.folder / "processes.jsonl").open("a") as file:
        file.write(line + "\n")
    told = ask(run.folder)
    assert told["shown"] == [1, 4]
    assert [row["name"] for row in told["rows"]] == ["", "rack-2", "rack-10"]


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "7",
        "{",
        '{"processes": 7, "unix": "now", "sentence": null}',
        '{"processes": [7, {}, {"kind": "player", "name": "a", "doing": {"x": 1}}], "unix": 1e999}',
        '{"processes": [{"kind": "player", "name": "a", "doing": {}, "groups": []}]}',
        "[" * 5000,
    ],
)
def test_a_damaged_state_is_none(tmp_path: Path, text: str) -> None:
    run = record(tmp_path / "run")
    (run.folder / "waits.json").write_text(text)
    told = ask(run.folder)
    assert [row["name"] for row in told["rows"]] == ["", "rack-2", "rack-10"]
    assert all(row["now"] is None for row in told["rows"])


def test_a_state_that_is_larger_than_any_run_writes_is_not_read(tmp_path: Path) -> None:
    run = record(tmp_path / "run")
    tell(run, sentence="x" * (5 << 20))
    assert ask(run.folder)["now"] == ""


def test_those_who_came_and_went_are_told_the_latest_first(tmp_path: Path) -> None:
    run = record(tmp_path / "run")
    run.log_message(1, "the loss is odd")
    for number in range(40):
        run.log_message(2, f"player {number} has joined", "players")
    run.log_message(3, "http://a is back", "servers")
    messages = ask(run.folder)["messages"]
    assert messages[:2] == [[3, "http://a is back"], [2, "player 39 has joined"]]
    assert len(messages) == MOST_MESSAGES


def test_a_run_that_resumes_takes_its_lines_back(tmp_path: Path) -> None:
    run = record(tmp_path / "run")
    processes, store = Processes(run.folder), Store(run.folder)
    store.refresh()
    assert processes.describe(store.metrics, [], ended=False, step=None, steps=10)["seconds"] == 30.0
    run.rewind(1, 0)
    store.refresh()
    assert processes.describe(store.metrics, [], ended=False, step=None, steps=10)["seconds"] == 10.0


def test_a_name_that_looks_like_numbers_without_end_is_sorted(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    names = ["9" * 5000, "a" + "1" * 80, "a2", "٣", "", HOSTILE]
    run.log_processes(1, {"seconds": 1.0, "processes": [["player", name, 0, {"x": 1.0}] for name in names]})
    assert {row["name"] for row in ask(run.folder)["rows"]} == set(names)


def test_the_state_is_json_even_where_a_wait_is_no_number(tmp_path: Path) -> None:
    run = record(tmp_path / "run")
    tell(run, processes=[{"kind": "player", "name": "a", "doing": {"x": [1, float("nan")]}}])
    assert json.loads((run.folder / "waits.json").read_text())["processes"][0]["doing"] == {"x": [1, None]}
