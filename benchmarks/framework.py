"""What the framework itself costs: python benchmarks/framework.py

A scripted engine, so that no model is in the numbers: episodes of four turns, each with a tool call but the last.

  turns/s   of CPU time and of wall time, all episodes at once, instant engine and tool: 100 to 10,000 episodes
  memory    of an episode that waits for its turn, 2,000 characters of conversation each
  limit     128 and 1,024 episodes with an engine of 0.5 s a turn and a tool that takes 1 s; or a log-normal time, mean
            1 s, sigma 1, at most 5 s; or 1 s, and for one call in twenty as long as its deadline, 5 s, after which the
            episode is an infrastructure error: wall over the slowest episode's own chain of engine and tool
"""

from __future__ import annotations

import gc
import itertools
import os
import random
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import anyio
from rich.console import Console
from rich.table import Table

from agentrl import EnvSpec, ToolEnv, Trajectory, tool
from agentrl.rollout.rollout import Rollout
from agentrl.runtime.memory import collect_garbage_seldom
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.types import Observation

TURNS, ENGINE_S, TOOL_S, HANG_S = 4, 0.5, 1.0, 5.0
_count = itertools.count()
SAID = [*[call("look", place="somewhere")] * (TURNS - 1), "done"]


class Looking(ToolEnv):
    """Calls a tool three times. ``kind`` says how long the tool takes."""

    max_turns = TURNS

    def __init__(self, kind: str = "instant", text: int = 20) -> None:
        self.kind, self.text = kind, text

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        self.random, self.slept = random.Random(next(_count)), 0.0
        return self.ask("Look around. " + "x" * self.text), {}

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        return {"turns": float(trajectory.turns), "slept": self.slept}

    @tool(timeout_s=HANG_S, max_consecutive_failures=None)
    async def look(self, place: str) -> str:
        """Look at a place."""
        seconds = self.seconds()
        self.slept += seconds
        if seconds:
            await anyio.sleep(seconds)
        return place

    def seconds(self) -> float:
        if self.kind == "log-normal":
            return min(TOOL_S * self.random.lognormvariate(-0.5, 1.0), HANG_S * 0.99)
        if self.kind == "5 % hang" and self.random.random() < 0.05:
            return 60.0
        return 0.0 if self.kind == "instant" else TOOL_S


def rollout(kind: str, engine_s: float = 0.0, text: int = 20) -> Rollout:
    return Rollout(EnvSpec(Looking, kind=kind, text=text), ScriptedEngine(SAID, latency_s=engine_s), ByteRenderer())


async def overhead(episodes: int) -> tuple[float, float]:
    """Turns a second of CPU and of wall time."""
    play = rollout("instant")
    gc.collect()
    cpu, wall = process_time(), perf_counter()
    await play.batch(range(episodes // 10), 10)
    return play.turns / (process_time() - cpu), play.turns / (perf_counter() - wall)


async def memory(episodes: int) -> float:
    """Bytes of an episode that waits for the engine."""
    play = rollout("instant", engine_s=1e6, text=2000)
    gc.collect()
    before = resident()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(play.batch, range(episodes // 10), 10)
        await anyio.sleep(episodes / 1000)  # all of them have come to the engine
        assert sum(w.what == "the engine" for w in play.waits()) == episodes
        gc.collect()
        found = (resident() - before) / episodes
        tasks.cancel_scope.cancel()
    return found


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def ratio(kind: str, episodes: int) -> tuple[float, float, float]:
    """Wall, the slowest chain, and the share of episodes that were lost."""
    play = rollout(kind, ENGINE_S)
    began = perf_counter()
    groups = await play.batch(range(episodes // 8), 8)
    wall = perf_counter() - began
    everyone = [t for g in groups for t in g]
    chains = [
        ENGINE_S * t.turns + (t.rewards.get("slept") or TOOL_S * (t.turns - 1) + HANG_S * bool(t.fault))
        for t in everyone
    ]
    return wall, max(chains), sum(t.fault is not None for t in everyone) / len(everyone)


async def main() -> None:
    with collect_garbage_seldom():  # as in a run
        await measure()


async def measure() -> None:
    console = Console(width=None if Console().is_terminal else 100)
    await overhead(100)  # warm
    table = Table("episodes at once", "turns/s of CPU", "turns/s of wall", title="framework alone")
    for episodes in (100, 1000, 10_000):
        runs = [await overhead(episodes) for _ in range(3)]
        cpu, wall = (median(column) for column in zip(*runs, strict=True))
        table.add_row(f"{episodes:,}", f"{cpu:,.0f}", f"{wall:,.0f}")
    console.print(table)
    console.print(f"an episode that waits: {await memory(5000) / 1024:.1f} KiB")
    table = Table("tool", "episodes", "wall s", "slowest chain s", "ratio", "lost", title="against the limit")
    for kind in ("1 s", "log-normal", "5 % hang"):
        for episodes in (128, 1024):
            wall, chain, lost = await ratio(kind, episodes)
            table.add_row(kind, f"{episodes:,}", f"{wall:.2f}", f"{chain:.2f}", f"{wall / chain:.2f}", f"{lost:.0%}")
    console.print(table)


if __name__ == "__main__":
    anyio.run(main)
