"""A tool that fails again and again is not called for a while; a computing one runs in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from agentrl import ContractError, EnvSpec, InfraError, ToolEnv, ToolError, Trajectory, UserError, tool
from agentrl.rollout.rollout import Rollout, check_deadlines
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.tools.circuit_breaker import CircuitBreaker
from agentrl.types import Observation


async def use(breaker: CircuitBreaker, outcome: Exception | None = None) -> None:
    async with breaker.guard():
        if outcome is not None:
            raise outcome


async def test_open_after_so_many_failures_in_a_row_and_one_call_tries_after_the_cooldown() -> None:
    breaker = CircuitBreaker("search", 3, 0.05)
    for error in (ValueError(), ToolError("no"), ValueError(), ValueError(), ValueError()):  # a no is an answer
        with pytest.raises(type(error)):
            await use(breaker, error)
    with pytest.raises(InfraError, match=r"'search' failed 3 times in a row; not called again for 0\.05 s"):
        await use(breaker)
    await anyio.sleep(0.06)
    with pytest.raises(ValueError, match="again"):
        await use(breaker, ValueError("again"))
    with pytest.raises(InfraError, match="4 times"):
        await use(breaker)
    await anyio.sleep(0.06)
    async with breaker.guard():
        with pytest.raises(InfraError):  # one is trying
            await use(breaker)
    await use(breaker)
    assert breaker.failures == 0


calls = 0


@tool(max_consecutive_failures=4, cooldown_s=60)
async def dead(query: str) -> str:
    """Never answers."""
    global calls
    calls += 1
    raise ConnectionError("refused")


class Asking(ToolEnv):
    tools = (dead,)

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return self.ask("?"), {}

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        return {"r": 0.0}


async def test_all_episodes_of_a_run_know_of_it() -> None:
    play = Rollout(EnvSpec(Asking), ScriptedEngine([call("dead", query="a")]), ByteRenderer())
    kinds = [(await play.episode(0, seed=n)).fault for n in range(7)]
    assert [f.kind for f in kinds if f] == ["tool_error"] * 4 + ["tool_open"] * 3
    assert calls == 4


@tool(process=True, timeout_s=30)
def elsewhere(seconds: float) -> int:
    """Compute in another process."""
    time.sleep(seconds)
    return os.getpid()


@tool(process=True, timeout_s=0.5)
def forever() -> int:
    """Cannot be interrupted."""
    while True:
        pass


async def test_what_computes_runs_in_a_process_that_ends_with_its_deadline() -> None:
    assert int(await elsewhere(seconds=0.0)) != os.getpid()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await anyio.sleep(0.01)
            ticks += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        with anyio.fail_after(60), pytest.raises(InfraError, match=r"took over 0\.5 s"):
            await forever()
        tasks.cancel_scope.cancel()
    assert ticks > 10


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ContractError, match="max_consecutive_failures is 1 or more, or None; not 0"):
        tool(max_consecutive_failures=0)(lambda: None)

    async def waits() -> None: ...

    with pytest.raises(ContractError, match="process is for sync functions"):
        tool(process=True)(waits)


def test_deadlines_that_do_not_nest_are_told_at_the_start() -> None:
    @tool(timeout_s=50, retries=2)
    async def slow() -> str:
        """Slow."""
        return ""

    class Slow(Asking):
        tools = (slow,)

    with pytest.raises(
        UserError, match=r"turn_timeout_s 120 is under the 150.3 s .*'slow' may take \(3 tries of 50 s\)"
    ):
        check_deadlines(EnvSpec(Slow), 120.0)
    check_deadlines(EnvSpec(Slow), 151.0)
