"""Faults of episodes that agents play: whose they are, as it is of episodes that the environment plays."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import anyio
import httpx2
import pytest

from agentrl import AgentEnv, ContractError, EnvSpec, Reply, Step, Trajectory, tool
from agentrl.agents.agent import AgentEnding, AgentTask
from agentrl.errors import InfraError
from agentrl.gateway.gateway import Gateway
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from tests.helpers.agents import Client, PythonAgent, Sums, failing_engine, play, rolling_out, solve

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


class Slow(Checked):
    """One whose tool does not end."""

    @tool(timeout_s=600)
    async def add(self, a: int, b: int) -> int:
        """Add."""
        await anyio.sleep(600)
        return a + b


@pytest.mark.parametrize("stage", ["agent", "generate", "tools"])
async def test_a_deadline_leaves_nobody_in_a_lane_whatever_was_done(stage: str) -> None:
    async def wait(task: AgentTask, client: Client) -> None:
        if stage == "agent":
            await client.chat(task.messages)
            await anyio.sleep(600)
        await solve(task, client)

    engine = ScriptedEngine([ADD], latency_s=600.0 if stage == "generate" else 0.0)
    async with rolling_out(wait, engine, env=Slow, episode_timeout_s=1.0, turn_timeout_s=600.0) as rollout:
        done = await rollout.episode(1)
        assert done.fault is not None
        assert (done.fault.kind, done.fault.provoked) == ("episode_timeout", stage == "tools")
        with anyio.fail_after(60):
            while rollout.lanes._busy:  # noqa: ASYNC110  # requests that are being cancelled
                await anyio.sleep(0.01)
        assert not any(lane.inside for lane in rollout.lanes._lanes.values())


class Killed(PythonAgent):
    """An agent that is killed while a tool answers it."""

    async def run(self, task: AgentTask) -> AgentEnding:
        ending = await super().run(task)
        return replace(ending, error="killed by signal 9", killed=True)


async def test_an_agent_that_is_killed_during_a_call_is_the_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    class Noting(Slow):
        async def step(self, action: Reply) -> Step:
            called.append(1)
            return await super().step(action)

    async def call_and_go(task: AgentTask, client: Client) -> None:
        await client.chat(task.messages)
        body = {"name": "add", "arguments": {"a": 1, "b": 1}}
        requests.append(asyncio.create_task(client.post("/agentrl/call", body)))
        with anyio.fail_after(60):
            while not called:  # noqa: ASYNC110
                await anyio.sleep(0.01)

    requests: list[asyncio.Task[Any]] = []
    monkeypatch.setattr("tests.helpers.agents.PythonAgent", Killed)
    done = await play(call_and_go, [ADD], env=Noting)
    await asyncio.wait(requests)
    assert done.fault is not None
    assert (done.fault.kind, done.fault.provoked, done.reward) == ("agent", False, None)


class PlaysItself(AgentEnv):
    """Plays its episodes itself: asks once, where it asks, and breaks."""

    asks: ClassVar[bool] = True
    worst_reward = -1.0

    async def health_check(self) -> None: ...

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "What is 1 + 1?", {}

    async def play(self, task: AgentTask) -> AgentEnding:
        async with httpx2.AsyncClient(timeout=60) as http:
            body = {"messages": list(task.messages)}
            key = {"authorization": f"Bearer {task.api_key}"}
            if self.asks:
                await http.post(f"{task.base_url}/chat/completions", json=body, headers=key)
        ending: AgentEnding = self.end()
        return ending

    def end(self) -> AgentEnding:
        raise ConnectionError("my server is away")

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"right": 1.0}


class AsksNothing(PlaysItself):
    asks = False


class Blames(PlaysItself):
    def end(self) -> AgentEnding:
        raise InfraError("mine", "it is me", provoked=False)


class ReturnsNothing(PlaysItself):
    def end(self) -> Any:
        return None


class IsPlain(PlaysItself):
    def play(self, task: AgentTask) -> Any:
        return AgentEnding()


async def play_itself(env: type[AgentEnv], engine: ScriptedEngine | None = None) -> Trajectory:
    spec = EnvSpec(env)
    async with spec.open(), Gateway(None).open() as gateway:
        rollout = Rollout(spec, engine or ScriptedEngine(["2"]), ByteRenderer())
        rollout.begin = gateway.begin
        return await rollout.episode(1)


@pytest.mark.parametrize(
    ("env", "kind", "told", "provoked"),
    [
        (PlaysItself, "env_play", "ConnectionError: my server is away", True),
        (AsksNothing, "env_play", "AsksNothing.play of task 1: ", False),
        (Blames, "mine", "it is me", False),
    ],
)
async def test_an_environment_that_breaks_while_it_plays_is_a_fault(
    env: type[AgentEnv], kind: str, told: str, provoked: bool
) -> None:
    done = await play_itself(env)
    assert done.fault is not None
    assert told in done.fault.message
    assert (done.fault.kind, done.fault.provoked, done.reward) == (kind, provoked, -1.0 if provoked else None)


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (ReturnsNothing, r"ReturnsNothing\.play must return an AgentEnding .*; it returned None"),
        (IsPlain, r"IsPlain\.play must be `async def`; it returned AgentEnding"),
    ],
)
async def test_a_play_that_is_none_is_refused_by_a_sentence(env: type[AgentEnv], sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        await play_itself(env)


async def test_an_engine_that_fails_is_told_and_not_what_the_play_made_of_it() -> None:
    with pytest.raises(FloatingPointError, match="the logits are no numbers"):
        await play_itself(PlaysItself, failing_engine())
