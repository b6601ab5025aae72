"""Measuring a server's model: the same rollout, tools by the API's own calls, its failures never the model's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import main
from agentrl.engines import openai_endpoint
from agentrl.errors import UserError
from agentrl.evaluation.evaluate import evaluate
from tests.helpers.endpoints import Answer, called, said, serving

KEY = "sk-never-shown"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(openai_endpoint, "RETRY_WAIT_S", 0.001)
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
        found = evaluate("math-tools", endpoint=server.url, tasks=6, env_args=BARE)
    assert found.reward == 1.0
    assert (found.calls, found.failed_calls) == (1.0, 0.0)
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
    assert (found.faults, found.calls, found.failed_calls) == (0, 1.0, 1.0)
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
        evaluate("math-tools", endpoint=server.url, tasks=1, greedy=True, rollout={"max_tokens": 7})
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
    for none in ("localhost:8000", "http://127.0.0.1:99999/v1"):
        status, told = eval_cli(capsys, "--endpoint", none)
        assert (status, "takes a URL such as" in told) == (2, True)


def no_tools(asked: dict[str, Any]) -> Answer:
    """A server that takes no tools; its model writes calls as Hermes does."""
    if "tools" in asked:
        return 400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    system, *_, last = asked["messages"]
    assert '"name": "calculator"' in system["content"]
    if last["content"].startswith("<tool_response>"):
        return said(f"It is \\boxed{{{last['content'].split(chr(10))[1]}}}.")
    answer = solver(asked)
    assert isinstance(answer, dict)
    call = answer["tool_calls"][0]["function"]
    return said(f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}\n</tool_call>')


def test_a_server_that_takes_no_tools_gets_them_in_text(tmp_path: Path) -> None:
    with serving(no_tools) as server:
        found = evaluate("math-tools", endpoint=server.url, tasks=4, env_args=BARE, out=str(tmp_path / "a"))
    assert (found.reward, found.calls, found.failed_calls, found.faults) == (1.0, 1.0, 0.0, 0)
    assert "takes no tools: the model is told of them in the system prompt" in (tmp_path / "a/events.jsonl").read_text()
    second = next(a for a in server.asked if a["messages"][-1]["content"].startswith("<tool_response>"))
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]
    assert all(set(m) == {"role", "content"} for m in second["messages"])


def test_calls_in_text_that_cannot_be_read_are_the_model_s_mistake(tmp_path: Path) -> None:
    def script(asked: dict[str, Any]) -> Answer:
        if "tools" in asked:
            return 400, "this model does not support tools"
        if asked["messages"][-1]["content"].startswith("<tool_response>"):
            return said("I give up.")
        return said('<tool_call>\n{"name": "calculator", \n</tool_call>')

    with serving(script) as server:
        found = evaluate("math-tools", endpoint=server.url, tasks=1)
    assert (found.faults, found.calls, found.failed_calls) == (0, 1.0, 1.0)
    assert any("invalid JSON" in a["messages"][-1]["content"] for a in server.asked)


def test_an_address_without_the_path_of_the_api_is_found() -> None:
    with serving(solver) as server:
        bare = server.url.removesuffix("/v1")
        assert evaluate("math-tools", endpoint=bare, tasks=1, env_args=BARE).reward == 1.0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rollout.group_size", "4"], "--rollout.group_size does nothing in an evaluation.*here it is --trials"),
        (["--learner.lr", "1"], "--learner.lr does nothing in an evaluation, which updates no policy"),
        (["--run.dir", "x"], "here it is --out"),
        (["--endpoint", "http://x", "--dtype", "bfloat16"], "--dtype does nothing with an endpoint"),
        (["--pass_at", "much"], "eval.pass_at: .*number"),
    ],
)
def test_settings_that_do_nothing_are_refused(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told = eval_cli(capsys, *words)
    assert status == 2
    assert re.search(sentence, told), told


def test_so_they_are_in_python() -> None:
    with pytest.raises(UserError, match=r"rollout\.group_size does nothing in an evaluation"):
        evaluate("math-tools", rollout={"group_size": 4})


def test_the_help_lists_only_what_acts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--help"]) == 0
    told = capsys.readouterr().out
    for name in ("rollout.temperature", "eval.trials", "engine.max_num_seqs", "--resume", "--trials"):
        assert name in told
    for name in ("group_size", "learner.", "eval.every", "save_every", "engine.update", "min_group_size"):
        assert name not in told
