"""Agents of which three in ten are killed at random: those that survive are as without, and nothing is left behind.

AGENTRL_KILLED_EPISODES says of how many episodes (make long ARGS=killed-agents).
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from statistics import mean
from typing import Any, Self

import anyio
import pytest

from agentrl import EnvSpec
from agentrl.agents.agent import Agent, AgentEnding, AgentTask
from agentrl.agents.forms import parse_agent
from agentrl.agents.function_agent import FunctionAgent
from agentrl.gateway.gateway import Gateway
from agentrl.rollout.rollout import Rollout
from agentrl.testing import STOP, ByteRenderer, call
from agentrl.types import Completion, Group, SamplingParams, Trajectory
from tests.helpers.agents import Sums

pytestmark = pytest.mark.anyio
EPISODES = int(os.environ.get("AGENTRL_KILLED_EPISODES", "64"))
GROUP, STEP, SHARE = 4, 16, 0.3  # STEP groups at once
FUNCTION = """
async def solve(task):
    messages = list(task.messages)
    while True:
        body = {"model": "m", "messages": messages, "tools": task.tools}
        key = {"authorization": "Bearer " + task.api_key}
        answer = await task.http.post(task.base_url + "/chat/completions", json=body, headers=key)
        if answer.status_code == 410:
            return
        message = answer.json()["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return
        for one in message["tool_calls"]:
            content = await task.call(one["function"]["name"], one["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": content})
"""
PROCESS = """
import json, os, socket
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
host, port = url.split("/")[2].split(":")

def post(path, body):
    data = json.dumps(body).encode()
    head = f"POST /v1{path} HTTP/1.1\\r\\nhost: {host}\\r\\nauthorization: Bearer {key}\\r\\nconnection: close\\r\\n"
    with socket.create_connection((host, int(port))) as line:
        line.sendall(f"{head}content-length: {len(data)}\\r\\n\\r\\n".encode() + data)
        answer = b"".join(iter(lambda: line.recv(1 << 16), b""))
    if answer.split()[1] == b"410":
        raise SystemExit
    return json.loads(answer.partition(b"\\r\\n\\r\\n")[2])

with open(os.environ["AGENTRL_TASK"]) as file:
    task = json.load(file)
messages = task["messages"]
while True:
    body = {"model": "m", "messages": messages, "tools": task["tools"]}
    message = post("/chat/completions", body)["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for one in message["tool_calls"]:
        content = post("/agentrl/call", one["function"])["content"]
        messages.append({"role": "tool", "tool_call_id": one["id"], "content": content})
"""


class Engine:
    """Says what its seed says, after a while."""

    capacity, max_context, version = 32, 1 << 20, 0

    def __init__(self) -> None:
        self.begun, self.ended = set[str](), set[str]()

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        self.begun.add(session)
        dice = random.Random(params.seed)
        await anyio.sleep(dice.uniform(0.0, 0.05))
        said = call("add", a=dice.randrange(9), b=1) if dice.random() < 0.6 else dice.choice(["right", "wrong"])
        ids = (*said.encode(), STOP)
        return Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), "stop")

    def end_session(self, session: str) -> None:
        self.ended.add(session)

    async def update_weights(self, policy: Any, version: int) -> None: ...

    async def close(self) -> None: ...


class Counted:
    """An agent, and how many of its episodes began, and were killed."""

    def __init__(self, agent: Agent) -> None:
        self.agent, self.begun, self.killed = agent, 0, 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        async with self.agent.open():
            yield self

    async def run(self, task: AgentTask) -> AgentEnding:
        self.begun += 1
        ending = await self.agent.run(task)
        self.killed += ending.killed
        return ending


def list_children() -> set[int]:
    """List the processes that this one started and that run."""
    pids: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended
            pids.update(int(pid) for pid in file.read_text().split())
    return pids


def count_handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def kill_some(agent: Counted, before: set[int]) -> None:
    """Kill processes by chance until their share of the episodes has been ended so."""
    dice, sent = random.Random(0), 0

    def kill_one() -> None:
        if running := sorted(list_children() - before):
            with suppress(ProcessLookupError):
                os.kill(dice.choice(running), signal.SIGKILL)

    async def kill_later() -> None:
        await anyio.sleep(dice.uniform(0.0, 0.6))  # while it starts, asks, waits, calls
        kill_one()

    async with anyio.create_task_group() as kills:
        while True:
            await anyio.sleep(dice.uniform(0.0, 0.1))
            if not isinstance(agent.agent, FunctionAgent):  # one that was dead already is no kill
                while sent < 1.1 * SHARE * agent.begun and agent.killed < SHARE * agent.begun:
                    kills.start_soon(kill_later)
                    sent += 1
            elif agent.killed < SHARE * agent.begun:
                kill_one()
                await anyio.sleep(0.15)  # a worker takes a while to start again


async def roll_out(agent: Agent, *, kills: bool) -> list[Trajectory]:
    """Roll out all episodes; whatever they leave behind is an error."""
    gc.collect()
    spec, engine, counted = EnvSpec(Sums), Engine(), Counted(agent)
    children, handles, tasks = list_children(), count_handles(), len(asyncio.all_tasks())
    async with spec.open(), Gateway(counted, episodes=EPISODES).open() as gateway:
        rollout = Rollout(spec, engine, ByteRenderer())
        rollout.begin = gateway.begin
        kept = children if isinstance(agent, FunctionAgent) else list_children()  # with the watch on orphans
        async with anyio.create_task_group() as group:
            if kills:
                group.start_soon(kill_some, counted, kept)
            groups: list[Group] = []
            for first in range(0, EPISODES // GROUP, STEP):
                groups += await rollout.batch(range(first, min(first + STEP, EPISODES // GROUP)), GROUP)
            group.cancel_scope.cancel()
        assert gateway._playing == {}
        assert not rollout.running
        if isinstance(agent, FunctionAgent):
            assert not any(worker.waiting for worker in agent._workers)
        else:
            assert list_children() == kept
            assert len(kept - children) == 1
    assert engine.begun <= engine.ended
    assert list_children() == children
    gc.collect()
    assert count_handles() <= handles
    assert len(asyncio.all_tasks()) == tasks
    return [t for g in groups for t in g.trajectories]


def mean_reward(trajectories: Sequence[Trajectory]) -> float:
    return mean(t.reward for t in trajectories if t.reward is not None)


@pytest.mark.slow
async def test_of_agents_that_are_killed_the_others_are_as_without(tmp_path: Path) -> None:
    function, script = tmp_path / "function.py", tmp_path / "process.py"
    function.write_text(FUNCTION)
    script.write_text(PROCESS)
    whole = await roll_out(parse_agent(f"{function}:solve", 4), kills=False)
    assert not any(t.fault for t in whole)
    assert 0.2 < mean_reward(whole) < 0.8
    for form in (f"{function}:solve", f"{sys.executable} -I -S {script}"):
        killed = await roll_out(parse_agent(form, 4), kills=True)
        pairs = [(one, other) for one, other in zip(killed, whole, strict=True) if one.fault is None]
        assert 0.1 * EPISODES <= EPISODES - len(pairs) <= 0.6 * EPISODES
        assert {t.fault.kind for t in killed if t.fault} == {"agent"}
        for one, other in pairs:
            assert (one.rewards, one.segments, one.stop) == (other.rewards, other.segments, other.stop)
        survivors, all_of_them = mean_reward([t for t, _ in pairs]), mean_reward(whole)
        print(
            f"{Path(form.rpartition(' ')[2]).name}: {EPISODES - len(pairs)} of {EPISODES} killed; mean of the others "
            f"{survivors:.4f}, without kills {mean_reward([t for _, t in pairs]):.4f}; of all without {all_of_them:.4f}"
        )
