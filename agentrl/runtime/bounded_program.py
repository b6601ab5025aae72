"""The program of a bounded worker: it answers questions by a function of another file, within limits.

``python bounded_program.py FILE FUNCTION MEMORY CPU``: MEMORY is in bytes, beyond what the file's imports take; CPU is
in seconds, for each piece of an answer. `bounded_worker` is the other side.

The frames are those of `worker_wire`: D holds bytes, as the function yields them; E and X end an answer and hold the
processor seconds it took, X an exception's name and its text behind them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.runtime import worker_wire
else:  # by its file: the package takes longer to import than most answers do
    sys.path.insert(0, str(Path(__file__).parent))
    import worker_wire

    del sys.path[0]

try:
    import resource
except ImportError:  # pragma: no cover - no POSIX
    resource = None  # type: ignore[assignment]

_LONGEST_ERROR = 500  # characters


def _load_function(path: str, name: str) -> Callable[[Any], Iterable[bytes]]:
    spec = spec_from_file_location("bounded_answer", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Callable[[Any], Iterable[bytes]] = getattr(module, name)
    return function


def _limit_memory(more: int) -> None:
    if resource is None:
        return
    with suppress(OSError, ValueError):  # no /proc: no limit
        with open("/proc/self/statm", encoding="ascii") as statm:
            used = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))


def _limit_time(seconds: int) -> None:
    """Allow so much more processor time from now on; beyond it the system ends this process."""
    if resource is None:
        return
    spent = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (int(spent.ru_utime + spent.ru_stime) + seconds + 1, hard))


def _serve(path: str, name: str, memory: int, cpu_s: int) -> None:
    questions, answers = worker_wire.take_streams()
    answer = _load_function(path, name)
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory(memory)
    while (frame := worker_wire.read_frame(questions)) is not None:
        _limit_time(cpu_s)
        began = time.process_time()
        try:
            for piece in answer(json.loads(frame[1])):
                worker_wire.write_frame(answers, b"D", piece)
                _limit_time(cpu_s)
        except Exception as error:
            said = f"{_measure(began)} {type(error).__name__}: {str(error)[:_LONGEST_ERROR]}"
            worker_wire.write_frame(answers, b"X", said.encode("utf-8", "replace"))
        else:
            worker_wire.write_frame(answers, b"E", _measure(began).encode())


def _measure(began: float) -> str:
    return f"{time.process_time() - began:.6f}"


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
