"""Functions called in other processes: for what computes long, cannot be interrupted, or changes global state.

A worker is a program of its own, `process_worker`, never the script that was started: a script needs no
``if __name__ == "__main__":``, and nothing in it is run twice. Workers are kept for the next call, in this process's
pool; a call that is cancelled, or takes too long, kills its own.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import anyio
from anyio.lowlevel import RunVar

from agentrl.errors import ContractError
from agentrl.runtime.process_worker import RAISED, UNREADABLE, close_streams, read_message, write_message
from agentrl.runtime.threads import run_in_thread

T = TypeVar("T")
PROGRAM = Path(__file__).with_name("process_worker.py")


class WorkerDied(Exception):
    """The worker ended before it answered: it was killed by a limit, by the system, or by what it ran."""


async def call_in_process(
    function: Callable[..., T],
    *arguments: object,
    timeout_s: float | None = None,
    cpu_s: float | None = None,
    memory_bytes: int | None = None,
) -> T:
    """Call a function of a module in another process; return what it returns, or raise what it raises.

    No more calls run at once than there are cores. Arguments and result are pickled.

    Args:
        timeout_s: from when a worker has the call; the time before, in a queue, does not count.
        cpu_s: of processor time, in whole seconds, rounded up; on a busy machine that is the fairer limit. POSIX only.
        memory_bytes: beyond what the worker uses already; more is a ``MemoryError`` there. Linux only.

    Raises:
        ContractError: the function or an argument is defined in the script that was started, or cannot be pickled.
        TimeoutError: ``timeout_s`` passed.
        WorkerEnded: the worker died, as it does where ``cpu_s`` are spent.
    """
    call = _pickled(function, arguments)
    folder = os.getcwd()
    path = [entry or folder for entry in sys.path]
    request = pickle.dumps((path, folder, cpu_s, memory_bytes, call))
    async with _limiter():
        with anyio.fail_after(timeout_s):
            status, value = await _ask(request)
    if status == UNREADABLE:
        raise ContractError(f"{_name_of(function)} cannot be called in a worker process: {value}")
    if status == RAISED:
        raise value
    result: T = value
    return result


async def _ask(request: bytes) -> tuple[str, Any]:
    worker, answer = _take(), None
    try:
        answer = await run_in_thread(partial(worker.ask, request))
    finally:
        if answer is None:
            worker.kill()
        else:
            _give_back(worker)
    if answer is None:
        raise WorkerDied(f"the worker process ended with exit status {worker.process.returncode} before it answered")
    status, value = pickle.loads(answer)
    return str(status), value


def _pickled(function: Callable[..., Any], arguments: tuple[object, ...]) -> bytes:
    written = BytesIO()
    try:
        _Pickler(written).dump((function, arguments))
    except _DefinedInScript as found:
        raise ContractError(
            f"{_name_of(function)} cannot be called in a worker process: {found} is defined in the script or notebook "
            "that was started, which a worker never imports; move it to a module of its own, and import it from there"
        ) from None
    except Exception as error:  # an argument's own __reduce__ may raise anything
        raise ContractError(f"{_name_of(function)} cannot be called in a worker process: {error}") from None
    return written.getvalue()


class _DefinedInScript(Exception):
    pass


class _Pickler(pickle.Pickler):
    """Refuse functions and classes of ``__main__``, which is another module in a worker."""

    def reducer_override(self, obj: Any) -> Any:
        if getattr(obj, "__module__", None) == "__main__" and isinstance(obj, type | FunctionType):
            raise _DefinedInScript(repr(obj.__qualname__))
        return NotImplemented


def _name_of(function: Callable[..., Any]) -> str:
    return f"function {getattr(function, '__qualname__', repr(function))!r}"


class _Worker:
    """A worker process. It is asked in one thread at a time, and may be killed from any."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", str(PROGRAM)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._lock, self._asked, self._killed = threading.Lock(), False, False

    def ask(self, request: bytes) -> bytes | None:
        """Send a request and wait for the answer; ``None`` where the worker ends first."""
        with self._lock:
            self._asked = True
        answer = self._exchange(request)
        with self._lock:
            self._asked = False
            if answer is None or self._killed:
                self._dispose()
        return answer

    def _exchange(self, request: bytes) -> bytes | None:
        try:
            write_message(self.process.stdin, request)  # type: ignore[arg-type]
            return read_message(self.process.stdout)  # type: ignore[arg-type]
        except (OSError, ValueError):  # it was killed
            return None

    def kill(self) -> None:
        """End the process at once; a thread that asks it has ``None`` then."""
        with self._lock:
            self._killed = True
            if self.process.returncode is None:
                self.process.kill()
            if not self._asked:
                self._dispose()

    def _dispose(self) -> None:
        close_streams([self.process.stdin, self.process.stdout])
        self.process.wait()


_idle: list[_Worker] = []
_lock = threading.Lock()


def _take() -> _Worker:
    while True:
        with _lock:
            worker = _idle.pop() if _idle else None
        if worker is None:
            return _Worker()
        if worker.process.poll() is None:
            return worker


def _give_back(worker: _Worker) -> None:
    with _lock:
        _idle.append(worker)


@atexit.register
def _close_idle() -> None:
    """End the workers that wait for a call."""
    with _lock:
        workers, _idle[:] = list(_idle), []
    for worker in workers:
        worker.kill()


# One run is one event loop.
_running = RunVar[anyio.CapacityLimiter]("agentrl_processes")


def _limiter() -> anyio.CapacityLimiter:
    try:
        return _running.get()
    except LookupError:
        _running.set(limiter := anyio.CapacityLimiter(max(2, os.cpu_count() or 1)))
        return limiter
