"""Workers for what strangers wrote: a file is unpacked, a template rendered, in a process with little memory and time.

The process may be ended by a limit, or by a fault of the library that reads; then this one raises an exception.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentrl.runtime.worker_wire import is_silent, read_frame, write_frame

_PROGRAM = Path(__file__).with_name("bounded_program.py")
_LONGEST = 256 << 20  # bytes of a piece


class BeyondBounds(Exception):
    """The work took more memory or processor time than it may, or ended its process."""


class AnswerError(Exception):
    """The work raised an exception: ``kind`` is its class, the text its message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class BoundedWorkers:
    """Processes that answer questions by a function of a file. They are started when asked, and kept.

    Args:
        path: a file that imports no package of this project, so that a process starts fast.
        function: its function that takes a question and yields the pieces of the answer.
        memory_bytes: of an answer, beyond what the file's imports take. Linux only.
        cpu_s: of each piece of an answer. POSIX only.
    """

    def __init__(self, path: Path, function: str, *, memory_bytes: int, cpu_s: int) -> None:
        self._command = [sys.executable, "-P", str(_PROGRAM), str(path), function]
        self._command += [str(memory_bytes), str(cpu_s)]
        self._cpu_s = cpu_s
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        atexit.register(self.close)

    def ask(self, question: Any, on_spent: Callable[[float], None] | None = None) -> Iterator[bytes]:
        """Ask a question, which JSON can hold; yield the pieces of the answer. Safe to use from several threads.

        Args:
            on_spent: gets the processor seconds that the answer took, or all it may where it ran into a limit.

        Raises:
            BeyondBounds: the process ran into a limit, or died.
            AnswerError: the answer raises an exception.
        """
        process = self._take()
        is_whole, spent = False, float(self._cpu_s)
        try:
            try:
                write_frame(process.stdin, b"Q", json.dumps(question).encode())  # type: ignore[arg-type]
                while (frame := read_frame(process.stdout, _LONGEST)) is not None:  # type: ignore[arg-type]
                    kind, content = frame
                    if kind == b"D":
                        yield content
                        continue
                    seconds, _, error = content.decode("utf-8", "replace").partition(" ")
                    spent = float(seconds)
                    name, _, text = error.partition(": ")
                    is_whole = name not in ("MemoryError", "ArrowMemoryError")
                    if kind == b"E":
                        return
                    if not is_whole:
                        raise BeyondBounds("it takes too much memory")
                    raise AnswerError(name, text)
            except (OSError, ValueError):  # what it writes is no answer
                pass
            raise BeyondBounds("it takes too much time or memory, or cannot be read without a crash")
        finally:
            if on_spent is not None:
                on_spent(spent)
            if is_whole:
                with self._lock:
                    self._idle.append(process)
            else:  # it is in the middle of something, or what it held may be large
                _end(process)

    def _take(self) -> subprocess.Popen[bytes]:
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                pipe = subprocess.PIPE
                return subprocess.Popen(self._command, bufsize=0, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            if process.poll() is None and is_silent(process.stdout):
                return process
            _end(process)

    def close(self) -> None:
        """End the processes that wait for a question."""
        with self._lock:
            processes, self._idle = self._idle, []
        for process in processes:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.close()
    process.wait()
