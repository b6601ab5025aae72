"""A function in worker processes: many episodes at once, their errors and their ends, and a worker that dies."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest

from agentrl.agents import line_worker
from agentrl.agents.agent import AgentEnding, AgentTask
from agentrl.agents.function_agent import FunctionAgent
from agentrl.errors import UserError
from tests.helpers.processes import wait_for_end

pytestmark = pytest.mark.anyio
SOURCE = """
import asyncio, os, pathlib, time

async def solve(task):
    word = task.messages[0]["content"]
    print("what is printed is no answer")
    if word == "raise":
        raise ValueError("my mistake\\nin two lines")
    if word == "die":
        os._exit(3)
    if word == "wait":
        pathlib.Path(task.api_key + "-begun").write_text("")
        try:
            await asyncio.sleep(60)
        finally:
            pathlib.Path(task.api_key).write_text("cancelled")
    if word == "block":
        pathlib.Path(task.api_key).write_text(str(os.getpid()))
        time.sleep(600)
    await asyncio.sleep(0.2)

def plain(task):
    pass
"""

KILLED = """
import sys
import anyio
from agentrl.agents import line_worker
from agentrl.agents.function_agent import FunctionAgent
from tests.agents.test_function_agent import task

line_worker._ORPHANED_S = 0.1

async def play():
    async with FunctionAgent(sys.argv[1], workers=1).open() as agent:
        await agent.run(task("block", sys.argv[2]))

anyio.run(play)
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "some_agent.py").write_text(SOURCE)
    return f"{tmp_path}/some_agent.py"


def task(word: str, key: str = "") -> AgentTask:
    return AgentTask([{"role": "user", "content": word}], [], "http://127.0.0.1:9/v1", key)


async def appears(path: anyio.Path) -> None:
    with anyio.fail_after(60):
        while not await path.exists():  # noqa: ASYNC110
            await anyio.sleep(0.05)


async def test_many_are_played_at_once_and_errors_are_told(source: str) -> None:
    async with FunctionAgent(f"{source}:solve", workers=2).open() as agent:
        started = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for _ in range(40):
                tasks.start_soon(agent.run, task("go"))
        assert anyio.current_time() - started < 40 * 0.2
        ending = await agent.run(task("raise"))
    assert (ending.error, ending.killed) == ("ValueError: my mistake", False)
    assert 'raise ValueError("my mistake' in ending.trace


async def test_who_is_cancelled_is_cancelled_in_the_worker(source: str, tmp_path: Path) -> None:
    left = anyio.Path(tmp_path / "left")
    async with FunctionAgent(f"{source}:solve", workers=1).open() as agent:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(agent.run, task("wait", str(left)))
            await appears(anyio.Path(f"{left}-begun"))
            tasks.cancel_scope.cancel()
        await appears(left)


async def test_a_worker_that_dies_is_the_worlds_fault_and_another_one_begins(source: str) -> None:
    async with FunctionAgent(f"{source}:solve", workers=1).open() as agent:
        ending = await agent.run(task("die"))
        assert (ending.error, ending.killed) == ("its worker process ended", True)
        assert (await agent.run(task("go"))).error == ""


async def test_a_death_counts_once_and_takes_none_of_the_next_workers_episodes(source: str, tmp_path: Path) -> None:
    endings: list[AgentEnding] = []

    async def play(agent: FunctionAgent, word: str, key: str = "") -> None:
        endings.append(await agent.run(task(word, key)))

    async with FunctionAgent(f"{source}:solve", workers=1).open() as agent:
        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(play, agent, "wait", str(tmp_path / str(number)))
                await appears(anyio.Path(tmp_path / f"{number}-begun"))
            tasks.start_soon(play, agent, "die")
        assert [e.killed for e in endings] == [True] * 6
        assert sum(e.counted for e in endings) == 1
        assert await agent.run(task("go")) == AgentEnding()


async def begin_blocking(agent: FunctionAgent, told: Path) -> None:
    """Have a worker of an agent block its event loop, and nobody wait for it any more."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(agent.run, task("block", str(told)))
        await appears(anyio.Path(told))
        tasks.cancel_scope.cancel()


async def test_a_worker_that_does_not_hear_a_cancellation_is_ended(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_worker, "_HEARS_S", 0.5)
    async with FunctionAgent(f"{source}:solve", workers=1).open() as agent:
        with anyio.fail_after(60):
            await begin_blocking(agent, tmp_path / "told")
            ending = await agent.run(task("go"))
            assert (ending.killed, "time.sleep, holds up its event loop" in ending.error) == (True, True)
            assert await agent.run(task("go")) == AgentEnding()


async def test_episodes_go_to_a_worker_that_hears(source: str, tmp_path: Path) -> None:
    async with FunctionAgent(f"{source}:solve", workers=2).open() as agent:
        with anyio.fail_after(60):
            await begin_blocking(agent, tmp_path / "told")
            for _ in range(3):
                assert await agent.run(task("go")) == AgentEnding()


async def test_a_pipe_that_a_worker_does_not_read_holds_nobody_who_is_cancelled(source: str, tmp_path: Path) -> None:
    async with FunctionAgent(f"{source}:solve", workers=1).open() as agent:
        with anyio.fail_after(60):
            await begin_blocking(agent, tmp_path / "told")
            async with anyio.create_task_group() as tasks:
                for _ in range(30):
                    tasks.start_soon(agent.run, task("x" * 20_000))
                await anyio.wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()


async def test_a_worker_ends_with_a_run_that_is_killed(source: str, tmp_path: Path) -> None:
    told = anyio.Path(tmp_path / "told")
    run = await anyio.open_process([sys.executable, "-c", KILLED, f"{source}:solve", str(told)])
    await appears(told)
    with anyio.fail_after(60):
        while not (pid := await told.read_text()):  # noqa: ASYNC110
            await anyio.sleep(0.05)
    run.kill()
    await run.wait()
    await run.aclose()
    await anyio.to_thread.run_sync(wait_for_end, int(pid))


@pytest.mark.parametrize(
    ("name", "why"), [("plain", "not an `async def` of a task"), ("solv", "has no 'solv'; did you")]
)
async def test_what_cannot_be_called_is_a_sentence(source: str, name: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        async with FunctionAgent(f"{source}:{name}").open():
            raise AssertionError("it was opened")
