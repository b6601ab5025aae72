"""Launchers of players: what starts those of a run, wherever it likes, and ends them with it.

A launcher is an async context manager of a `PlayerPlan`, declared with `agentrl.settings.entries.player_launcher`:
``module:function``, ``file.py:function``, or an entry point of the group ``agentrl.player_launchers``. What it starts
speaks to the controller as any player does, so that nothing else depends on it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import anyio

from agentrl.errors import UserError
from agentrl.settings.entries import player_launcher

KILLED_S, FAILED_S = 10.0, 60.0  # within which a player that is killed, or fails by itself, has not come up
MOST_QUICK, END_S = 3, 10.0
_TAIL = 2_000  # bytes of what a player wrote last


@dataclass(frozen=True)
class PlayerPlan:
    """The players that a run starts.

    Args:
        count: how many.
        command: the words that start one; it joins by itself, and ends when the run does.
        environment: variables that it needs beside its own: the key.
        url: where they join.
        say: takes a sentence for whoever looks at the run.
        fail: ends the run by an error.
    """

    count: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    url: str
    say: Callable[[str], None]
    fail: Callable[[BaseException], None]


@asynccontextmanager
async def _run_locally(plan: PlayerPlan) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(_keep_running(plan, number + 1)) for number in range(plan.count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        with anyio.CancelScope(shield=True):  # a player that is given no time leaves its agents' processes behind
            await asyncio.wait(tasks)


@player_launcher(explain="processes of this machine; one that dies is started again")
def subprocess(plan: PlayerPlan) -> object:
    """Start players as processes of this machine; one that dies is started again."""
    return _run_locally(plan)


@player_launcher(explain="tasks of an existing Ray cluster, placed by their resources")
def ray(plan: PlayerPlan) -> object:
    """Start players as tasks of an existing Ray cluster, which places them and starts lost ones again."""
    from agentrl.players.ray_tasks import run_on_ray  # of which nothing else here has need

    return run_on_ray(plan)


async def _keep_running(plan: PlayerPlan, number: int) -> None:
    """Run one player, and another in its place where it dies; end the run where none comes up."""
    quick, clock = 0, asyncio.get_running_loop().time
    while True:
        begun = clock()
        status, last = await _run_once(plan)
        if status == 0:  # the run is over
            return
        killed = status < 0 or status > 128  # by a signal, that ended it at once or by itself
        quick = quick + 1 if clock() - begun < (KILLED_S if killed else FAILED_S) else 0
        if quick == MOST_QUICK or status == 2:  # a user's mistake, in its own words
            plan.fail(
                UserError(f"player {number} cannot start: {last.removeprefix('agentrl: ') or f'status {status}'}")
            )
            return
        plan.say(f"player {number} of the run ended with status {status}; another one is started")


async def _run_once(plan: PlayerPlan) -> tuple[int, str]:
    """Run a player until it ends; return its status, and the last line that it wrote."""
    process = await asyncio.create_subprocess_exec(
        *plan.command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **plan.environment},
        start_new_session=True,  # a terminal's Ctrl-C is for the run, which ends it
    )
    tail = b""
    try:
        assert process.stderr is not None
        while part := await process.stderr.read(_TAIL):
            tail = (tail + part)[-_TAIL:]
        return await process.wait(), (tail.decode(errors="replace").strip().splitlines() or [""])[-1]
    finally:
        if process.returncode is None:
            await _terminate(process)


async def _terminate(process: asyncio.subprocess.Process) -> None:
    """End a process: by itself, or else at once."""
    with suppress(ProcessLookupError):
        process.terminate()
        try:
            await asyncio.wait_for(asyncio.shield(process.wait()), END_S)
        except (TimeoutError, asyncio.CancelledError):
            process.kill()
            await process.wait()
