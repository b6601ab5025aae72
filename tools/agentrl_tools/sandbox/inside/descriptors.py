"""A session's descriptors: nothing to read, its output, its control socket, and none besides."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource

CONTROL = 63  # above those that its code gets
_FIRST_FREE = CONTROL + 1
_SYS_CLOSE_RANGE = 436  # the same on every architecture
_LIBC = ctypes.CDLL(None, use_errno=True)


def move_up(descriptor: int) -> int:
    """Move a descriptor above all places that a session's have, and return where it is."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    os.close(descriptor)
    return moved


def put_in_place(nothing: int, control: int, output: int) -> None:
    """Put a session's descriptors where they belong. Each is moved up first, for it may lie in another's place."""
    sources = [fcntl.fcntl(d, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for d in (nothing, output, output, control)]
    for source, place in zip(sources, (0, 1, 2, CONTROL), strict=True):
        os.dup2(source, place)


def close_others() -> None:
    """Close whatever else is open."""
    for first, last in ((3, CONTROL - 1), (_FIRST_FREE, 0xFFFFFFFF)):
        if _LIBC.syscall(_SYS_CLOSE_RANGE, first, last, 0) < 0:  # before Linux 5.9
            os.closerange(first, min(last, resource.getrlimit(resource.RLIMIT_NOFILE)[1]) + 1)


def allow_all() -> int:
    """Allow this process as many descriptors as it may have, and return how many that are."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
