"""Runs that are ended, or run out of room, or lose their reader: nothing finished is lost, every sentence is true.

Each is a process of its own, ``agentrl train --deterministic true``, disturbed at a step, gone on with by the very
command that its last lines name, and compared with a run that nobody disturbed, as `kills` does.

  SIGINT, SIGTERM, SIGHUP   the exit status is 128 + n; the last lines name the command that goes on
  kernel                    SIGINT to a notebook's cell, in a loop that runs already: train() returns its summary
  EPIPE                     the reader of stdout leaves after the first line: the run ends as if it had not
  terminal                  the pseudo-terminal is closed: SIGHUP, and EIO at each further word
  ENOSPC waits              the disk is full before the first checkpoint; there is room again: as if nothing had been
  ENOSPC signal             the same, and SIGTERM twice: no checkpoint is claimed, nor a command that would not work
  ENOSPC later              the disk is full after a checkpoint, and SIGTERM twice: the one named is gone on with
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 600.0
CELL = """
import asyncio, json, sys
from agentrl import train
from agentrl.settings.loader import read_overrides

source, given = read_overrides(sys.argv[1:])
settings = {k: v for k, v in given.items() if k != "env"}

async def cell():
    return train(given["env"]["name"], **settings).summary

summary = asyncio.new_event_loop().run_until_complete(cell())
print("summary", json.dumps([summary["interrupted"], summary["signal"]]), flush=True)
"""


@dataclass
class Attempt:
    """A run as a process whose output is read as it comes."""

    process: subprocess.Popen[bytes]
    output: int  # file descriptor
    text: str = ""

    def read_until(self, pattern: str) -> None:
        """Raise AssertionError if the output ends, or a long time passes, before it has ``pattern``."""
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, f"no {pattern!r} in:\n{self.text}"
            assert self._more(), f"ended without {pattern!r}:\n{self.text}"

    def end(self) -> int:
        """Return the exit status."""
        while self._more():
            pass
        return self.process.wait(PATIENCE_S)

    def _more(self) -> bool:
        data = b""
        with suppress(OSError):  # EIO: the other side of a terminal is closed
            data = os.read(self.output, 1 << 16)
        self.text += data.decode(errors="replace")
        return bool(data)


def start(command: list[str], environment: dict[str, str]) -> Attempt:
    def heed() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)

    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, preexec_fn=heed
    )
    assert process.stdout is not None
    return Attempt(process, process.stdout.fileno())


@dataclass
class Endings:
    """The same run, disturbed in each way. A method returns nothing, and raises AssertionError for what is not so."""

    words: list[str]  # of ``agentrl train``
    place: Path
    environment: dict[str, str]

    def command(self, folder: Path) -> list[str]:
        return [sys.executable, "-m", "agentrl", "train", *self.words, "--run.dir", str(folder)]

    def resume(self, attempt: Attempt) -> None:
        """Run the command that the last lines name."""
        named = re.findall(r"resume\s+agentrl (train --resume \S+)", attempt.text.replace("\r", ""))
        assert named, f"no command to go on with:\n{attempt.text}"
        again = start([sys.executable, "-m", "agentrl", *shlex.split(named[-1])], self.environment)
        assert again.end() == 0, again.text
        assert "going on after step" in again.text, again.text

    def by_signal(self, number: signal.Signals, folder: Path) -> None:
        attempt = start(self.command(folder), self.environment)
        attempt.read_until(r"step 3/")
        attempt.process.send_signal(number)
        status = attempt.end()
        assert status == 128 + number, f"status {status}:\n{attempt.text}"
        assert "finishing this step, then saving" in attempt.text, attempt.text
        self.resume(attempt)

    def by_kernel(self, folder: Path) -> None:
        words = [*self.words, "--run.dir", str(folder)]
        attempt = start([sys.executable, "-c", CELL, *words], self.environment)
        attempt.read_until(r"step 3/")
        attempt.process.send_signal(signal.SIGINT)
        assert attempt.end() == 0, attempt.text
        assert 'summary [true, "SIGINT"]' in attempt.text, attempt.text
        attempt.text += f"resume agentrl train --resume {folder}\n"
        self.resume(attempt)

    def by_pipe(self, folder: Path) -> None:
        attempt = start(self.command(folder), self.environment)
        attempt.read_until("\n")
        assert attempt.process.stdout is not None
        attempt.process.stdout.close()
        assert attempt.process.wait(PATIENCE_S) == 0

    def by_terminal(self, folder: Path) -> None:
        pid, output = pty.fork()
        if not pid:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            command = self.command(folder)
            os.execve(command[0], command, self.environment)
        text, deadline = "", time.monotonic() + PATIENCE_S
        while _steps(folder) < 3:
            assert time.monotonic() < deadline, text
            text += os.read(output, 1 << 16).decode(errors="replace")
        os.close(output)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == 128 + signal.SIGHUP, f"status {status}:\n{text}"
        again = start([sys.executable, "-m", "agentrl", "train", "--resume", str(folder)], self.environment)
        assert again.end() == 0, again.text

    def by_room(self, folder: Path, step: int, *, leaves: bool) -> None:
        """The disk is full after a step. ``leaves``: then come two signals; otherwise there is room again."""
        attempt = start(self.command(folder), self.environment)
        attempt.read_until(f"step {step}/")
        ballast = folder.parent / "ballast"
        fill(ballast)
        attempt.read_until("not written: No space left on device; trying again")
        if leaves:
            attempt.process.send_signal(signal.SIGTERM)
            attempt.read_until("the model is not written: No space left on device; trying again")
            attempt.process.send_signal(signal.SIGTERM)
            status = attempt.end()
            assert status == 128 + signal.SIGTERM, f"status {status}:\n{attempt.text}"
        ballast.unlink()
        if not leaves:
            assert attempt.end() == 0, attempt.text
        elif step < 2:
            assert "there is none yet" in attempt.text, attempt.text
            assert "--resume" not in attempt.text, attempt.text
            again = start([*self.command(folder), "--run.resume", "true"], self.environment)
            assert again.end() == 0, again.text
        else:
            assert "that of step 2 is whole" in attempt.text, attempt.text
            self.resume(attempt)

    def all(self) -> Iterator[tuple[str, Callable[[Path], None]]]:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            yield number.name, lambda folder, number=number: self.by_signal(number, folder)
        yield "kernel", self.by_kernel
        yield "EPIPE", self.by_pipe
        yield "terminal", self.by_terminal
        yield "ENOSPC waits", lambda folder: self.by_room(folder, 1, leaves=False)
        yield "ENOSPC signal", lambda folder: self.by_room(folder, 1, leaves=True)
        yield "ENOSPC later", lambda folder: self.by_room(folder, 3, leaves=True)

    def run(self, name: str, act: Callable[[Path], None], differences: Callable[[Path], list[str]]) -> str:
        """Return what was not as it should be; ``as if never disturbed`` if nothing was."""
        with disk(self.place / name.replace(" ", "-"), name) as place:
            if place is None:
                return "not tried: it needs the right to mount"
            try:
                act(place / "run")
            except AssertionError as error:
                return str(error)
            return "; ".join(differences(place / "run")) or "as if never disturbed"


@contextmanager
def disk(place: Path, name: str) -> Iterator[Path | None]:
    """Make a folder; on a small disk of its own for what fills it, None where that cannot be had."""
    place.mkdir()
    if not name.startswith("ENOSPC"):
        yield place
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=60m", "none", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(ballast: Path) -> None:
    """Leave no byte of the disk, nor of the last pages of files that grow."""
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _steps(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(re.findall(r'"grad_norm"', file.read_text())) if file.exists() else 0
