"""Every verb about runs opens an evaluation's folder, of a model of ours and of a server's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import main
from agentrl.view.report import render_report
from agentrl.view.store import open_runs
from tests.helpers.endpoints import Answer, called, said, serving


def solver(asked: dict[str, Any]) -> Answer:
    """Calls the calculator for a bare expression, then boxes what it answered."""
    last = asked["messages"][-1]
    if last["role"] == "tool":
        return said(f"It is \\boxed{{{last['content']}}}.")
    expression = re.search(r"[-\d(][-+*/()\d ]*", last["content"])
    assert expression is not None
    return called("calculator", json.dumps({"expression": expression[0].strip()}))


@pytest.fixture(scope="module", params=["model", "endpoint"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    out = str(tmp_path_factory.mktemp("evals") / request.param)
    words = [
        "eval",
        "--env",
        "math-tools",
        "--tasks",
        "3",
        "--trials",
        "2",
        "--env.families",
        "expression",
        "--out",
        out,
    ]
    if request.param == "model":
        assert main([*words, "--model", "nano", "--rollout.max_tokens", "64"]) == 0
        yield out
    else:
        with serving(solver) as server:
            assert main([*words, "--endpoint", server.url]) == 0
        yield out


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_explain_tells_of_an_episode_and_a_token(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not trained" in told(capsys, "explain", folder, "test-0:1")
    token = told(capsys, "explain", folder, "test-0:1", "5")
    assert "‹" not in token  # it has a text


def test_rescore_scores_it_anew(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "9 episodes" in (found := told(capsys, "rescore", folder))
    assert "0 are worth something else" in " ".join(found.split())


def test_replay_plays_an_episode_again(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "the same, token by token" in told(capsys, "replay", folder, "test-0:1")


def test_view_and_report_show_it(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    (store,) = open_runs([folder])
    store.refresh()
    assert store.now.table.num_rows == 9
    assert not store.problems
    assert store.ended
    assert "eval/reward" in store.metrics.names()
    assert "math-tools" in render_report(store)
    assert "kB" in told(capsys, "report", folder)


def test_compare_pairs_it_with_itself(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no clear winner" in told(capsys, "compare", folder, folder)


def test_resume_of_a_whole_one_shows_it_again(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "eval", "--resume", folder)
    assert "is complete: there is nothing to roll out" in found
    assert "pass^k" in found
    assert f"kept in {folder}: agentrl view {folder}" in found


def test_a_server_s_episode_is_continued_by_no_model_of_ours(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    if Path(folder).name == "endpoint":
        assert main(["replay", folder, "test-0:1", "--from_turn", "1"]) == 2
        assert "was sampled by a server" in capsys.readouterr().err
