"""A storm: everything in the world fails, in every way, and what is left is as if nothing had happened.

And the long run: episode after episode, nothing is kept.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
import pytest

from agentrl import EnvSpec, InfraError, Reply, Step, ToolEnv, ToolError, Trajectory, tool
from agentrl.environments.task_sampler import TaskSampler
from agentrl.learner.advantages.group import grpo
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.rollout import Rollout
from agentrl.rollout.scheduler import BatchPlan, open_scheduler
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.types import Group, Observation

EPISODES = int(os.environ.get("AGENTRL_EPISODES", 12_000))  # `make long` plays more
STORM = 0.3  # share of the calls, and of the environments' methods, that fail
dice = random.Random(0)


async def refuse() -> str:
    raise ToolError("not today")


async def crash() -> str:
    raise ConnectionResetError("gone")


async def lose() -> str:
    raise InfraError("sandbox_lost", "the sandbox is gone")


async def hang() -> str:
    await anyio.sleep(3600)
    return ""


async def ignore_cancellation() -> str:
    for _ in range(3):
        try:
            await asyncio.sleep(0.9)
        except asyncio.CancelledError:
            continue
    return "late"


async def flood() -> str:
    return "x" * 100_000_000


async def garble() -> str:
    return b"\xff\xfe\x00".decode("utf-8", "surrogateescape")


def block() -> str:
    time.sleep(0.9)
    return "slow"


async def tell_the_truth() -> None:
    """It is the world that fails, and no request."""
    raise ConnectionError("a storm")


FAULTS = (crash, lose, hang, ignore_cancellation)
ANSWERS = (flood, garble, refuse)


class Storm(ToolEnv):
    """Worth 1 for every second task and member, whatever happens; with ``calm`` nothing does."""

    open = 0
    max_turns = 3

    def __init__(self, calm: bool = False) -> None:
        self.calm, self.is_reset = calm, False

    def weather(self, where: str) -> None:
        if not self.calm and dice.random() < STORM / 8:
            raise dice.choice([RuntimeError, KeyError, OSError, UnicodeDecodeError.__base__])(where)  # type: ignore[misc]

    async def health_check(self) -> None:
        await tell_the_truth()

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        type(self).open += 1
        self.is_reset = True
        self.task = seed
        self.weather("reset")
        return self.ask(f"task {seed}"), {}

    @tool(timeout_s=0.6, max_consecutive_failures=None, health_check=tell_the_truth)
    async def look(self, place: str) -> str:
        """Look."""
        if self.calm or dice.random() >= STORM:
            return place
        return await dice.choice([*FAULTS, *ANSWERS])()

    @tool(timeout_s=0.6, max_consecutive_failures=None, health_check=tell_the_truth)
    def stare(self, place: str) -> str:
        """Look, without awaiting."""
        return place if self.calm or dice.random() >= STORM / 10 else block()

    async def step(self, action: Reply) -> Step:
        self.weather("step")
        return await super().step(action)

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        self.weather("score")
        return {"r": float(hash((self.task, trajectory.segments[1].token_ids)) % 2)}

    async def close(self) -> None:
        type(self).open -= self.is_reset
        self.weather("close")


def said(session: str, turn: int) -> str:
    if turn < 2:
        return call("look", place=session) + call("stare", place="b")
    return f"done {session.partition('-')[2][:6]}"


def rollout(calm: bool) -> Rollout:
    limits = EpisodeLimits(turn_timeout_s=5, episode_timeout_s=10)
    return Rollout(EnvSpec(Storm, calm=calm), ScriptedEngine(said), ByteRenderer(), limits=limits)


async def played(calm: bool, groups: int) -> list[Group]:
    play = rollout(calm)
    async with open_scheduler(play, TaskSampler(None, 0), BatchPlan(8, 8, 1, max_resamples=0)) as stream:
        found: list[Group] = []
        while len(found) < groups:
            found += (await stream.next_batch()).groups
            stream.advance()
    assert not play.running
    return found


def held() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_storm_leaves_nothing_behind_and_teaches_nothing() -> None:
    calm = await played(True, 48)
    files, threads = held()
    tasks = len(asyncio.all_tasks())
    with anyio.fail_after(120):
        found = await played(False, 48)
    await anyio.sleep(4)  # tools that ignored their cancellation, and slept in threads
    assert len(asyncio.all_tasks()) == tasks
    assert held()[0] <= files + 2
    assert held()[1] <= threads + 1
    assert Storm.open == 0
    everyone = [t for g in found for t in g]
    kinds = Counter(t.fault.kind for t in everyone if t.fault)
    assert {"tool_timeout", "tool_error", "sandbox_lost", "env_reset", "env_step", "env_score", "env_close"} <= set(
        kinds
    )
    lost = sum(kinds.values()) / len(everyone)
    assert 0.2 < lost < 0.9
    assert not any(t.reward is not None for t in everyone if t.fault)
    rewards = [t.reward for t in everyone if t.reward is not None]
    expected = [t.reward for g in calm for t in g if t.reward is not None]
    assert len(expected) >= 46 * 8  # a busy machine may miss a deadline by itself
    assert fmean(rewards) == pytest.approx(fmean(expected), abs=4 * (0.25 / len(rewards) + 0.25 / len(expected)) ** 0.5)
    longest = max(len(m["content"]) for t in everyone for m in t.messages)
    assert longest < 30_000  # of a hundred million


@pytest.mark.slow
def test_faults_that_have_nothing_to_do_with_the_reward_leave_the_expected_advantage_as_it_is() -> None:
    """The gradient's weight of each outcome, over many groups: those who are left compare among themselves."""
    rng = random.Random(1)

    def weights(share: float) -> dict[float, float]:
        sums, n = defaultdict[float, float](float), Counter[float]()
        for _ in range(20_000):
            group = [
                Trajectory(0, (), (), stop_of(lost), {} if lost else {"r": float(rng.random() < 0.3)})
                for lost in (rng.random() < share for _ in range(8))
            ]
            if sum(t.reward is not None for t in group) < 2:
                continue
            for t, a in zip(group, grpo([group])[0], strict=True):
                if t.reward is not None:
                    sums[t.reward] += a
                    n[t.reward] += 1
        return {r: sums[r] / n[r] for r in n}

    calm, storm = weights(0.0), weights(0.2)
    ratio = calm[1.0] / calm[0.0]
    assert storm[1.0] / storm[0.0] == pytest.approx(ratio, rel=0.05)  # the same direction
    assert storm[1.0] == pytest.approx(calm[1.0], rel=0.12)


def stop_of(lost: bool) -> Any:
    from agentrl.types import Stop

    return Stop.FAULT if lost else Stop.TERMINATED


@pytest.mark.slow
async def test_many_thousand_episodes_keep_nothing() -> None:
    play = rollout(calm=True)
    play.engine = Forgetful([call("look", place="b"), "done"])

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    seen = []
    async with open_scheduler(play, TaskSampler(None, 0), BatchPlan(50, 8, 1)) as stream:
        for step in range(steps := EPISODES // 400):
            await stream.next_batch()
            stream.advance()
            if (step + 1) % (steps // 10) == 0:
                seen.append(resident())
    assert (max(seen[3:]) - seen[2]) / seen[2] < 0.03, seen


class Forgetful(ScriptedEngine):
    """Keeps no record of what it was asked, which the shipped one does for tests."""

    async def generate(self, token_ids: Any, params: Any, *, session: str) -> Any:
        try:
            return await super().generate(token_ids, params, session=session)
        finally:
            self.contexts.clear()

    def end_session(self, session: str) -> None:
        self.turns.pop(session, None)
