"""A command that plays: its environment, how it ends, and that nothing of it is left."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio
import pytest

from agentrl.agents.agent import AgentEnding, AgentTask
from agentrl.agents.process_agent import ProcessAgent, describe_status
from tests.helpers.processes import wait_for_end

pytestmark = pytest.mark.anyio
TASK = AgentTask([{"role": "user", "content": "hi"}], [{"type": "function"}], "http://h/v1", "key", "http://h/mcp/key")


def python(code: str) -> ProcessAgent:
    return ProcessAgent([sys.executable, "-c", code])


async def test_a_process_is_told_where_the_policy_is_and_what_to_do(tmp_path: Path) -> None:
    out = tmp_path / "told"
    names = ["OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "AGENTRL_MCP_URL"]
    code = (
        f"import json, os; told = {{n: os.environ[n] for n in {names}}};"
        f"told['task'] = json.load(open(os.environ['AGENTRL_TASK'])); json.dump(told, open({str(out)!r}, 'w'))"
    )
    async with python(code).open() as agent:
        assert await agent.run(TASK) == AgentEnding()
    told = json.loads(out.read_text())
    assert told == {
        "OPENAI_BASE_URL": "http://h/v1",
        "OPENAI_API_KEY": "key",
        "ANTHROPIC_BASE_URL": "http://h",
        "ANTHROPIC_API_KEY": "key",
        "AGENTRL_MCP_URL": "http://h/mcp/key",
        "task": {"messages": list(TASK.messages), "tools": list(TASK.tools)},
    }


async def test_a_status_is_its_error_and_a_signal_the_worlds_fault() -> None:
    async with python("raise ValueError('my mistake')").open() as agent:
        ending = await agent.run(TASK)
    assert ending.error == "exit status 1: ValueError: my mistake"
    assert "Traceback" in ending.trace
    async with python("import os; os.kill(os.getpid(), 9)").open() as agent:
        assert (await agent.run(TASK)).killed
    async with ProcessAgent(["/no/such/command"]).open() as agent:
        ending = await agent.run(TASK)
    assert ending.killed
    assert ending.error == "/no/such/command cannot be started: No such file or directory"
    assert describe_status(0, "said") == AgentEnding()


async def test_who_is_cancelled_ends_with_all_that_it_started(tmp_path: Path) -> None:
    pid = anyio.Path(tmp_path / "pid")
    child = "import time; time.sleep(60)"
    code = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]);"
        f"open({str(pid)!r}, 'w').write(str(p.pid)); p.wait()"
    )
    async with python(code).open() as agent:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(agent.run, TASK)
                while not await pid.exists() or not await pid.read_text():  # noqa: ASYNC110
                    await anyio.sleep(0.05)
                tasks.cancel_scope.cancel()
    await anyio.to_thread.run_sync(wait_for_end, int(await pid.read_text()))


async def test_what_it_says_at_length_is_kept_from_its_end() -> None:
    code = "import sys; sys.stderr.write('x' * 100_000 + 'the end'); sys.exit(2)"
    async with python(code).open() as agent:
        ending = await agent.run(TASK)
    assert len(ending.trace) == 4000
    assert ending.trace.endswith("the end")


async def test_a_child_that_holds_stderr_open_does_not_hold_the_episode() -> None:
    code = "import os, subprocess, sys; subprocess.Popen(['sleep', '600']); os.kill(os.getpid(), 9)"
    async with python(code).open() as agent:
        with anyio.fail_after(60):
            assert (await agent.run(TASK)).killed
