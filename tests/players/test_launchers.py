"""A run's own players are given the time to end, also where the run is cancelled."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import anyio
import pytest

from agentrl.players.launchers import PlayerPlan, subprocess

pytestmark = pytest.mark.anyio
TAKES_TIME = """
import signal, sys, time
from pathlib import Path

def end(*_):
    time.sleep(0.5)
    Path(sys.argv[1], "ended").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
Path(sys.argv[1], "started").touch()
time.sleep(600)
"""


async def wait_for(path: Path) -> None:
    for _ in range(1200):
        if await anyio.Path(path).exists():
            return
        await asyncio.sleep(0.05)
    raise TimeoutError(path)


async def test_a_player_of_a_run_that_is_cancelled_ends_by_itself(tmp_path: Path) -> None:
    """A player that is killed at once leaves the processes of its agents behind."""
    command = (sys.executable, "-c", TAKES_TIME, str(tmp_path))
    plan = PlayerPlan(1, command, {}, "http://localhost", lambda text: None, lambda error: None)
    with anyio.CancelScope() as scope:
        async with subprocess(plan):
            await wait_for(tmp_path / "started")
            scope.cancel()
            await asyncio.sleep(600)
    assert scope.cancelled_caught
    assert (tmp_path / "ended").exists()
