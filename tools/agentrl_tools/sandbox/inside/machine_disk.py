"""The disk of a machine: memory, bounded in size and in files, where its home and its temporary files are."""

from __future__ import annotations

import ctypes
import os

HOME = "/home/agent"
_LIBC = ctypes.CDLL(None, use_errno=True)
_NOSUID, _NODEV, _BIND = 2, 4, 4096


def mount_disk(size_mb: int, files: int, user: int | None) -> None:
    """Mount one disk at ``/home`` and ``/tmp``. It takes CAP_SYS_ADMIN in the process's namespace.

    Args:
        files: inodes at most.
        user: to whom the home belongs; ``None``: to this process's user.
    """
    options = f"size={size_mb}m,nr_inodes={files},mode=1777".encode()
    _mount(b"tmpfs", b"/home", b"tmpfs", _NOSUID | _NODEV, options)
    if user is not None:
        os.setegid(user)
        os.seteuid(user)  # what is made now is this user's
    for folder, mode in (("/home/home", 0o755), ("/home/home/agent", 0o755), ("/home/tmp", 0o1777)):
        os.mkdir(folder)
        os.chmod(folder, mode)
    if user is not None:
        os.seteuid(0)
        os.setegid(0)
    _mount(b"/home/tmp", b"/tmp", None, _BIND, None)
    _mount(b"/home/home", b"/home", None, _BIND, None)


def _mount(source: bytes, folder: bytes, kind: bytes | None, flags: int, options: bytes | None) -> None:
    if _LIBC.mount(source, folder, kind, flags, options) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {folder.decode()}: {os.strerror(number)}")
