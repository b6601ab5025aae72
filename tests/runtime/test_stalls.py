"""Who waits on what, and that a stall is told."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import anyio
import pytest

from agentrl import EnvSpec, ToolEnv, Trajectory, tool
from agentrl.rollout.engine_protocol import LONGEST_PASS_S, Meter
from agentrl.rollout.rollout import Rollout
from agentrl.runtime.stalls import Wait, describe_waits, find_longest_wait, watch_stalls
from agentrl.runtime.threads import open_task_group
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.types import Observation


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
    assert describe_waits(waits) == "2 episodes wait on tool 'search' (oldest 94 s), 1 on the engine (2 s)"
    assert describe_waits(waits[1:2]) == "1 episode waits on the engine (2 s)"
    assert describe_waits([]) == "no episode is running"
    assert find_longest_wait(waits) == 94.2


async def test_a_stall_names_the_tool_and_the_engine() -> None:
    said: list[str] = []
    heard = anyio.Event()

    def hear(text: str) -> None:
        said.append(text)
        heard.set()

    for script, latency, what in (
        ([call("search", query="a")], 0.0, "tool 'search'"),
        (["a"], 60.0, "the engine"),
    ):
        play = Rollout(EnvSpec(Searching), ScriptedEngine(script, latency_s=latency), ByteRenderer())
        async with open_task_group() as tasks, watch_stalls(play, 0.05, hear):
            tasks.start_soon(play.group, 0, 3)
            with anyio.fail_after(60):
                await heard.wait()
            tasks.cancel_scope.cancel()
        assert said.pop() == f"nothing has gone on for 0.05 s: 3 episodes wait on {what} (oldest 0 s)"
        said.clear()
        heard = anyio.Event()
        assert not play.waits()


class Clockwork:
    """Stands still but for what a test moves."""

    def __init__(self, *waits: Wait) -> None:
        self.tokens, self.waiting = 0, list(waits)

    @property
    def progress(self) -> int:
        return self.tokens

    def waits(self) -> list[Wait]:
        return self.waiting


async def told_of(
    playing: Clockwork, monkeypatch: pytest.MonkeyPatch, stall_timeout_s: float | None, sampling: bool
) -> int:
    """Count what is said within twenty looks."""
    said: list[str] = []
    monkeypatch.setattr("agentrl.runtime.stalls.LOOK_S", 0.005)
    monkeypatch.setattr("agentrl.runtime.stalls.PATIENCE_S", 0.05)
    async with watch_stalls(playing, stall_timeout_s, said.append):
        for _ in range(40):
            await anyio.sleep(0.005)
            playing.tokens += sampling
    return len(said)


async def test_a_slow_model_that_samples_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Wait("the engine", 400.0)
    assert not await told_of(Clockwork(engine), monkeypatch, None, sampling=True)
    assert await told_of(Clockwork(engine), monkeypatch, None, sampling=False)


async def test_a_call_within_its_own_deadline_is_a_stall_only_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = Wait("tool 'build'", 90.0, 120.0)
    assert not await told_of(Clockwork(call), monkeypatch, None, sampling=False)
    assert await told_of(Clockwork(call._replace(seconds=130.0)), monkeypatch, None, sampling=False)
    assert await told_of(Clockwork(call), monkeypatch, 0.05, sampling=False)


async def test_a_pass_that_takes_long_is_a_sign_of_life() -> None:
    meter = Meter(sampled=3)
    assert meter.signs_of_life() == meter.signs_of_life()
    meter.pass_since = perf_counter()
    assert meter.signs_of_life() != meter.signs_of_life()
    meter.pass_since -= 2 * LONGEST_PASS_S
    assert meter.signs_of_life() == meter.signs_of_life()


async def test_what_goes_on_is_no_stall() -> None:
    said: list[str] = []
    play = Rollout(EnvSpec(Searching), ScriptedEngine(["a"], latency_s=0.02), ByteRenderer())
    async with watch_stalls(play, 0.2, said.append):
        for seed in range(20):
            await play.episode(0, seed=seed)
    assert not said
    assert play.turns == 20


def test_a_sentence_names_the_longest_waits_and_counts_the_others() -> None:
    waits = [Wait(f"the engine at player {n}", float(n)) for n in range(100) for _ in range(2)]
    said = describe_waits(waits)
    assert said.startswith("2 episodes wait on the engine at player 99 (oldest 99 s), 2 on the engine at player 98")
    assert said.endswith("2 on the engine at player 92 (oldest 92 s), 184 on 92 other things")
