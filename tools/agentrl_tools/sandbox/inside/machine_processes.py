"""The processes of a machine, as its first process starts, counts, pauses and ends them.

The first process of a process namespace hears no signal from within that it has no handler for, STOP and KILL neither.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from agentrl_tools.sandbox.inside import confinement, machine_disk
else:  # by its file: this runs where the package is not
    sys.path.insert(0, str(Path(__file__).parent))
    import confinement
    import machine_disk

MEGABYTE = 1 << 20
CAPABILITIES = 1 << 5 | 1 << 6 | 1 << 7  # KILL, SETGID, SETUID: as root, to be the machine's user, and above it


class MachineProcesses:
    """The processes of this namespace: how they are started, with which limits, and who they are."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.user: int | None = settings["user"]
        self.memory: int = settings["memory_mb"] * MEGABYTE
        self.most: int = settings["processes"]
        self.filters = [base64.b64decode(bpf) for bpf in settings["filters"]]
        self.limits = confinement.build_limits(
            AS=self.memory,
            CPU=settings["cpu_s"],
            FSIZE=settings["disk_mb"] * MEGABYTE,
            NPROC=self.most,
            NOFILE=256,
            CORE=0,
            MEMLOCK=0,
            MSGQUEUE=0,
            SIGPENDING=256,
        )

    def start(self, work: Callable[[], None], out: int, err: int) -> int:
        """Start a process that does a piece of work and ends, and return its number.

        It has nothing to read, writes to ``out`` and ``err``, and is the leader of a session.
        """
        pid = os.fork()
        if pid == 0:
            self._run(work, out, err)
        return pid

    def _run(self, work: Callable[[], None], out: int, err: int) -> NoReturn:
        try:
            os.setsid()
            os.dup2(out, 1)
            os.dup2(err, 2)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.closerange(3, 4096)
            for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            confinement.set_limits(self.limits)
            if self.user is not None:
                confinement.switch_user(self.user)
            confinement.drop_privileges()
            os.chdir(machine_disk.HOME if os.path.isdir(machine_disk.HOME) else "/home")
            for bpf in self.filters:
                confinement.load_seccomp_filter(bpf)
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{error}\n".encode("utf-8", "replace"))
        finally:
            os._exit(126)

    def survey(self) -> tuple[int, int]:
        """Return how many threads there are beside this process, and the bytes of memory of their own."""
        threads = memory = 0
        for name in os.listdir("/proc"):
            if not name.isdecimal() or name == str(os.getpid()):
                continue
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/status", "rb") as file:
                for line in file:
                    key, _, value = line.partition(b":")
                    if key == b"Threads":
                        threads += int(value)
                    elif key in (b"RssAnon", b"RssShmem"):
                        memory += int(value.split()[0]) << 10
        return threads, memory

    def signal_all(self, number: int) -> None:
        """Send all others a signal; twice, as one of them may just be starting another."""
        for _ in range(2):
            with contextlib.suppress(OSError):
                os.kill(-1, number)

    def reap(self) -> dict[int, int]:
        """Collect who has ended: number and exit code, negative for a signal."""
        ended: dict[int, int] = {}
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended[found[0]] = os.waitstatus_to_exitcode(found[1])
        return ended

    def end_all(self) -> dict[int, int]:
        """End all others, whatever they start meanwhile. Return who has ended, as `reap` does."""
        ended: dict[int, int] = {}
        for _ in range(1000):
            try:
                os.kill(-1, signal.SIGKILL)
            except OSError as error:
                if error.errno == errno.ESRCH:
                    break
            ended |= self.reap()
            time.sleep(0.001)
        return ended


def end_session(leader: int) -> None:
    """End a process, and those of its session that made no session of their own."""
    for _ in range(100):
        try:
            os.killpg(leader, signal.SIGKILL)
        except OSError:
            return
