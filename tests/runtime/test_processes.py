"""Functions in other processes: begun from scripts of any kind, ended with their caller, and kept otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl import ContractError, InfraError, UserError
from agentrl.runtime.processes import WorkerDied, call_in_process
from tests.helpers.processes import wait_for_end

SCRIPT = """
import anyio, os
from agentrl.runtime.processes import call_in_process

open("ran.txt", "a").write("once ")
print(anyio.run(call_in_process, os.getpid) != os.getpid())
"""
REWARDED = """
from agentrl import train

open("ran.txt", "a").write("once ")
rows = [{"prompt": f"{i}", "solution": "$\\\\frac{1}{2}$"} for i in range(20)]
small = {"tasks_per_step": 1, "group_size": 2, "max_tokens": 8}
try:
    train("prompts", env_args={"data": rows, "rewards": ["math"]}, steps=1, rollout=small,
          eval={"every": 0, "final_tasks": 1}, run={"dir": "run"})
except BaseException as error:
    print(type(error).__name__, error)
    raise
print("trained")
"""


def run_script(folder: Path, *arguments: str, given: str = "") -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, input=given, capture_output=True, text=True, timeout=240, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("way", ["file", "module", "stdin", "string"])
def test_a_script_without_a_main_guard_is_run_once_however_it_is_started(tmp_path: Path, way: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = {"file": ["script.py"], "module": ["-m", "script"], "stdin": ["-"], "string": ["-c", SCRIPT]}[way]
    said = run_script(tmp_path, *arguments, given=SCRIPT if way == "stdin" else "")
    assert said == "True\n"
    assert (tmp_path / "ran.txt").read_text() == "once "


@pytest.mark.slow
@pytest.mark.parametrize("way", ["file", "stdin"])
def test_a_training_with_the_reward_math_needs_no_main_guard(tmp_path: Path, way: str) -> None:
    (tmp_path / "script.py").write_text(REWARDED)
    said = run_script(tmp_path, "script.py" if way == "file" else "-", given=REWARDED if way == "stdin" else "")
    assert "trained" in said
    assert (tmp_path / "ran.txt").read_text() == "once "


async def test_a_call_returns_and_raises_as_it_would_here() -> None:
    assert await call_in_process(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await call_in_process(divmod, 1, 0)
    with pytest.raises(UserError, match="told in a sentence"):
        await call_in_process(fail, UserError("told in a sentence"))
    with pytest.raises(InfraError, match="down") as fault:
        await call_in_process(fail, InfraError("server_down", "down"))
    assert fault.value.kind == "server_down"
    with pytest.raises(RuntimeError, match="Picky: two, words"):
        await call_in_process(fail_pickily)


class Picky(Exception):
    """Cannot be made again from its arguments, as pickle does."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one}, {two}")


def fail_pickily() -> None:
    raise Picky("two", "words")


def fail(error: Exception) -> None:
    raise error


async def test_a_worker_is_kept_for_the_next_call_also_in_another_event_loop() -> None:
    first = await call_in_process(os.getpid)
    assert await call_in_process(os.getpid) == first
    assert await anyio.to_thread.run_sync(anyio.run, call_in_process, os.getpid) == first


async def test_a_cancelled_call_kills_its_worker() -> None:
    worker = await call_in_process(os.getpid)
    with anyio.move_on_after(0.3) as scope:
        await call_in_process(time.sleep, 600)
    assert scope.cancelled_caught
    await anyio.to_thread.run_sync(wait_for_end, worker)
    assert await call_in_process(os.getpid) != worker


async def test_limits_of_time_of_processor_time_and_of_memory() -> None:
    with pytest.raises(TimeoutError):
        await call_in_process(time.sleep, 600, timeout_s=0.2)
    with pytest.raises(WorkerDied, match=rf"exit status -{int(signal.SIGXCPU)}"):
        await call_in_process(spin, cpu_s=1.0)
    await call_in_process(time.sleep, 1.2, cpu_s=1.0)  # waiting takes no processor time
    with pytest.raises(MemoryError):
        await call_in_process(bytearray, 1 << 32, memory_bytes=1 << 28)
    assert await call_in_process(len, b"and it goes on", memory_bytes=1 << 28) == 14


def spin() -> None:
    while True:
        pass


async def test_a_worker_that_dies_is_told_and_replaced() -> None:
    with pytest.raises(WorkerDied, match="exit status 3 before it answered"):
        await call_in_process(os._exit, 3)
    assert await call_in_process(len, "abc") == 3


async def test_what_a_function_prints_or_reads_does_not_disturb_the_answers() -> None:
    assert await call_in_process(os.write, 1, b"noise") == 5
    assert await call_in_process(os.read, 0, 10) == b""
    assert await call_in_process(len, "x" * 3_000_000) == 3_000_000


async def test_the_workers_folder_is_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert await call_in_process(os.getcwd) == str(tmp_path)


async def test_what_is_defined_in_the_script_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fail, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "fail", fail, raising=False)
    with pytest.raises(ContractError, match=r"function 'fail' cannot be called .* 'fail' is defined in the script"):
        await call_in_process(fail, ValueError())
    assert await call_in_process(len, "__main__") == 8


async def test_what_cannot_be_pickled_or_imported_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ContractError, match="cannot be called in a worker process"):
        await call_in_process(lambda: None)
    made: Any = type(sys)("nowhere_to_be_found")
    made.fail = fail
    monkeypatch.setitem(sys.modules, "nowhere_to_be_found", made)
    monkeypatch.setattr(fail, "__module__", "nowhere_to_be_found")
    with pytest.raises(ContractError, match=r"function 'fail' cannot be called .* No module named 'nowhere_to_be"):
        await call_in_process(fail, ValueError())


def test_workers_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import anyio, os, time\nfrom agentrl.runtime.processes import call_in_process\n"
        "async def main():\n    print(await call_in_process(os.getpid), flush=True)\n"
        "    await call_in_process(time.sleep, 600)\nanyio.run(main)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        worker = int(started.stdout.readline())
        started.kill()
    wait_for_end(worker)
