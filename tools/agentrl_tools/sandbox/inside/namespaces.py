"""Namespaces and mounts of a process of its own, by their bare system calls."""

from __future__ import annotations

import ctypes
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_NOSUID, _NODEV, _NOEXEC, _REC, _PRIVATE, _DETACH = 2, 4, 8, 0x4000, 1 << 18, 2


def find_proc() -> int | None:
    """Return a descriptor of /proc; ``None`` where none is mounted."""
    try:
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        os.stat("self/uid_map", dir_fd=proc)
    except OSError:
        return None
    return proc


def detach(mount: str) -> None:
    """Take a mount away from every path. Descriptors of it go on."""
    _check(_LIBC.umount2(mount.encode(), _DETACH), f"umount {mount}")


def open_mount_namespace() -> None:
    """Give this process mounts of its own, of which nobody else hears. It must have CAP_SYS_ADMIN."""
    _check(_LIBC.unshare(_NEWNS), "unshare")
    _check(_LIBC.mount(None, b"/", None, _REC | _PRIVATE, None), "mount --make-rprivate")


def open_user_namespace(proc: int, user: int, group: int) -> None:
    """Give this process a user namespace with itself alone in it, and mounts of its own."""
    _check(_LIBC.unshare(_NEWUSER | _NEWNS), "unshare")
    _write(proc, "self/setgroups", "deny")
    _write(proc, "self/uid_map", f"{user} {user} 1")
    _write(proc, "self/gid_map", f"{group} {group} 1")


def mount_tmpfs(folder: str, user: int, group: int, size_mb: int, files: int) -> None:
    """Mount memory of ``size_mb`` and at most ``files`` inodes; it is gone with the last process of the namespace."""
    options = f"size={size_mb}m,nr_inodes={files},mode=700,uid={user},gid={group}".encode()
    flags = _NOSUID | _NODEV | _NOEXEC
    _check(_LIBC.mount(b"tmpfs", folder.encode(), b"tmpfs", flags, options), "mount tmpfs")


def _write(proc: int, name: str, text: str) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def _check(status: int, what: str) -> None:
    if status < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
