"""Who waits on what, and that a stall is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio

from agentrl import EnvSpec, ToolEnv, Trajectory, tool
from agentrl.aside import together
from agentrl.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.types import Observation
from agentrl.waits import Wait, oldest, stalls_told, told


@tool
async def search(query: str) -> str:
    """Search, slowly."""
    await anyio.sleep(60)
    return query


class Searching(ToolEnv):
    tools = (search,)

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return self.ask("?"), {}

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        return {"r": 0.0}


def test_the_words() -> None:
    waits = [Wait("tool 'search'", 94.2), Wait("the engine", 1.6), Wait("tool 'search'", 3.0)]
    assert told(waits) == "2 episodes wait on tool 'search' (oldest 94 s), 1 on the engine (2 s)"
    assert told(waits[1:2]) == "1 episode waits on the engine (2 s)"
    assert told([]) == "no episode is being played"
    assert oldest(waits) == 94.2


async def test_a_stall_names_the_tool_and_the_engine() -> None:
    said: list[str] = []
    heard = anyio.Event()

    def hear(text: str) -> None:
        said.append(text)
        heard.set()

    for script, latency, what in (([call("search", query="a")], 0.0, "tool 'search'"), (["a"], 60.0, "the engine")):
        play = Rollout(EnvSpec(Searching), ScriptedEngine(script, latency_s=latency), ByteRenderer())
        async with together() as tasks, stalls_told(play, 0.05, hear):
            tasks.start_soon(play.group, 0, 3)
            with anyio.fail_after(5):
                await heard.wait()
            tasks.cancel_scope.cancel()
        assert said.pop() == f"nothing has gone on for 0.05 s: 3 episodes wait on {what} (oldest 0 s)"
        said.clear()
        heard = anyio.Event()
        assert not play.waits()


async def test_what_goes_on_is_no_stall() -> None:
    said: list[str] = []
    play = Rollout(EnvSpec(Searching), ScriptedEngine(["a"], latency_s=0.02), ByteRenderer())
    async with stalls_told(play, 0.2, said.append):
        for seed in range(20):
            await play.episode(0, seed=seed)
    assert not said
    assert play.turns == 20
