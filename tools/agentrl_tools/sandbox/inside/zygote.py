"""The zygote: it imports what sessions shall find imported, and forks them. It sees no request, and knows no session.

Messages, by a socket of packets. From the dispatcher:

    F USER NAME + two descriptors   fork a session: its control socket, and the pipe for its output
    W PID                           it is about to end: wait for it
    K PID                           kill it, and wait for it
    L PID                           after W: kill it, if it has not ended

To the dispatcher: ``P PID`` (forked; 0: it could not be), ``X PID STATUS`` (it has ended).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl_tools.sandbox.inside import confinement, descriptors, huge_pages
    from agentrl_tools.sandbox.inside import session as sessions
    from agentrl_tools.sandbox.inside.walls import Walls
else:  # by its file: this runs where the package is not
    sys.path.insert(0, str(Path(__file__).parent))
    import confinement
    import descriptors
    import huge_pages
    import session as sessions
    from walls import Walls

NO_USER = 0xFFFFFFFF


class Zygote:
    """Forks sessions on request, and waits for those that end."""

    def __init__(self, requests: socket.socket, walls: Walls) -> None:
        self.requests, self.walls = requests, walls
        self.ending: dict[int, int] = {}  # processes that are awaited, by a descriptor of each
        self.poll = select.poll()
        self.poll.register(requests, select.POLLIN)

    def run(self) -> None:
        """Serve until the dispatcher is gone."""
        while True:
            for descriptor, _ in self.poll.poll():
                if descriptor in self.ending:
                    self.poll.unregister(descriptor)
                    os.close(descriptor)
                    self._reap(self.ending.pop(descriptor))
                elif not self._answer():
                    return

    def _answer(self) -> bool:
        message, passed, _, _ = socket.recv_fds(self.requests, 256, 2)
        if not message:
            return False
        kind, number = struct.unpack_from("=cI", message)
        if kind == b"F":
            self._fork(number, message[5:].decode(), *passed)
        elif kind == b"K" or number in self.ending.values():
            os.kill(number, signal.SIGKILL)  # nobody has waited for it, so it is still who it was
        if kind in (b"K", b"W"):
            self._await(number)
        return True

    def _fork(self, user: int, name: str, control: int, output: int) -> None:
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid == 0:
            self._begin(None if user == NO_USER else user, name, control, output)
        os.close(control)
        os.close(output)
        self.requests.send(struct.pack("=cI", b"P", max(pid, 0)))

    def _begin(self, user: int | None, name: str, control: int, output: int) -> None:
        """Be a session; it does not return."""
        try:
            nothing = os.open(os.devnull, os.O_RDONLY)  # its own: the flags of one that is shared can be set
            descriptors.put_in_place(nothing, control, output)
            self.walls.enter(user, name)
            descriptors.close_others()
            os.write(descriptors.CONTROL, sessions.STARTED)
            sessions.serve(descriptors.CONTROL)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(descriptors.CONTROL, str(error).encode()[:2000])
        finally:
            os._exit(1)

    def _await(self, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # no descriptor is left
            self._reap(pid)
            return
        self.ending[descriptor] = pid
        self.poll.register(descriptor, select.POLLIN)

    def _reap(self, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        self.requests.send(struct.pack("=cIi", b"X", pid, os.waitstatus_to_exitcode(status)))


def import_packages(names: Sequence[str]) -> None:
    """Import packages, where they are installed, and lay what they made so that a fork costs least."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    huge_pages.collapse()
    gc.freeze()


def build_walls(settings: dict[str, Any], proc: int | None) -> tuple[Walls, str]:
    """Find the best walls that stand here, by trying them in a fork. Return them, and what is wrong or ``""``."""
    if proc is not None:
        proc = descriptors.move_up(proc)
    version = min(confinement.get_landlock_version(), settings["landlock_abi"])
    if settings["needs_landlock"] and not version:
        return Walls(settings, proc, 0), "this kernel has no landlock"
    for tmpfs in (True, False) if settings["tmpfs"] else (False,):
        walls = Walls(settings, proc, version, tmpfs)
        walls.prepare()
        if not (trouble := _try(walls)):
            return walls, ""
    return walls, trouble


def _work() -> None:
    """Read the library and write a file, as any code will. Raises OSError if that cannot be done here."""
    try:
        with open(os.__file__, "rb") as file:
            file.read(1)
    except OSError:
        raise OSError(f"user {os.getuid()} cannot read {os.__file__}") from None
    with open("trial", "w") as file:
        file.write("x")
    os.unlink("trial")


def _try(walls: Walls) -> str:
    """Put a fork behind the walls and let it look whether it can work there. Return what it says."""
    answers, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            users = walls.settings["users"]
            walls.enter(users[0] if users else None, "trial")
            _work()
        except BaseException as error:
            os.write(into, str(error).encode()[:2000] or type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(into)
    os.waitpid(pid, 0)
    with os.fdopen(answers, "rb") as file:
        return file.read().decode(errors="replace")
