"""Measuring a server's model: the same rollout, tools by the API's own calls, its failures never the model's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from endpoints import Answer, called, said, serving

from agentrl.cli import main
from agentrl.engines import endpoint
from agentrl.errors import UserError
from agentrl.evaluation import evaluate

KEY = "sk-never-shown"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(endpoint, "PATIENCE_S", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def solver(asked: dict[str, Any]) -> Answer:
    """Calls the calculator for a bare expression, then boxes what it answered."""
    last = asked["messages"][-1]
    if last["role"] == "tool":
        return said(f"It is \\boxed{{{last['content']}}}.")
    expression = re.search(r"[-\d(][-+*/()\d ]*", asked["messages"][-1]["content"])
    assert expression is not None
    return called("calculator", f'{{"expression": "{expression[0].strip()}"}}')


BARE = {"families": "expression"}


def test_tools_are_called_by_the_api_s_own_calls() -> None:
    with serving(solver) as server:
        found = evaluate("math-tools", endpoint=server.url, tasks=6, env_settings=BARE)
    assert found.reward == 1.0
    assert found.calls == found.valid_calls == 1.0
    first = next(a for a in server.asked if len(a["messages"]) == 2)
    assert [t["function"]["name"] for t in first["tools"]] == ["calculator"]
    assert first["model"] == "m"
    second = next(a for a in server.asked if len(a["messages"]) == 4)
    call, result = second["messages"][2:]
    assert call["tool_calls"][0]["id"] == result["tool_call_id"] == "c1"


def test_malformed_calls_are_the_model_s_mistake() -> None:
    def script(asked: dict[str, Any]) -> Answer:
        if asked["messages"][-1]["role"] == "tool":
            return said(asked["messages"][-1]["content"])
        return called("calculator", '{"expression": ')

    with serving(script) as server:
        found = evaluate("math-tools", endpoint=server.url, tasks=2)
    assert (found.faults, found.calls, found.valid_calls) == (0, 1.0, 0.0)
    assert any("invalid JSON" in a["messages"][-1]["content"] for a in server.asked)
    keys = {key for a in server.asked for m in a["messages"] for key in m}
    assert keys <= {
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
    }  # the API's own


def test_greedy_and_sampled_are_asked_for() -> None:
    with serving(lambda asked: said("no")) as server:
        evaluate("math-tools", endpoint=server.url, tasks=1)
        evaluate("math-tools", endpoint=server.url, tasks=1, greedy=True, rollout={"max_turn_tokens": 7})
    assert [a["temperature"] for a in server.asked] == [1.0, 0.0]
    assert server.asked[1]["max_tokens"] == 7


def test_a_server_that_stumbles_is_asked_again() -> None:
    failures = iter([(503, "busy"), (429, "slowly"), (500, "oops")])

    def script(asked: dict[str, Any]) -> Answer:
        return next(failures, None) or said("no")

    with serving(script) as server:
        assert evaluate("math-tools", endpoint=server.url, tasks=1).faults == 0
    assert len(server.asked) == 4


def test_one_that_keeps_failing_is_a_fault_and_no_answer() -> None:
    with serving(lambda asked: (500, "down")) as server, pytest.raises(UserError, match=r"endpoint_failed.*status 500"):
        evaluate("math-tools", endpoint=server.url, tasks=1)


def test_a_refused_request_is_not_repeated() -> None:
    with serving(lambda asked: (400, "too long")) as server, pytest.raises(UserError, match=r"endpoint_refused.*long"):
        evaluate("math-tools", endpoint=server.url, tasks=1)
    assert len(server.asked) == 1


def test_an_answer_without_a_message_is_a_fault() -> None:
    with serving(lambda asked: (200, "hello")) as server, pytest.raises(UserError, match="endpoint_answer"):
        evaluate("math-tools", endpoint=server.url, tasks=1)


def test_an_answer_cut_short_ends_the_episode() -> None:
    with serving(lambda asked: {**said("I think"), "finish": "length"}) as server:
        found = evaluate("math-tools", endpoint=server.url, tasks=2)
    assert (found.turns, found.reward) == (1.0, 0.0)


def eval_cli(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["eval", "--env", "math-tools", "--tasks", "2", *words])
    told = capsys.readouterr()
    assert KEY not in told.out + told.err
    return status, told.out + told.err


def test_by_the_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(solver, key=KEY) as server:
        status, told = eval_cli(capsys, "--endpoint", server.url)
        assert (status, "$OPENAI_API_KEY is not set" in told) == (2, True)
        monkeypatch.setenv("MY_KEY", "wrong")
        status, told = eval_cli(capsys, "--endpoint", server.url, "--key_env", "MY_KEY")
        assert (status, "$MY_KEY is refused" in told) == (2, True)
        monkeypatch.setenv("MY_KEY", KEY)
        status, told = eval_cli(capsys, "--endpoint", server.url, "--key_env", "MY_KEY", "--env.families", "expression")
    assert status == 0
    assert "1.000" in told


def test_the_model_is_one_that_the_server_has(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(solver, models=("llama", "qwen")) as server:
        status, told = eval_cli(capsys, "--endpoint", server.url, "--model", "qwem")
        assert (status, "did you mean 'qwen'?" in told) == (2, True)
        status, told = eval_cli(capsys, "--endpoint", server.url)
        assert (status, "has 2 models; say --model NAME" in told) == (2, True)


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(solver) as server:
        url = server.url
    status, told = eval_cli(capsys, "--endpoint", url)
    assert (status, "no server answers at" in told) == (2, True)
    status, told = eval_cli(capsys, "--endpoint", "localhost:8000")
    assert (status, "takes a URL such as" in told) == (2, True)
