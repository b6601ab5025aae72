"""The program of a worker process: it calls one function after another, by its name, and imports no script.

It ends when its standard input does: with the process that started it, whatever ended that one. `processes` is the
other side. Only the standard library is imported here, so that a worker starts at once.

A question is the path of imports, the folder, limits, a function as ``module:qualname``, and its arguments.
"""

from __future__ import annotations

import importlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from agentrl.runtime import worker_wire
else:  # by its file: the package takes longer to import than most calls do
    sys.path.insert(0, str(Path(__file__).parent))
    import worker_wire

    del sys.path[0]

try:
    import resource
except ImportError:  # pragma: no cover - no POSIX
    resource = None  # type: ignore[assignment]

_KNOWN = ("builtins", "agentrl.errors")  # modules whose exceptions cross as themselves


def _serve() -> None:
    requests, answers = worker_wire.take_streams()
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests, waiting), daemon=True).start()
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        worker_wire.write_frame(answers, *_answer(waiting.get()))


def _read_requests(requests: BinaryIO, waiting: queue.SimpleQueue[bytes]) -> None:
    while (frame := worker_wire.read_frame(requests)) is not None:
        waiting.put(frame[1])
    os._exit(0)  # also while something is being computed


def _answer(question: bytes) -> tuple[bytes, bytes]:
    path, folder, cpu_s, memory_bytes, name, arguments = worker_wire.unpack_value(question)
    sys.path[:] = path
    with suppress(OSError):
        os.chdir(folder)
    try:
        function = _find_function(name)
    except Exception as error:  # other people's code is imported
        return _refuse(f"function {name!r} cannot be called in a worker process: {type(error).__name__}: {error}")
    _limit(cpu_s, memory_bytes)
    try:
        return b"D", worker_wire.pack_value(function(*arguments), worker_wire.MAX_VALUE)
    except worker_wire.NotPlainError as error:
        return _refuse(
            f"function {name!r} returned {error}, which cannot leave a worker process: return plain data (None, bool, "
            "int, float, str, bytes, and lists, tuples, sets and dicts of them)"
        )
    except BaseException as error:
        return _pack_error(error)
    finally:
        _limit(None, None)


def _find_function(name: str) -> Callable[..., Any]:
    module, _, qualname = name.partition(":")
    found: Any = importlib.import_module(module)
    found = reduce(getattr, qualname.split("."), found)
    function: Callable[..., Any] = found
    return function


def _refuse(sentence: str) -> tuple[bytes, bytes]:
    return b"X", worker_wire.pack_value({"class": "ContractError", "text": sentence, "arguments": [sentence]})


def _pack_error(error: BaseException) -> tuple[bytes, bytes]:
    """Pack an exception as one that both sides know: itself, or what it is a subclass of, with its own name."""
    known = next(cls for cls in type(error).__mro__ if cls.__module__ in _KNOWN)
    try:
        text = str(error)[: worker_wire.MAX_DEPTH * 1000]
    except Exception:  # its own __str__
        text = ""
    if known is not type(error) and known.__module__ == "builtins":
        text, arguments = f"{type(error).__name__}: {text}", None
    else:
        arguments = list(error.args)
    packed: dict[str, Any] = {"class": known.__name__, "text": text, "arguments": arguments or [text]}
    for name in ("kind", "provoked"):
        if isinstance(value := getattr(error, name, None), str | bool):
            packed[name] = value
    try:
        return b"X", worker_wire.pack_value(packed, worker_wire.MAX_VALUE)
    except worker_wire.NotPlainError:
        return b"X", worker_wire.pack_value({**packed, "arguments": [text]})


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


if __name__ == "__main__":
    _serve()
