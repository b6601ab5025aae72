"""A function in worker processes: many episodes at once, their errors and their ends, and a worker that dies."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from agentrl.agents.agent import AgentEnding, AgentTask
from agentrl.agents.function_agent import FunctionAgent
from agentrl.errors import UserError

pytestmark = pytest.mark.anyio
SOURCE = """
import asyncio, os, pathlib

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
    await asyncio.sleep(0.2)

def plain(task):
    pass
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


@pytest.mark.parametrize(
    ("name", "why"), [("plain", "not an `async def` of a task"), ("solv", "has no 'solv'; did you")]
)
async def test_what_cannot_be_called_is_a_sentence(source: str, name: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        async with FunctionAgent(f"{source}:{name}").open():
            raise AssertionError("it was opened")
