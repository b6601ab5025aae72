"""Functions called in other processes: for what computes long, cannot be interrupted, or changes global state.

A worker is a program of its own, `process_worker`, never the script that was started: a script needs no
``if __name__ == "__main__":``, and nothing in it is run twice. Workers are kept for the next call, in this process's
pool; a call that is cancelled, or takes too long, kills its own.
"""

from __future__ import annotations

import atexit
import builtins
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial, reduce
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import anyio
from anyio.lowlevel import RunVar

from agentrl import errors
from agentrl.errors import ContractError, InfraError, ToolError, UserError
from agentrl.runtime.threads import run_in_thread
from agentrl.runtime.worker_wire import (
    MAX_VALUE,
    NotPlainError,
    WireError,
    is_silent,
    pack_value,
    read_frame,
    unpack_value,
    write_frame,
)
from agentrl.types import TOOL_ERRORS

T = TypeVar("T")
PROGRAM = Path(__file__).with_name("process_worker.py")


class WorkerDied(Exception):
    """The worker ended before it answered: it was killed by a limit, by the system, or by what it ran."""


async def call_in_process(
    function: Callable[..., T] | str,
    *arguments: object,
    timeout_s: float | None = None,
    cpu_s: float | None = None,
    memory_bytes: int | None = None,
    reads_others: bool = False,
) -> T:
    """Call a function of a module in another process; return what it returns, or raise what it raises.

    No more calls run at once than there are cores. Arguments and result cross as plain data (`worker_wire`): a worker
    that hostile input took over can give a wrong answer, and nothing else. An exception that is neither one of
    Python's nor of agentrl's arrives as the one it is a subclass of, a RuntimeError at least, with its name.

    Args:
        function: or its name, ``module:qualname``, which a worker imports before the limits begin.
        timeout_s: from when a worker has the call; the time before, in a queue, does not count.
        cpu_s: of processor time, in whole seconds, rounded up; on a busy machine that is the fairer limit. POSIX only.
        memory_bytes: beyond what the worker uses already; more is a ``MemoryError`` there. Linux only.
        reads_others: an argument is text of a model, a server or a stranger. Then the worker is none that answers
            other calls, and cannot say that the user is mistaken: what it raises as such is a `WorkerDied`.

    Raises:
        ContractError: the function is defined in the script that was started, or cannot be named; an argument or the
            result is no plain data.
        TimeoutError: ``timeout_s`` passed.
        WorkerDied: the worker died, as it does where ``cpu_s`` are spent, or did not answer by the rules.
    """
    name = function if isinstance(function, str) else _name_function(function)
    folder = os.getcwd()
    path = [entry or folder for entry in sys.path if isinstance(entry, str)]
    try:
        request = pack_value([path, folder, cpu_s, memory_bytes, name, list(arguments)])
    except NotPlainError as error:
        raise ContractError(
            f"function {name!r} cannot be called in a worker process: its arguments hold {error}, which is no plain "
            "data (None, bool, int, float, str, bytes, and lists, tuples, sets and dicts of them)"
        ) from None
    async with _limiter():
        with anyio.fail_after(timeout_s):
            answer = await _ask(request, _read if reads_others else _idle)
    if reads_others and isinstance(answer, UserError):
        await _check_importable(name)
        raise WorkerDied(f"the worker process raised {type(answer).__name__}: {answer}") from None
    if isinstance(answer, Exception):
        raise answer
    result: T = answer[0]
    return result


async def _check_importable(name: str) -> None:
    """Raise ContractError if workers that have read nothing of others cannot import a function either."""
    try:
        await call_in_process(_import, name)
    except Exception as error:
        raise ContractError(
            f"function {name!r} cannot be called in a worker process: {type(error).__name__}: {error}"
        ) from None


def _import(name: str) -> None:
    module, _, qualname = name.partition(":")
    reduce(getattr, qualname.split("."), import_module(module))


async def _ask(request: bytes, idle: list[_Worker]) -> tuple[Any] | Exception:
    """Ask a worker; return its result, alone in a tuple, or what it raised. Raises WorkerDied."""
    worker, answer, is_whole = _take(idle), None, False
    try:
        answer = await run_in_thread(partial(worker.ask, request))
        is_whole = answer is not None
    except WireError as error:
        raise WorkerDied(f"the worker process answered with what is no plain data: {error}") from None
    finally:
        if is_whole:
            _give_back(worker, idle)
        else:
            worker.kill()
    if answer is None:
        raise WorkerDied(f"the worker process ended with exit status {worker.process.returncode} before it answered")
    return answer


def _name_function(function: Callable[..., Any]) -> str:
    """Return a function's name, ``module:qualname``. Raises ContractError: it cannot be found by one."""
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    called = f"function {qualname or function!r:.80} cannot be called in a worker process:"
    if not module or not qualname:
        raise ContractError(f"{called} it has no name in a module; define it there with def")
    if module == "__main__":
        raise ContractError(
            f"{called} {qualname!r} is defined in the script or notebook that was started, which a worker never "
            "imports; move it to a module of its own, and import it from there"
        )
    found: Any = None
    with suppress(KeyError, AttributeError):
        found = sys.modules[module]
        found = reduce(getattr, qualname.split("."), found)
    if found is not function or not isinstance(getattr(function, "__self__", None), ModuleType | None):
        raise ContractError(f"{called} module {module!r} has none of that name; define it there with def")
    return f"{module}:{qualname}"


def _read_answer(frame: tuple[bytes, bytes]) -> tuple[Any] | Exception:
    kind, content = frame
    value = unpack_value(content)
    if kind == b"D":
        return (value,)
    if kind != b"X" or not isinstance(value, dict):
        raise WireError("neither data nor an exception")
    return _build_error(value)


def _build_error(said: dict[str, Any]) -> Exception:
    """Build the exception that a worker describes; a RuntimeError where it is none that is known here."""
    name, text, arguments = (said.get(key) for key in ("class", "text", "arguments"))
    kind, provoked = str(said.get("kind")), said.get("provoked")
    if name == "InfraError":  # that it is the world's is not a worker's to say: evidence decides
        kind = kind if re.fullmatch(r"\w{1,40}", kind, re.ASCII) else "worker_fault"
        return InfraError(kind, str(text), True if provoked is True else None)
    if name == "ToolError":
        return ToolError(str(text), kind if kind in TOOL_ERRORS else "tool")
    cls = getattr(errors, str(name), None) or getattr(builtins, str(name), None)
    if isinstance(cls, type) and issubclass(cls, Exception) and cls is not Exception and isinstance(arguments, list):
        with suppress(Exception):
            return cls(*arguments)
    return RuntimeError(str(text) if name == "Exception" else f"{name}: {text}")


class _Worker:
    """A worker process. It is asked in one thread at a time, and may be killed from any."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", str(PROGRAM)]
        pipe = subprocess.PIPE
        # One seed of hashes for all: what a worker draws from a set, another draws too.
        variables = {**os.environ, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
        self.process = subprocess.Popen(
            command, bufsize=0, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=variables
        )
        self._lock, self._asked, self._killed = threading.Lock(), False, False

    def ask(self, request: bytes) -> tuple[Any] | Exception | None:
        """Send a request and wait for the answer; ``None`` where the worker ends first. Raises WireError."""
        with self._lock:
            self._asked = True
        frame = None
        try:
            frame = self._exchange(request)
        finally:
            with self._lock:
                self._asked = False
                if frame is None or self._killed:
                    self._dispose()
        return None if frame is None else _read_answer(frame)

    def _exchange(self, request: bytes) -> tuple[bytes, bytes] | None:
        try:
            write_frame(self.process.stdin, b"Q", request)  # type: ignore[arg-type]
            return read_frame(self.process.stdout, MAX_VALUE)  # type: ignore[arg-type]
        except WireError:
            self.process.kill()
            raise
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
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(OSError, ValueError):
                stream.close()  # type: ignore[union-attr]
        self.process.wait()


_idle: list[_Worker] = []
_read: list[_Worker] = []  # those that have read what others wrote
_lock = threading.Lock()


def _take(idle: list[_Worker]) -> _Worker:
    while True:
        with _lock:
            worker = idle.pop() if idle else None
        if worker is None:
            return _Worker()
        if worker.process.poll() is None and is_silent(worker.process.stdout):
            return worker
        worker.kill()  # it has ended, or says what nobody has asked


def _give_back(worker: _Worker, idle: list[_Worker]) -> None:
    with _lock:
        idle.append(worker)


@atexit.register
def _close_idle() -> None:
    """End the workers that wait for a call."""
    with _lock:
        workers = [*_idle, *_read]
        _idle.clear()
        _read.clear()
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
