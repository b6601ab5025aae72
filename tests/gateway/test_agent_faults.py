"""Faults of episodes that agents play: whose they are, as it is of episodes that the environment plays."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from agentrl import EnvSpec, Reply, Step, tool
from agentrl.agents.agent import AgentTask
from agentrl.errors import InfraError
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from tests.helpers.agents import Client, Sums, play, solve

pytestmark = pytest.mark.anyio
ADD = call("add", a=1, b=1)


class Checked(Sums):
    """One whose world works."""

    worst_reward = -1.0

    async def health_check(self) -> None: ...


class Bombed(Checked):
    """Breaks by a call."""

    async def step(self, action: Reply) -> Step:
        if action.tool_calls:
            raise InfraError("sandbox_gone", "killed by what was run")
        return await super().step(action)


async def test_a_step_that_breaks_by_a_call_is_provoked_as_it_is_natively() -> None:
    spec = EnvSpec(Bombed)
    async with spec.open():
        native = await Rollout(spec, ScriptedEngine([ADD]), ByteRenderer()).episode(1)
    own = await play(solve, [ADD], env=Bombed)
    found: list[Any] = [(t.fault and t.fault.kind, t.fault and t.fault.provoked, t.reward) for t in (native, own)]
    assert found == [("sandbox_gone", True, -1.0)] * 2


async def test_seconds_of_calls_that_run_together_count_once() -> None:
    calls, running = 8, list[int]()

    class Together(Checked):
        @tool
        async def add(self, a: int, b: int) -> int:
            """Add, once all calls are here."""
            running.append(b)
            with anyio.fail_after(60):
                while len(running) < calls:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            await anyio.sleep(0.2)
            return a + b

    async def call_all(task: AgentTask, client: Client) -> None:
        messages: list[Any] = [*task.messages, await client.chat(task.messages)]
        async with anyio.create_task_group() as tasks:
            for one in messages[-1]["tool_calls"]:
                tasks.start_soon(client.call, "add", one["function"]["arguments"])
        await client.chat([*messages, {"role": "user", "content": "so?"}])

    said = "".join(call("add", a=1, b=b) for b in range(calls))
    done = await play(call_all, [said, "right"], env=Together, max_tokens=4000)
    assert 0.19 < done.timings["tools"] < done.timings["total"]
    assert sum(done.timings[stage] for stage in ("generate", "tools", "agent")) <= done.timings["total"]
