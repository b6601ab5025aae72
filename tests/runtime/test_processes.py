"""Functions in other processes: begun from scripts of any kind, ended with their caller, and kept otherwise."""

from __future__ import annotations

import builtins
import json
import os
import pickle
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl import ContractError, InfraError, ToolError, UserError, errors
from agentrl.runtime import processes
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
        await call_in_process(fail, "UserError", "told in a sentence")
    with pytest.raises(InfraError, match="down") as fault:
        await call_in_process(fail, "InfraError", "server_down", "down", True)
    assert (fault.value.kind, fault.value.provoked) == ("server_down", True)
    with pytest.raises(InfraError, match="not me") as bought:  # which would cost an episode nothing
        await call_in_process(fail, "InfraError", "a/b \x1b[31m", "not me", False)
    assert (bought.value.kind, bought.value.provoked) == ("worker_fault", None)
    with pytest.raises(ToolError, match="no") as odd:
        await call_in_process(fail, "ToolError", "no", "a kind of its own")
    assert odd.value.kind == "tool"
    with pytest.raises(ToolError, match="no") as refusal:
        await call_in_process(fail, "ToolError", "no", "arguments")
    assert refusal.value.kind == "arguments"
    with pytest.raises(KeyError) as missing:
        await call_in_process(fail, "KeyError", "rows")
    assert missing.value.args == ("rows",)
    with pytest.raises(RuntimeError, match=r"^Picky: two, words$"):
        await call_in_process(fail, "Picky", "two", "words")
    with pytest.raises(LookupError, match=r"^Nowhere: here$"):
        await call_in_process(fail, "Nowhere", "here")
    with pytest.raises(RuntimeError, match=r"^SystemExit: 3$"):  # which would end the caller
        await call_in_process(sys.exit, 3)


class Picky(Exception):
    """Of nobody's but this file."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one}, {two}")


class Nowhere(LookupError):
    """Is a LookupError for whoever does not know it."""


def fail(name: str, *arguments: Any) -> None:
    error: Any = globals().get(name) or getattr(errors, name, None) or getattr(builtins, name)
    raise error(*arguments)


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
        await call_in_process(fail, "ValueError")
    assert await call_in_process(len, "__main__") == 8


async def test_what_cannot_be_named_or_imported_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (lambda: None, partial(len), "".join, Path.cwd):
        with pytest.raises(ContractError, match=r"cannot be called in a worker process: .* define it there with def"):
            await call_in_process(function)
    made: Any = type(sys)("nowhere_to_be_found")
    made.fail = fail
    monkeypatch.setitem(sys.modules, "nowhere_to_be_found", made)
    monkeypatch.setattr(fail, "__module__", "nowhere_to_be_found")
    with pytest.raises(ContractError, match=r"'nowhere_to_be_found:fail' cannot be called .* No module named 'nowhere"):
        await call_in_process(fail, "ValueError")


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


async def test_what_is_no_plain_data_is_refused_in_a_sentence() -> None:
    with pytest.raises(ContractError, match=r"'builtins:len' .*: its arguments hold a .*Path, which is no plain data"):
        await call_in_process(len, [Path()])
    with pytest.raises(ContractError, match=r"'_io:BytesIO' returned a _io.BytesIO, which cannot leave a worker"):
        await call_in_process("_io:BytesIO")
    assert await call_in_process(len, "abc") == 3


class Touch:
    """Touches a file as it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("touched"),)


def forge(content: bytes, letter: bytes = b"D", length: int | None = None) -> None:
    """Answer in the worker's place, as whoever took it over would."""
    frame = letter + (len(content) if length is None else length).to_bytes(8, "big") + content
    for number in range(3, 64):
        with suppress(OSError):
            if stat.S_ISFIFO(os.fstat(number).st_mode):
                os.write(number, frame)
    os._exit(0)


@pytest.mark.parametrize(
    ("letter", "content", "length"),
    [
        (b"D", pickle.dumps(Touch()), None),
        (b"D", b"[" * 100_000, None),
        (b"D", b"9" * 50_000, None),
        (b"D", b'{"~": "set", "of": [' + b",".join(b"%d" % (n * (2**61 - 1)) for n in range(20_000)) + b"]}", None),
        (b"D", b'{"~": "dict", "of": [[[], 1]]}', None),
        (b"D", b'{"~": "Path", "of": ["/"]}', None),
        (b"D", b"1", 1 << 62),
        (b"D", b"\xff", None),
        (b"Z", b"1", None),
        (b"X", b"[]", None),
    ],
)
async def test_a_worker_that_was_taken_over_gives_a_wrong_answer_at_most(
    letter: bytes, content: bytes, length: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkerDied):
        await call_in_process(forge, content, letter, length)
    assert os.listdir() == []
    assert await call_in_process(len, "abc") == 3


@pytest.mark.parametrize("name", ["Path", "SystemExit", "KeyboardInterrupt", "eval", "", "Interrupted"])
async def test_a_forged_exception_is_an_exception_of_ours_or_a_runtime_error(name: str) -> None:
    content = json.dumps({"class": name, "text": "words", "arguments": ["1", 2]}).encode()
    processes._close_idle()  # the one before may be about to end
    with pytest.raises(RuntimeError, match="words"):
        await call_in_process(forge, content, b"X")
    processes._close_idle()


async def test_a_worker_that_says_more_than_was_asked_is_replaced() -> None:
    def linger() -> list[int]:
        return [worker.process.pid for worker in processes._idle]

    processes._close_idle()
    assert await call_in_process(answer_twice) == "mine"
    (liar,) = linger()
    said = processes._idle[0].process.stdout
    assert said is not None
    assert await anyio.to_thread.run_sync(lambda: select.select([said], [], [], 60)[0]) == [said]
    assert await call_in_process(os.getpid) != liar
    assert liar not in linger()


def answer_twice() -> str:
    """Answer as is right, and once more a little later, for whoever asks next."""

    def say() -> None:
        time.sleep(0.2)
        for number in range(3, 64):
            with suppress(OSError):
                if stat.S_ISFIFO(os.fstat(number).st_mode):
                    os.write(number, b"D" + len(b"666").to_bytes(8, "big") + b"666")

    threading.Thread(target=say, daemon=True).start()
    return "mine"


async def test_a_worker_that_reads_what_others_wrote_blames_nobody_and_serves_no_other_calls() -> None:
    with pytest.raises(WorkerDied, match="raised ContractError: you are wrong"):
        await call_in_process(fail, "ContractError", "you are wrong", reads_others=True)
    with pytest.raises(ContractError, match="cannot be called in a worker process: ModuleNotFoundError"):
        await call_in_process("no_such_module:f", reads_others=True)
    assert await call_in_process(os.getpid, reads_others=True) != await call_in_process(os.getpid)
