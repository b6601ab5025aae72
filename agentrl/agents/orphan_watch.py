"""A watch on the commands that a process starts: where it is killed itself, they are too, with all that they started.

The other side is a small process: a pipe says to it which process groups there are, ``+12`` and ``-12`` in lines, and
ends with whoever holds it, whatever ended that one. It imports the standard library alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress


class OrphanWatch:
    """A process that outlives this one for as long as it takes to kill the groups that are left.

    Args:
        grace_s: they have so long to end by themselves.
    """

    def __init__(self, grace_s: float = 0.0) -> None:
        command = [sys.executable, "-I", "-S", __file__, str(grace_s)]
        self._process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, start_new_session=True)

    @contextmanager
    def watch(self, group: int) -> Iterator[None]:
        """Watch a process group during the block."""
        self.begin(group)
        try:
            yield
        finally:
            self.forget(group)

    def begin(self, group: int) -> None:
        """Watch a process group."""
        self._say(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Watch a process group no more."""
        self._say(f"-{group}\n")

    def close(self) -> None:
        """End the watch, and those that it still watches."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # somebody has killed it, or it is closed
            self._process.stdin.write(line.encode())


def kill_left(lines: Iterable[bytes], grace_s: float = 0.0) -> None:
    """Kill the process groups that are named and have not ended when the lines do."""
    groups = set[int]()
    for line in lines:
        if line.startswith(b"+"):
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    if groups:
        time.sleep(grace_s)
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    kill_left(sys.stdin.buffer, float(sys.argv[1]))
