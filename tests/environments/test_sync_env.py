"""An environment of plain methods runs in a thread of each episode's own."""

from __future__ import annotations

import copy
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio
import pytest

from agentrl import ContractError, Env, EnvSpec, Reply, Step, ToolEnv, Trajectory, tool
from agentrl.checks.env import check_env
from agentrl.checks.finding import failures
from agentrl.rollout.episode import Branching, EpisodeLimits
from agentrl.rollout.rollout import Rollout
from agentrl.runtime.threads import SerialThread
from agentrl.testing import ByteRenderer, ScriptedEngine
from agentrl.types import Stop


class Shop(Env[dict[str, list[str]]]):
    """Keeps a connection, which belongs to the thread that opened it."""

    sync = True

    @classmethod
    @contextmanager
    def open_shared(cls, **_: Any) -> Iterator[dict[str, list[str]]]:  # type: ignore[override]
        log = {"opened": [threading.current_thread().name]}
        yield log
        log["opened"].append("closed")

    def reset(self, *, seed: int, options: Any = None) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        self.connection = sqlite3.connect(":memory:")
        self.connection.execute("CREATE TABLE turns (text TEXT)")
        return f"task {seed}", {}

    def step(self, action: Reply) -> Step:  # type: ignore[override]
        self.connection.execute("INSERT INTO turns VALUES (?)", (action.content,))
        ((count,),) = self.connection.execute("SELECT COUNT(*) FROM turns")
        return Step("more", 1.0, count == 2, False, {})

    async def score(self, trajectory: Trajectory) -> Mapping[str, float | None]:
        assert threading.current_thread() is threading.main_thread()
        return {"turns": float(trajectory.turns)}

    def close(self) -> None:  # type: ignore[override]
        self.connection.close()
        self.shared["opened"].append("episode closed")


async def play(cls: type[Env], script: Sequence[str], timeout_s: float = 10.0) -> tuple[Trajectory, Any]:
    spec = EnvSpec(cls)
    async with spec.open():
        limits = EpisodeLimits(turn_timeout_s=timeout_s)
        return await Rollout(spec, ScriptedEngine(script), ByteRenderer(), limits=limits).episode(7), spec.shared


async def test_plain_methods_run_in_one_thread_beside_async_ones() -> None:
    t, log = await play(Shop, ["a", "b"])
    assert (t.stop, t.rewards, t.fault) == (Stop.TERMINATED, {"turns": 2.0}, None)
    assert [m["content"] for m in t.messages] == ["task 7", "a", "more", "b", "more"]
    assert log == {"opened": ["agentrl function", "episode closed", "closed"]}


async def test_a_plain_tool_of_a_sync_environment_runs_in_its_thread() -> None:
    class Asks(ToolEnv):
        sync = True

        def reset(self, *, seed: int, options: Any = None) -> Any:
            self.connection = sqlite3.connect(":memory:")
            return self.ask("Ask."), {}

        @tool
        def query(self, sql: str) -> str:
            """Ask the database."""
            return str(self.connection.execute(sql).fetchall())

        def close(self) -> None:  # type: ignore[override]
            self.connection.close()

    call = '<tool_call>{"name": "query", "arguments": {"sql": "SELECT 6 * 7"}}</tool_call>'
    t, _ = await play(Asks, [call, "42"])
    assert [m["content"] for m in t.messages] == ["Ask.", "", "[(42,)]", "42"]


async def test_a_method_that_hangs_is_left_behind_and_nothing_else_is_called() -> None:
    release, called = threading.Event(), list[str]()

    class Stuck(Env):
        sync = True

        def reset(self, *, seed: int, options: Any = None) -> Any:
            release.wait(60)
            return "", {}

        def close(self) -> None:  # type: ignore[override]
            called.append("close")

    try:
        t, _ = await play(Stuck, ["a"], timeout_s=0.05)
    finally:
        release.set()
    assert t.fault is not None
    assert (t.fault.kind, called) == ("turn_timeout", [])
    assert t.fault.message == "Stuck.reset of task 7 took over 0.05 s; its thread is left behind"


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(3), KeyError("rows")])
async def test_what_a_plain_method_raises_is_a_fault(error: BaseException) -> None:
    class Broken(Env):
        sync = True

        def reset(self, *, seed: int, options: Any = None) -> Any:
            raise error

    t, _ = await play(Broken, ["a"])
    assert t.fault is not None
    assert t.fault.kind == "env_reset"
    assert type(error).__name__ in t.fault.message


async def test_branches_have_threads_of_their_own() -> None:
    class Counts(Env):
        sync = True

        def reset(self, *, seed: int, options: Any = None) -> Any:
            self.threads = [threading.get_ident()]
            return "go", {}

        def step(self, action: Reply) -> Step:  # type: ignore[override]
            self.threads.append(threading.get_ident())
            return Step("more", 0.0, len(self.threads) == 3, False, {"threads": tuple(self.threads)})

        def clone(self) -> Env:
            other = Counts()
            other.threads = copy.copy(self.threads)
            return other

    spec = EnvSpec(Counts)
    async with spec.open():
        rollout = Rollout(spec, ScriptedEngine(["a", "b"]), ByteRenderer(), branching=Branching(1, 2))
        group = await rollout.group(0, 2)
    one, other = (t.info["threads"] for t in group)
    assert one[:2] == other[:2]
    assert one[0] == one[1]
    assert len({one[2], other[2]}) == 2


def test_a_class_of_plain_methods_without_the_attribute_and_the_attribute_without_one_are_told() -> None:
    class Forgot(Shop):
        sync = False

    class Nothing(Env):
        sync = True

    with pytest.raises(ContractError, match=r"Forgot\.open_shared must be an async context manager"):
        anyio.run(play, Forgot, ["a"])
    with pytest.raises(ContractError, match=r"Nothing\.sync is True, and it has no plain method: reset, step, score, "):
        EnvSpec(Nothing)
    with pytest.raises(ContractError, match=r"Odd\.sync is 'yes'; it is True or False"):
        EnvSpec(type("Odd", (Env,), {"sync": "yes"}))


def test_check_env_plays_a_sync_environment() -> None:
    class Even(Env):
        sync = True

        def reset(self, *, seed: int, options: Any = None) -> Any:
            self.number = 2 * seed + ((options or {}).get("split") == "test")
            return f"Say {self.number}.", {}

        def step(self, action: Reply) -> Step:  # type: ignore[override]
            return Step([], float(str(self.number) in action.content.split()), True, False, {})

    assert failures(check_env(Even, tasks=2)) == []


async def test_a_thread_ends_and_a_call_that_never_began_is_dropped() -> None:
    thread, gate, called = SerialThread(), threading.Event(), list[int]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(thread.run, partial(gate.wait, 60))
        await anyio.wait_all_tasks_blocked()
        with anyio.move_on_after(0.02):
            await thread.run(lambda: called.append(1))
        gate.set()
    assert (await thread.run(lambda: 5), called, thread.abandoned) == (5, [], False)
    thread.end()
    assert thread._thread is not None
    thread._thread.join(10)
    assert not thread._thread.is_alive()
    assert await thread.run(lambda: 6) == 6
