"""Code that holds up the event loop is named."""

from __future__ import annotations

import time

import anyio

from agentrl.blocking import blocking_told


def crunch(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


async def test_the_function_is_named_once() -> None:
    said: list[str] = []
    with blocking_told(said.append, limit_s=0.05):
        for _ in range(2):
            crunch(0.4)
            await anyio.sleep(0.1)
        time.sleep(0.4)  # noqa: ASYNC251 - what a user does
        await anyio.sleep(0.1)
    assert len(said) == 2
    assert "by crunch (test_blocking.py:" in said[0]
    assert "test_the_function_is_named_once (test_blocking.py:" in said[1]
    assert "0.4 s" in said[0]


async def test_who_awaits_is_not() -> None:
    said: list[str] = []
    with blocking_told(said.append, limit_s=0.2):
        for _ in range(10):
            crunch(0.01)
            await anyio.sleep(0.01)
    assert not said


async def test_only_those_of_some_files() -> None:
    said: list[str] = []
    for whose in ((__file__,), ("/nowhere/",)):
        with blocking_told(said.append, limit_s=0.05, whose=whose):
            crunch(0.3)
            await anyio.sleep(0.1)
    assert len(said) == 1
    assert "by crunch (test_blocking.py:" in said[0]
