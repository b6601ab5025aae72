"""A drain: requests end before the update, later ones wait for its end."""

from __future__ import annotations

from contextlib import suppress

import anyio
import anyio.lowlevel

from agentrl.engines.vllm.drain import Drain


async def play(wanted: bool) -> list[str]:
    """Run two requests, an update while they run, and a request meanwhile; return what happened, in order."""
    drain, events, ended = Drain(), list[str](), anyio.Event()

    async def request(name: str) -> None:
        async with drain.request():
            events.append(f"{name} begins")
            await ended.wait()
            events.append(f"{name} ends")

    async def update() -> None:
        async with drain.finish_requests(wanted):
            events.append("update begins")
            await anyio.sleep(0.01)
            events.append("update ends")

    async with anyio.create_task_group() as tasks:
        for name in ("a", "b"):
            tasks.start_soon(request, name)
        await anyio.sleep(0.01)
        tasks.start_soon(update)
        await anyio.sleep(0.01)
        tasks.start_soon(request, "late")
        await anyio.sleep(0.03)
        ended.set()
    return events


async def test_requests_end_before_the_update_and_later_ones_begin_after_it() -> None:
    assert await play(True) == [
        *("a begins", "b begins", "a ends", "b ends"),
        *("update begins", "update ends", "late begins", "late ends"),
    ]


async def test_where_it_is_not_wanted_nobody_waits() -> None:
    events = await play(False)
    assert events.index("update begins") < events.index("a ends")
    assert events.index("late begins") < events.index("a ends")


async def test_a_request_that_is_cancelled_or_fails_holds_no_update_up() -> None:
    drain = Drain()

    async def fail() -> None:
        async with drain.request():
            await anyio.sleep(0.01)
            raise ValueError

    async def cancelled() -> None:
        with anyio.move_on_after(0.01):
            async with drain.request():
                await anyio.sleep_forever()

    async def failing() -> None:
        with suppress(ValueError):
            await fail()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(failing)
            tasks.start_soon(cancelled)
            await anyio.lowlevel.checkpoint()
            async with drain.finish_requests(True):
                pass
        async with drain.request(), anyio.create_task_group():
            pass
