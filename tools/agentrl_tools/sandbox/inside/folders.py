"""Folders that a stranger filled: measured and removed, however deep, wide or unreadable they are."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from itertools import count
from queue import SimpleQueue

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def measure(folder: str, most_files: int) -> tuple[int, int]:
    """Return the bytes and the files beneath a folder; what cannot be read counts as more than ``most_files``."""
    size, files, waiting = 0, 0, [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    files += 1
                    if files > most_files:
                        return size, files
                    with contextlib.suppress(FileNotFoundError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError:  # not to be listed, or its path is too long: nobody needs such a folder
            return size, most_files + 1
    return size, files


def remove(folder: str) -> None:
    """Remove a folder in which nobody writes any more. What is within folders is moved up first: no depth matters."""
    try:
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)
        top = os.open(folder, _FOLDER)
    except FileNotFoundError:
        return
    names = count()
    try:
        waiting = _empty(top, top, names)
        while waiting:
            name = waiting.pop()
            with contextlib.suppress(OSError):
                at = os.open(name, _FOLDER, dir_fd=top)
                try:
                    waiting += _empty(at, top, names)
                finally:
                    os.close(at)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


class Remover:
    """Removes folders, one after another, while others go on."""

    def __init__(self) -> None:
        self.waiting: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def remove(self, folder: str) -> None:
        """Remove a folder soon."""
        self.waiting.put(folder)

    def _work(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                remove(self.waiting.get())


def _empty(at: int, top: int, names: count[int]) -> list[str]:
    """Remove the files of a folder and move its folders to ``top``. Return their names there."""
    moved = []
    for name in os.listdir(at):
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
                with contextlib.suppress(OSError):  # most are empty
                    os.rmdir(name, dir_fd=at)
                    continue
                os.chmod(name, 0o700, dir_fd=at)
                os.rename(name, new := f".{os.urandom(8).hex()}.{next(names)}", src_dir_fd=at, dst_dir_fd=top)
                moved.append(new)
            else:
                os.unlink(name, dir_fd=at)
    return moved
