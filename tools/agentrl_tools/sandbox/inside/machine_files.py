"""Files of a machine, read and written by a process of the machine's user: what stands at a path may be anything."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

MAX_BYTES = 1 << 20  # of a file that is read
_FLAGS = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_file(path: str) -> Callable[[], None]:
    """Return the work of copying the head of a file to descriptor 1."""

    def work() -> None:
        file = _open(path, os.O_RDONLY)
        left = MAX_BYTES
        while left and (data := os.read(file, min(left, 1 << 16))):
            left -= len(data)
            _write(1, data)

    return lambda: _explain(work, path)


def write_file(path: str, data: bytes) -> Callable[[], None]:
    """Return the work of writing a file, and of making its folders."""

    def work() -> None:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        file = _open(path, os.O_WRONLY | os.O_CREAT)
        os.ftruncate(file, 0)
        _write(file, data)

    return lambda: _explain(work, path)


def _open(path: str, flags: int) -> int:
    """Open a plain file. Raises OSError, also for what is none."""
    kind = _find_kind(path)
    if kind in _KINDS:
        raise OSError(None, f"{_KINDS[kind]}, not a file")
    file = os.open(path, flags | _FLAGS, 0o644)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise OSError(None, "not a file")
    return file


def _find_kind(path: str) -> int:
    try:
        return stat.S_IFMT(os.stat(path).st_mode)
    except OSError:
        return 0


def _explain(work: Callable[[], None], path: str) -> None:
    """Run the work; an error of it is written to descriptor 2, and is exit code 1."""
    try:
        work()
    except OSError as error:
        os.write(2, f"{error.strerror}: {path}".encode("utf-8", "replace"))
        os._exit(1)


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
