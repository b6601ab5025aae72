"""A run's folder on the disk: one process at a time, files that are whole or not there, failures as sentences."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import UserError


class Lock:
    """A folder for this process alone, until it is closed, forgotten, or the process ends."""

    def __init__(self, path: Path) -> None:
        """Raises UserError where another one has it."""
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
def put(path: Path) -> Iterator[Path]:
    """Inside, a file is written aside; then it has its name. What was there before stays until the new one is whole."""
    aside = path.with_name(f".{path.name}.part")
    try:
        yield aside
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)  # a full disk needs the room
        raise


class Unwritable(UserError):
    """Raised where the disk is full, or the run folder cannot be written; ``reason`` is the system's."""

    def __init__(self, folder: Path, error: OSError) -> None:
        self.reason = reason(error)
        super().__init__(f"cannot write to the run folder {str(folder)!r}: {self.reason}; what is in it is kept")


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise Unwritable for an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise Unwritable(folder, error) from None


def reason(error: OSError) -> str:
    """Why, in the system's words; a library may have put others in their place."""
    return os.strerror(error.errno) if error.errno else str(error)
