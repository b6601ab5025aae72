"""A process that waits until another one is gone, however it went, and then ends what that one had started.

An MCP server need not end when its pipes are closed, and may have children of its own. All of them are known by a
variable in their environment, which children inherit. The reaper is one process, started with the first server; it runs
this file alone: ``python -I -S reaper.py MARK PARENT``.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import sys
import time

VARIABLE = "AGENTRL_STARTED_BY"
GRACE_S = 2.0  # between SIGTERM and SIGKILL
_marks: dict[int, str] = {}  # by process: a fork has a reaper of its own


def start_reaper() -> dict[str, str]:
    """Return the variable by which this process's reaper, which is started here, knows what is to end with it."""
    if os.getpid() not in _marks:
        _marks[os.getpid()] = secrets.token_hex(8)
        command = [sys.executable, "-I", "-S", "-B", __file__, _marks[os.getpid()], str(os.getpid())]
        null = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in range(3)]
        os.posix_spawn(sys.executable, command, {}, file_actions=null)
    return {VARIABLE: _marks[os.getpid()]}


def find_marked(word: str) -> list[int]:
    """Return the processes of this user that have the mark; none where there is no /proc."""
    entry = f"{VARIABLE}={word}".encode()
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if entry in file.read().split(b"\0"):
                    found.append(int(name))
        except (OSError, ValueError):  # gone, another user's, or no process
            continue
    return found


def _wait_for_parent(parent: int) -> None:
    """Return when the process that started this one is gone, which it may be already."""
    if hasattr(os, "pidfd_open") and os.getppid() == parent:
        try:
            descriptor = os.pidfd_open(parent)
        except ProcessLookupError:
            return
        except OSError:  # an old kernel
            descriptor = -1
        if descriptor >= 0 and os.getppid() == parent:
            select.select([descriptor], [], [])
    while os.getppid() == parent:
        time.sleep(0.5)


def _reap(word: str) -> None:
    """End the marked processes: politely, then not."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 1.0)):
        for pid in find_marked(word):
            try:
                os.kill(pid, number)
            except OSError:
                continue
        deadline = time.monotonic() + patience_s
        while find_marked(word) and time.monotonic() < deadline:
            time.sleep(0.1)


def _main() -> None:
    os.setsid()  # a terminal's Ctrl-C is not for this one
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _wait_for_parent(int(sys.argv[2]))
    _reap(sys.argv[1])


if __name__ == "__main__":
    _main()
