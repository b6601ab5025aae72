"""A controller with a scripted engine, players beside it, and an environment that both can import."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio

from agentrl import Env, EnvSpec, Step, Trajectory
from agentrl.errors import ContractError
from agentrl.players.connection import KEY_ENV, FrameStream, open_listener
from agentrl.players.controller import Controller, open_controller
from agentrl.players.leased_rollout import LeasedRollout
from agentrl.players.player import play
from agentrl.players.recipe import Recipe
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine
from agentrl.types import Group, Observation, Reply

ROOT = Path(__file__).parents[2]
KEY = "a-key-of-the-tests"
BYTES = {"import": "agentrl.testing:ByteRenderer"}


class Count(Env):
    """Two turns; the reward is of the task and of what was sampled. ``seconds``: what each step takes."""

    def __init__(self, seconds: float = 0.0, breaks: int = -1) -> None:
        self.seconds, self.breaks = seconds, breaks

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        self.task, self.turn = seed, 0
        if seed == self.breaks:
            raise ContractError(f"task {seed} is broken")
        return f"task {seed}", {"seen": (seed, {"x"}), "options": dict(options or {})}

    async def step(self, action: Reply) -> Step:
        self.turn += 1
        await anyio.sleep(self.seconds)
        return Step(f"you said {action.text}", 0.5, self.turn == 2, False, {"turn": self.turn})

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        return {"parity": float(self.task % 2), "length": len(trajectory.messages) / 3}


def say(session: str, turn: int) -> str:
    """Speak by the task and the seed alone, whoever plays: a session's name begins with both."""
    return f"{session.rpartition('/')[2].rpartition('-')[0]} turn {turn}"


@dataclass
class Table:
    """A controller, what it said, and the players beside it."""

    controller: Controller
    engine: ScriptedEngine
    said: list[str] = field(default_factory=list)
    tasks: list[asyncio.Task[signal.Signals | None]] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    connections: list[FrameStream] = field(default_factory=list)  # of players by hand

    def rollout(self, **env: Any) -> LeasedRollout:
        spec = EnvSpec("tests.helpers.players:Count", **env)
        rollout = LeasedRollout(spec, self.engine, self.controller.recipe.renderer)
        rollout.controller = self.controller
        return rollout

    def join(self, name: str, key: str = KEY, wait_s: float = 0.0) -> asyncio.Task[signal.Signals | None]:
        """Let a player join, in this process."""
        task = asyncio.create_task(play(self.controller.url, key, name, wait_s, self.said.append))
        self.tasks.append(task)
        return task

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a player as a process."""
        process = start_player(self.controller.url, "--name", name, *words)
        self.processes.append(process)
        return process

    async def wait_for(self, condition: Callable[[], object]) -> None:
        with anyio.fail_after(300):
            while not condition():  # noqa: ASYNC110  of a condition that has no event
                await asyncio.sleep(0.01)


def start_player(url: str, *words: str, key: str = KEY, before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start `agentrl player`; ``before`` are words of a command that starts it."""
    environment = {**os.environ, KEY_ENV: key, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [*before, sys.executable, "-m", "agentrl", "player", url, *words]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)


@asynccontextmanager
async def open_table(
    players: int = 0,
    *,
    capacity: int = 8,
    timeout_s: float = 60.0,
    script: Any = say,
    host: str = "127.0.0.1",
    port: int = 0,
) -> AsyncIterator[Table]:
    """Open a controller with so many players in this process; end all that was started with the block."""
    engine = ScriptedEngine(script)
    described = {"kind": "forwarded", "capacity": capacity, "max_context": engine.max_context}
    recipe = Recipe({"renderer": BYTES, "engine": described}, ByteRenderer())
    controller = Controller(recipe, engine, capacity, KEY, timeout_s=timeout_s)
    table = Table(controller, engine)
    controller.on_message = table.said.append
    try:
        async with open_controller(controller, open_listener(host, port)):
            for number in range(players):
                table.join(f"player-{number}")
            yield table
    finally:
        for connection in table.connections:
            connection.abort()
            await connection.close()
        for task in table.tasks:
            task.cancel()
        if table.tasks:
            await asyncio.wait(table.tasks)
        for process in table.processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            await asyncio.to_thread(process.communicate)


async def roll_out_here(tasks: Sequence[int], size: int, seed: int = 0, **env: Any) -> list[Group]:
    """Roll the same groups out in this process."""
    rollout = Rollout(EnvSpec(Count, **env), ScriptedEngine(say), ByteRenderer())
    return await rollout.batch(tasks, size, seed=seed)


def without_times(groups: Sequence[Group]) -> list[Group]:
    """Return groups without what the clock makes different."""
    return [Group(g.task, tuple(replace(t, timings={}) for t in g)) for g in groups]
