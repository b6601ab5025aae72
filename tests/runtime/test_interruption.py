"""Signals: the first one saves what is finished and returns, the second one leaves at once, wherever a run runs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import anyio
import pytest

from agentrl import Reply, Step, train
from agentrl.environments.env import Env
from agentrl.errors import Interrupted
from agentrl.runtime.interruption import SIGNALS, Interruption, raise_signals_as_interrupts
from agentrl.training import checkpoint
from agentrl.training.callbacks import Callback

TINY: dict[str, Any] = {
    "steps": 4,
    "rollout": {"tasks_per_step": 2, "group_size": 2, "max_tokens": 16},
    "eval": {"every": 0, "final_tasks": 2},
}


@pytest.fixture(autouse=True)
def _same_handlers_after() -> Iterator[None]:
    before = [signal.getsignal(s) for s in SIGNALS]
    yield
    assert before == [signal.getsignal(s) for s in SIGNALS]


class Sends(Callback):
    """Sends this process a signal at a step, and hears what is said."""

    def __init__(self, number: signal.Signals, at: int = 2) -> None:
        self.number, self.at = number, at
        self.by: list[str] = []
        self.heard: list[str] = []

    def on_step_end(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.at:
            os.kill(os.getpid(), self.number)

    def on_interrupt(self, by: str) -> None:
        self.by.append(by)

    def on_message(self, text: str) -> None:
        self.heard.append(text)


def in_a_running_loop(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """As in a notebook's kernel: a coroutine calls it, and no runner of asyncio's has taken SIGINT."""

    async def cell() -> dict[str, Any]:
        return work()

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(cell())
    finally:
        loop.close()


def under_asyncio_run(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    async def script() -> dict[str, Any]:
        return work()

    return asyncio.run(script())


@pytest.mark.parametrize(
    ("number", "word", "called"),
    [
        (signal.SIGTERM, "SIGTERM", lambda work: work()),
        pytest.param(signal.SIGHUP, "SIGHUP", lambda work: work(), marks=pytest.mark.slow),
        (signal.SIGINT, "Ctrl-C", in_a_running_loop),
        pytest.param(signal.SIGINT, "Ctrl-C", under_asyncio_run, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_returns_the_summary(
    number: signal.Signals, word: str, called: Callable[[Any], dict[str, Any]], tmp_path: Path
) -> None:
    callback = Sends(number)
    run = {"dir": str(tmp_path / "run"), "save_every": 0}
    summary = called(lambda: train("math-tools", callbacks=[callback], run=run, **TINY).summary)
    assert summary["interrupted"]
    assert summary["signal"] == number.name
    assert callback.by == [word]
    assert 2 <= summary["steps"] < 4
    assert summary["checkpoint"] == summary["steps"]
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    assert train("math-tools", run=run | {"resume": True}, **TINY).summary["steps"] == 4


class Hangs(Env):
    """A task's episode never ends from the fifth training episode on; the first such one sends a signal."""

    tools = ()
    played = 0

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.counts = (options or {}).get("split", "train") == "train"
        return "1 + 1?", {}

    async def step(self, action: Reply) -> Step:
        Hangs.played += self.counts
        if Hangs.played > 4:
            if Hangs.played == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            await anyio.sleep_forever()
        return Step("", float(Hangs.played % 2), True, False, {})


@pytest.mark.slow
@pytest.mark.parametrize("called", [lambda work: work(), in_a_running_loop])
def test_what_is_finished_is_saved_before_the_step_ends_and_a_second_signal_leaves_at_once(
    called: Callable[[Any], dict[str, Any]], tmp_path: Path
) -> None:
    Hangs.played = 0

    class Twice(Sends):
        def on_message(self, text: str) -> None:
            super().on_message(text)
            if text == "step 1 is saved":
                os.kill(os.getpid(), signal.SIGTERM)

    callback = Twice(signal.SIGTERM, at=0)

    def work() -> dict[str, Any]:
        return train(Hangs, callbacks=[callback], run={"dir": str(tmp_path / "run"), "save_every": 0}, **TINY).summary

    with pytest.raises(Interrupted) as left:
        called(work)
    assert left.value.signal == signal.SIGTERM
    found = checkpoint.load(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert found[0] == 1
    Hangs.played = -100
    summary = train(Hangs, run={"dir": str(tmp_path / "run"), "resume": True}, **TINY | {"steps": 2}).summary
    assert summary["steps"] == 2


def test_before_anything_is_trained_the_first_signal_leaves(tmp_path: Path) -> None:
    class Early(Callback):
        def on_phase_begin(self, name: str, episodes: int) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train("math-tools", callbacks=[Early()], run={"dir": str(tmp_path / "run")}, **TINY)
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.slow
def test_handlers_of_the_program_itself_stay_and_ignored_signals_stay_ignored(tmp_path: Path) -> None:
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does

    class Both(Callback):
        def on_step_end(self, step: int, values: Mapping[str, float]) -> None:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        summary = train(
            "math-tools", callbacks=[Both()], run={"dir": str(tmp_path / "run")}, **TINY | {"steps": 1}
        ).summary
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert not summary["interrupted"]
    assert came == [signal.SIGTERM]


def test_the_handler_that_ray_leaves_behind_is_not_the_programs_own(tmp_path: Path) -> None:
    def end(number: int, _: object) -> None:
        raise SystemExit(number)

    end.__module__ = "ray._private.worker"
    signal.signal(signal.SIGTERM, end)
    try:
        config = TINY | {"steps": 2}
        summary = train(
            "math-tools", callbacks=[Sends(signal.SIGTERM, at=1)], run={"dir": str(tmp_path / "run")}, **config
        ).summary
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert summary["signal"] == "SIGTERM"


async def test_work_is_cancelled_by_the_signal_and_otherwise_returns() -> None:
    stop = Interruption()
    assert await stop.run_unless_set(asyncio.sleep(0, "done")) == "done"
    stop.begun = True
    async with stop.cancel_on_signal():
        asyncio.get_running_loop().call_later(0.01, stop.receive, signal.SIGHUP)
        await stop.run_unless_set(anyio.sleep_forever())
    assert stop.signal is signal.SIGHUP


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_commands_take_them_for_ctrl_c(number: signal.Signals) -> None:
    with raise_signals_as_interrupts() as came, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    assert came == [number]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with raise_signals_as_interrupts(), pytest.raises(Interrupted):
            signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGINT, before)


def end(number: signal.Signals, folder: Path, begun: Callable[[], bool], *words: str) -> tuple[int, str]:
    """Send a signal to an agentrl of its own process once it has begun; return its exit status and what it said."""
    command = [sys.executable, "-m", "agentrl", *words]
    with subprocess.Popen(command, cwd=folder, stdout=PIPE, stderr=STDOUT, text=True) as process:
        while not begun() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(number)
        said, _ = process.communicate(timeout=120)
    return process.returncode, said


@pytest.mark.slow
def test_an_evaluation_that_is_terminated_keeps_its_chunks_and_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("eval", "--env", "math-tools", "--model", "nano", "--tasks", "4000", "--out", "out")
    status, said = end(signal.SIGTERM, tmp_path, lambda: any(out.glob("trajectories/*.parquet")), *words)
    assert status == 143, said
    assert "to resume: agentrl eval --resume out" in said
    assert "Traceback" not in said
    assert 0 < len(list(out.glob("trajectories/*.parquet"))) < 250
