"""An agent is looked at: what it speaks, how it sends its history, and what it makes of a broken call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl import EnvSpec, tool
from agentrl.agents.agent import AgentTask
from agentrl.checks.agent import ANSWER, check_agent
from agentrl.cli import main
from agentrl.errors import ConfigError
from tests.helpers.agents import Client, PythonAgent, Sums, solve


def verdicts(plays: Any, env: Any = Sums, **options: Any) -> dict[str, str]:
    return {f.what: f.verdict for f in check_agent(PythonAgent(plays), EnvSpec(env), **options)}


def test_one_that_plays_as_the_environment_does_is_fine() -> None:
    assert verdicts(solve) == dict.fromkeys(("speaks", "history", "tools", "sampling", "ends", "a broken call"), "ok")


def test_what_is_to_look_at_is_said() -> None:
    async def odd(task: AgentTask, client: Client) -> None:
        await client.chat([{"role": "user", "content": "a title"}], tools=None)
        first = await client.chat(task.messages, temperature=0.5)
        text = f"I called {first.get('tool_calls')}"
        await client.chat([*task.messages, {"role": "assistant", "content": text}, {"role": "user", "content": "2"}])

    assert verdicts(odd) == {
        "speaks": "ok",
        "history": "warn",
        "side calls": "ok",
        "tools": "warn",
        "sampling": "warn",
        "ends": "ok",
        "a broken call": "ok",
    }


def test_a_side_call_that_comes_first_takes_nothing_of_the_script() -> None:
    async def titled(task: AgentTask, client: Client) -> None:
        await client.chat([{"role": "user", "content": "a title"}], tools=None)
        await solve(task, client)

    assert verdicts(titled) == dict.fromkeys(
        ("speaks", "history", "side calls", "tools", "sampling", "ends", "a broken call"), "ok"
    )


def test_an_agent_that_writes_the_tools_into_its_prompt_is_called_too() -> None:
    said = list[Any]()

    async def texts(task: AgentTask, client: Client) -> None:
        messages = [*task.messages, {"role": "system", "content": f"Your tools: {task.tools}"}]
        said.append(await client.chat(messages, tools=None))
        messages.append(said[-1])
        messages.append({"role": "user", "content": await client.call("add", {"a": 1, "b": 1})})
        await client.chat(messages, tools=None)

    assert verdicts(texts)["history"] == "ok"
    assert [s["content"] == ANSWER for s in said] == [True, False, False]  # it is known after the first episode


def test_a_tool_that_writes_is_called_only_where_it_is_named() -> None:
    written = list[int]()

    class Ledger(Sums):
        @tool(writes=True)
        async def add(self, a: int, b: int) -> int:
            """Add."""
            written.append(a)
            return a + b

    found = verdicts(solve, Ledger)
    assert (found["writes"], found["ends"], "tools" in found, written) == ("skip", "ok", False, [])
    assert verdicts(solve, Ledger, allow_writes=["add"])["tools"] == "ok"
    assert written
    with pytest.raises(ConfigError, match="there is no tool 'ad'; did you mean 'add'"):
        check_agent(PythonAgent(solve), EnvSpec(Ledger), allow_writes=["ad"])


def test_one_that_fails_is_told_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "failing_agent.py").write_text(
        "async def solve(task):\n    raise RuntimeError('no model configured')\n"
    )
    assert main(["check", "agent", f"{tmp_path}/failing_agent.py:solve"]) == 1
    said = capsys.readouterr().out
    assert "RuntimeError: no model configured, before it made a request" in said
    assert 'failing_agent.py", line 2' in said


def test_an_environment_that_plays_itself_is_none_for_an_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = f"{tmp_path}/own_player.py:Own"
    (tmp_path / "own_player.py").write_text(
        "from agentrl import AgentEnv\n\nclass Own(AgentEnv):\n    async def play(self, task): ...\n"
    )
    assert main(["check", "agent", "python", "--env", env]) == 2
    assert f"env {env!r} plays its episodes itself, without an agent: agentrl check env {env}" in (
        " ".join(capsys.readouterr().err.split())
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere.py:solve"], "there is no file 'nowhere.py'"),
        (["python", "--allow_writes", "add"], "allow_writes: there is no tool 'add'"),
        (["python", "--tasks", "3"], "tasks: agentrl check agent takes --budget_s"),
        (["python", "--model", "x"], "model: agentrl check agent takes --env NAME"),
    ],
)
def test_wrong_words_are_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "agent", *words]) == 2
    assert sentence in capsys.readouterr().err
