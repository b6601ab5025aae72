"""A piece of work in a machine: it is watched until it ends, and what it writes is kept, up to a limit."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl_tools.sandbox.inside import machine_processes
else:  # by its file: this runs where the package is not
    sys.path.insert(0, str(Path(__file__).parent))
    import machine_processes

LOOK_S = 0.1  # between looks at the machine's memory
OPEN = 64  # outputs of earlier commands that are read on, so that what they left behind does not block
PART = 1 << 16
KILLED = (-signal.SIGKILL, -signal.SIGTERM)


@dataclass
class Output:
    """The head of what a process wrote, and how many bytes more there were."""

    limit: int
    head: bytearray = field(default_factory=bytearray)
    cut: int = 0

    def add(self, data: bytes) -> None:
        room = max(0, self.limit - len(self.head))
        self.head += data[:room]
        self.cut += max(0, len(data) - room)


@dataclass
class Ended:
    """``code`` is ``None`` where it took too long; ``note`` is what befell the machine."""

    code: int | None
    out: Output
    err: Output
    note: str = ""


class MachineCommands:
    """Work, one piece after another; between two of them everything in the machine is paused."""

    def __init__(self, processes: machine_processes.MachineProcesses) -> None:
        self.processes = processes
        self.selector = selectors.DefaultSelector()

    def run(self, work: Callable[[], None], timeout_s: float, limit: int) -> Ended:
        """Run a piece of work until it ends, or time or memory do.

        Args:
            limit: bytes of each of its outputs that are kept.
        """
        note = self._make_room()
        ended = Ended(None, Output(limit), Output(limit))
        out, err = self._open(ended.out), self._open(ended.err)
        deadline = time.monotonic() + timeout_s
        leader = self.processes.start(work, out, err)
        os.close(out)
        os.close(err)
        codes: dict[int, int] = {}
        looked = time.monotonic()
        with contextlib.ExitStack() as held:
            wait_s = self._watch(leader, held)
            while leader not in codes:
                self._read(min(wait_s, max(0.0, deadline - time.monotonic())))
                codes |= self.processes.reap()
                now = time.monotonic()
                if leader not in codes and now >= deadline:
                    machine_processes.end_session(leader)
                    ended.note = note
                    self._forget(ended)
                    self.processes.reap()
                    return ended
                if now - looked >= LOOK_S:
                    looked = now
                    if self._is_over_memory():
                        codes |= self.processes.end_all()
                        size = self.processes.memory >> 20
                        note += f"[over {size} MB of memory: all processes of the machine were ended]\n"
        ended.code = codes[leader]
        self._read(0.0)
        if ended.code in KILLED:
            note += self._end_rest()
        self._forget(ended)
        ended.note = note
        return ended

    def _make_room(self) -> str:
        """End what was left behind where there would be no room to start anything."""
        threads, _ = self.processes.survey()
        if threads < self.processes.most - 16:
            return ""
        self.processes.end_all()
        return f"[{threads} processes were left behind, and were ended]\n"

    def _end_rest(self) -> str:
        """End what runs on where work was killed: it may be what kills all that comes."""
        if not self.processes.survey()[0]:
            return ""
        self.processes.end_all()
        return "[killed, and all processes of the machine with it]\n"

    def _is_over_memory(self) -> bool:
        """Return whether all processes together have more memory than one may have."""
        _, memory = self.processes.survey()
        return memory > self.processes.memory

    def _open(self, output: Output) -> int:
        """Open a pipe into an output, and return its end to write to."""
        for key in list(self.selector.get_map().values())[: -OPEN or None]:
            self._close(key.fd)
        out, into = os.pipe()
        os.set_blocking(out, False)
        self.selector.register(out, selectors.EVENT_READ, output)
        return into

    def _watch(self, leader: int, held: contextlib.ExitStack) -> float:
        """Wake up when a process ends, if this kernel can; return how long to sleep otherwise."""
        try:
            descriptor = os.pidfd_open(leader)
        except (OSError, AttributeError):
            return 0.005
        held.callback(self._close, descriptor)
        self.selector.register(descriptor, selectors.EVENT_READ, None)
        return LOOK_S

    def _read(self, wait_s: float) -> None:
        for key, _ in self.selector.select(wait_s):
            for _ in range(64 if key.data is not None else 0):  # then the clock is looked at
                try:
                    data = os.read(key.fd, PART)
                except BlockingIOError:
                    break
                if not data:
                    self._close(key.fd)
                    break
                key.data.add(data)

    def _forget(self, ended: Ended) -> None:
        """Keep nothing more of what is written to these outputs."""
        for output in (ended.out, ended.err):
            for key in list(self.selector.get_map().values()):
                if key.data is output:
                    self.selector.modify(key.fd, selectors.EVENT_READ, Output(0))

    def _close(self, descriptor: int) -> None:
        self.selector.unregister(descriptor)
        os.close(descriptor)
