"""Code that holds up the event loop is named."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl.runtime.loop_watchdog import _QueuedCall, watch_event_loop


def crunch(seconds: float) -> None:
    end = time.thread_time() + seconds  # of a processor, which a busy machine gives to others too
    while time.thread_time() < end:
        sum(range(1000))


async def hold_up(hold: Callable[[float], None], said: list[str], name: str) -> list[str]:
    """Hold the loop up until a function is named, as a busy machine may not look in time, and once more."""
    for _ in range(20):
        hold(0.4)
        await anyio.sleep(0.1)
        if any(name in line for line in said):
            break
    hold(0.4)
    await anyio.sleep(0.1)
    return [line for line in said if name in line]


def doze(seconds: float) -> None:
    time.sleep(seconds)  # what a user does


async def test_the_function_is_named_once() -> None:
    said: list[str] = []
    with watch_event_loop(said.append, limit_s=0.05):
        crunched = await hold_up(crunch, said, "by crunch (test_loop_watchdog.py:")
        dozed = await hold_up(doze, said, "by doze (test_loop_watchdog.py:")
    assert len(crunched) == len(dozed) == 1
    assert re.search(r"held up for (0\.[3-9]|\d\.\d) s by", crunched[0])


async def test_who_awaits_is_not() -> None:
    said: list[str] = []
    with watch_event_loop(said.append, limit_s=0.2):
        for _ in range(10):
            crunch(0.01)
            await anyio.sleep(0.01)
    assert not said


async def test_only_those_of_some_files() -> None:
    said: list[str] = []
    for whose in ((__file__,), ("/nowhere/",)):
        with watch_event_loop(said.append, limit_s=0.05, whose=whose):
            crunch(0.3)
            await anyio.sleep(0.1)
    assert len(said) == 1
    assert "by crunch (test_loop_watchdog.py:" in said[0]


async def test_neither_the_loop_that_waits_nor_what_agentrl_does_is_blamed() -> None:
    said: list[str] = []
    ours: dict[str, Any] = {"__name__": "agentrl_envs.prompts"}
    exec(compile("import time\ndef load():\n    time.sleep(0.3)\n", "prompts.py", "exec"), ours)
    with watch_event_loop(said.append, limit_s=0.05):
        asyncio.get_running_loop().call_soon(ours["load"])
        asyncio.get_running_loop().call_soon(time.sleep, 0.3)  # nobody's function is in the loop's own call
        await anyio.sleep(0.8)
    assert not said


async def test_many_short_calls_are_no_long_one() -> None:
    said: list[str] = []
    with watch_event_loop(said.append, limit_s=0.2):
        for _ in range(60):
            asyncio.get_running_loop().call_soon(crunch, 0.01)  # in one turn of the loop
        await anyio.sleep(0.05)
        await anyio.sleep(0.05)
    assert not said


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system does not tell how long a thread queued")
async def test_a_busy_machine_is_not_blamed_on_whoever_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(self: _QueuedCall) -> float:
        return time.perf_counter()  # all the time that passes is spent in the queue

    monkeypatch.setattr(_QueuedCall, "seconds", starved)
    said: list[str] = []
    with watch_event_loop(said.append, limit_s=0.05):
        crunch(0.3)
        await anyio.sleep(0.1)
    assert not said


def test_how_long_a_thread_queued_is_read_from_the_system() -> None:
    queued = _QueuedCall(threading.get_native_id())
    before = queued.seconds()
    crunch(0.05)
    assert 0 <= before <= queued.seconds()
    assert _QueuedCall(0).seconds() == 0.0
