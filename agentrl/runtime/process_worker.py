"""The program of a worker process: it answers one request after another, and imports no script.

It ends when its standard input does: with the process that started it, whatever ended that one. `processes` is the
other side. Only the standard library is imported here, so that a worker starts at once.

A message is eight bytes of length, then a pickle.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from typing import Any, BinaryIO

try:
    import resource
except ImportError:  # pragma: no cover - no POSIX
    resource = None  # type: ignore[assignment]

RETURNED, RAISED, UNREADABLE = "returned", "raised", "unreadable"


def write_message(stream: BinaryIO, message: bytes) -> None:
    """Write a message, its length before it."""
    stream.write(len(message).to_bytes(8, "big") + message)
    stream.flush()


def read_message(stream: BinaryIO) -> bytes | None:
    """Read a message; ``None`` where the stream ends before it does."""
    length = int.from_bytes(header, "big") if len(header := stream.read(8)) == 8 else -1
    message = stream.read(length) if length >= 0 else b""
    return message if len(message) == length else None


def _serve() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        signal.signal(number, signal.SIG_IGN)  # the starting process decides; a terminal tells everybody
    requests, answers = _take_streams()
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests, waiting), daemon=True).start()
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        write_message(answers, _answer(waiting.get()))


def _take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Keep standard input and output for messages; what is run here reads nothing and prints to nowhere."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nowhere, number)
    return requests, answers


def _read_requests(requests: BinaryIO, waiting: queue.SimpleQueue[bytes]) -> None:
    while (message := read_message(requests)) is not None:
        waiting.put(message)
    os._exit(0)  # also while something is being computed


def _answer(message: bytes) -> bytes:
    path, folder, cpu_s, memory_bytes, call = pickle.loads(message)
    sys.path[:] = path
    with suppress(OSError):
        os.chdir(folder)
    try:
        function, arguments = pickle.loads(call)
    except Exception as error:  # other people's code is imported
        return pickle.dumps((UNREADABLE, f"{type(error).__name__}: {error}"))
    _limit(cpu_s, memory_bytes)
    try:
        return pickle.dumps((RETURNED, function(*arguments)))
    except BaseException as error:
        return _pack_error(error)
    finally:
        _limit(None, None)


def _pack_error(error: BaseException) -> bytes:
    """Pickle an exception, or its words where it cannot be made again from its arguments."""
    try:
        message = pickle.dumps((RAISED, error))
        pickle.loads(message)
    except Exception:
        message = pickle.dumps((RAISED, RuntimeError(f"{type(error).__name__}: {error}")))
    return message


def _limit(cpu_s: float | None, memory_bytes: int | None) -> None:
    """Allow so much more processor time and memory from here on; ``None``: any amount."""
    if resource is None:
        return
    spent = resource.getrusage(resource.RUSAGE_SELF)
    _set_soft(resource.RLIMIT_CPU, None if cpu_s is None else ceil(spent.ru_utime + spent.ru_stime + cpu_s))
    _set_soft(resource.RLIMIT_AS, None if memory_bytes is None else _address_space() + memory_bytes)


def _set_soft(kind: int, soft: int | None) -> None:
    _, hard = resource.getrlimit(kind)
    within = hard if soft is None else soft if hard == resource.RLIM_INFINITY else min(soft, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(kind, (within, hard))


def _address_space() -> int:
    """Return the bytes of address space in use; half of all there can be where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 1 << 62


def close_streams(streams: Sequence[Any]) -> None:
    """Close streams, whatever state they are in."""
    for stream in streams:
        with suppress(OSError, ValueError):
            stream.close()


if __name__ == "__main__":
    _serve()
