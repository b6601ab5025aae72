"""Atomic writes to a run's folder: one process at a time, files that are whole or absent, errors as sentences."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import UserError


class FolderLock:
    """A lock on a folder, until it is closed or collected, or the process ends."""

    def __init__(self, path: Path) -> None:
        """Take the lock. Raises UserError if another process has it."""
        self._descriptor: int | None = os.open(path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise UserError(f"another process is at the run in {str(path)!r}") from None

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    __del__ = close


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file's new content, and rename it to ``path`` at the end, if nothing failed."""
    partial_path = path.with_name(f".{path.name}.part")
    try:
        yield partial_path
        partial_path.replace(path)
    except BaseException:
        partial_path.unlink(missing_ok=True)  # a full disk needs the room
        raise


class FolderWriteError(UserError):
    """The error of a full disk, or a run folder that cannot be written; ``reason`` is the system's."""

    def __init__(self, folder: Path, error: OSError) -> None:
        self.reason = describe_os_error(error)
        super().__init__(f"cannot write to the run folder {str(folder)!r}: {self.reason}; what is in it is kept")


@contextmanager
def raise_write_errors(folder: Path) -> Iterator[None]:
    """Raise FolderWriteError for an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise FolderWriteError(folder, error) from None


def describe_os_error(error: OSError) -> str:
    """Return the system's words for an error; a library may have replaced them by its own."""
    return os.strerror(error.errno) if error.errno else str(error)
