"""A process of a run on this machine: started, read, signalled, and ended with all that it has started.

A launcher has one wherever it places something: in the process of the command itself, or in a task of a cluster.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from agentrl.runtime.parent_watch import OWNER

POLL_S = 1.0
_KEPT = 1 << 20  # bytes that nobody has read yet
_END_S = 5.0


class ChildProcess:
    """``python -m agentrl ARGUMENTS`` on this machine; it can be started again once it has ended.

    Every method may be called from a thread of its own.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._written = {"out": bytearray(), "err": bytearray()}
        self._readers: list[threading.Thread] = []
        self._news = threading.Condition()

    def reserve_port(self) -> int:
        """Return a port of this machine that nothing listens on."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: str | None = None,
        *,
        inherits: bool = False,
    ) -> str:
        """Start it; return why that cannot be, if so.

        Args:
            folder: that it runs in; this process's own by default.
            inherits: it writes where this process does, and there is nothing to `poll` but its end.
        """
        pipe = None if inherits else subprocess.PIPE
        variables = {**os.environ, **environment, OWNER: str(os.getpid())}
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "agentrl", *arguments],
                env=variables,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,  # a terminal's Ctrl-C is for the command, which passes it on
            )
        except OSError as error:
            return f"{error.strerror or error}: {error.filename}"
        self._process = process
        pairs = (("out", process.stdout), ("err", process.stderr))
        self._readers = [threading.Thread(target=self._read, args=(name, f), daemon=True) for name, f in pairs if f]
        for reader in self._readers:
            reader.start()
        return ""

    def poll(self) -> tuple[bytes, bytes, int | None]:
        """Wait for news, at most `POLL_S`; return what it wrote to stdout and to stderr since, and its exit status."""
        assert self._process is not None
        with self._news:
            if not any(self._written.values()) and self._process.poll() is None:
                self._news.wait(POLL_S)
            status = self._process.poll()
        if status is not None:
            for reader in self._readers:  # what is left of it; a child of its own may hold the pipe
                reader.join(POLL_S)
        with self._news:
            out, err = (bytes(part) for part in self._written.values())
            for part in self._written.values():
                part.clear()
        return out, err, status

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, and all that it has started in its session."""
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def _read(self, name: str, pipe: IO[bytes]) -> None:
        with pipe:
            while part := os.read(pipe.fileno(), 1 << 16):
                with self._news:
                    self._written[name] += part
                    del self._written[name][:-_KEPT]
                    self._news.notify_all()
        with self._news:
            self._news.notify_all()
