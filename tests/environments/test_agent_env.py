"""Tasks that an agent plays with tools of its own: files reach it in each form, and what it leaves is read back."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl import AgentEnv, ContractError, EnvSpec, Trajectory
from agentrl.agents.agent import Agent, AgentTask
from agentrl.agents.forms import AgentSandbox, parse_agent
from agentrl.agents.process_agent import ProcessAgent
from agentrl.cli import main
from agentrl.gateway.gateway import Gateway
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine
from agentrl.types import Stop
from tests.helpers.agents import Client, play

pytestmark = pytest.mark.anyio
ASK = """
import json, os, urllib.request
def ask(base_url, key, messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    reply = urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers))
    return json.load(reply)["choices"][0]["message"]["content"]
"""
COMMAND = f"""{ASK}
task = json.load(open(os.environ["AGENTRL_TASK"]))
assert task["files"]["src/app.py"] == open("src/app.py").read(), os.listdir()
said = ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], task["messages"])
open("src/app.py", "a").write(said + os.environ["MODE"])
os.symlink("/etc/hostname", "host")
os.mkfifo("pipe")
"""
FUNCTION = f"""{ASK}
import asyncio
async def solve(task):
    assert task.files == {{"src/app.py": "x = "}} and task.variables == {{"MODE": "strict"}}
    await asyncio.to_thread(ask, task.base_url, task.api_key, task.messages)
"""


class Repair(AgentEnv):
    """Asks for a number in a file."""

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.files, self.variables = {"src/app.py": "x = "}, {"MODE": "strict"}
        return "Finish src/app.py.", {}

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        self.extras = {
            "left": {name: await self.read_file(name) for name in ("src/app.py", "host", "pipe", "src", "no")}
        }
        return {"done": float(trajectory.answer == "7")}


async def play_form(agent: Agent, env: type[AgentEnv] = Repair) -> Trajectory:
    spec = EnvSpec(env)
    async with spec.open(), Gateway(agent).open() as gateway:
        rollout = Rollout(spec, ScriptedEngine(["7"]), ByteRenderer())
        rollout.begin = gateway.begin
        played = await rollout.episode(1)
        if folder := getattr(agent, "_folder", ""):
            assert os.listdir(folder) == []
        return played


@pytest.mark.parametrize("sandboxed", [False, True])
async def test_a_command_works_in_a_folder_with_the_files_and_what_it_leaves_is_read_back(
    sandboxed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sandboxed and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    (tmp_path / "mine.py").write_text(COMMAND)
    monkeypatch.chdir(tmp_path)
    sandbox = AgentSandbox() if sandboxed else None
    done = await play_form(parse_agent(f"{sys.executable} mine.py", sandbox=sandbox))
    assert (done.stop, done.rewards, done.fault) == (Stop.TERMINATED, {"done": 1.0}, None), done.info
    assert done.info["left"] == {"src/app.py": "x = 7strict", "host": None, "pipe": None, "src": None, "no": None}


async def test_commands_side_by_side_have_folders_of_their_own(tmp_path: Path) -> None:
    code = "import os; assert os.listdir() == ['mine']; open('mine', 'a').write('!')"
    task = AgentTask([], [], "http://h/v1", "key", files={"mine": "text"})
    async with ProcessAgent([sys.executable, "-c", code]).open() as agent:
        folders: list[str] = []

        async def run() -> None:
            ending = await agent.run(task)
            assert ending.error == ""
            folders.append(await anyio.Path(ending.folder, "mine").read_text())

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(run)
    assert folders == ["text!"] * 8


async def test_a_function_has_them_in_its_task(tmp_path: Path) -> None:
    (tmp_path / "files_agent.py").write_text(FUNCTION)
    done = await play_form(parse_agent(f"{tmp_path}/files_agent.py:solve", 1))
    assert (done.rewards, done.fault) == ({"done": 1.0}, None), done.info
    assert set(done.info["left"].values()) == {None}


async def test_a_service_has_them_in_its_json() -> None:
    assert AgentTask([], [], "", "", files={"a": "b"}).to_json()["files"] == {"a": "b"}
    assert "files" not in AgentTask([], [], "", "").to_json()


async def test_an_environment_may_bring_the_agent_itself() -> None:
    class Own(Repair):
        async def play(self, task: AgentTask) -> Any:
            from tests.helpers.agents import PythonAgent, solve

            async with PythonAgent(solve).open() as agent:
                return await agent.run(task)

    async def other(task: AgentTask, client: Client) -> None:
        raise AssertionError("it is not asked")

    done = await play(other, ["7"], env=Own)
    assert (done.reward, done.turns) == (1.0, 1)


@pytest.mark.parametrize(
    ("files", "variables", "sentence"),
    [
        ({"../up": ""}, {}, r"files: '../up' is no file in the agent's folder"),
        ({"/etc/x": ""}, {}, "is no file in the agent's folder"),
        ({"a": b""}, {}, "files is .* a dict of a text for each name"),
        ({}, {"A=B": ""}, "variables has 'A=B', which is no variable"),
    ],
)
async def test_what_is_no_file_is_refused(files: Any, variables: Any, sentence: str) -> None:
    class Wrong(Repair):
        async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
            self.files, self.variables = files, variables
            return "Finish.", {}

    async def nothing(task: AgentTask, client: Client) -> None: ...

    with pytest.raises(ContractError, match=sentence):
        await play(nothing, ["7"], env=Wrong)


async def test_who_is_cancelled_leaves_no_folder(tmp_path: Path) -> None:
    begun = anyio.Path(tmp_path / "begun")
    code = f"import time; open({str(begun)!r}, 'w'); time.sleep(60)"
    agent = ProcessAgent([sys.executable, "-c", code])
    async with agent.open():
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(agent.run, AgentTask([], [], "http://h/v1", "key", files={"a/b": "c"}))
                while not await begun.exists():  # noqa: ASYNC110
                    await anyio.sleep(0.05)
                tasks.cancel_scope.cancel()
        assert os.listdir(agent._folder) == []


def test_training_without_an_agent_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "agent_env_of_mine.py").write_text(
        "from agentrl import AgentEnv\n\nclass Mine(AgentEnv):\n    async def reset(self, *, seed, options=None):\n"
        "        return 'hi', {}\n"
    )
    assert main(["train", "--env", f"{tmp_path}/agent_env_of_mine.py:Mine", "--run.dir", str(tmp_path / "run")]) == 2
    assert "is played by an agent, and there is none: --agent FILE.py:FUNCTION" in capsys.readouterr().err
