"""A process gives up what it does not need, for good: landlock, limits, seccomp, by their bare system calls."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Sequence

_LIBC = ctypes.CDLL(None, use_errno=True)
_SYS_LANDLOCK = 444  # create_ruleset; add_rule and restrict_self follow. The same on every architecture.
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_PDEATHSIG = 4, 38, 22, 1
_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _CAPABILITY_VERSION_3 = 23, 24, 0x20080522
_SECCOMP_MODE_FILTER = 2

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FILES_BY_ABI = (0, 13, 14, 15, 15, 16)  # how many kinds of access to files each version of landlock knows


def drop_privileges() -> None:
    """Keep others from looking into this process, gain no rights by what it starts, keep no capability."""
    _check(_LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    _check(_LIBC.capset(struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24)), "capset")


def switch_user(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def drop_bounding_set() -> None:
    """Give up the capabilities that a program could gain, as far as root may; seccomp refuses programs too."""
    number = 0
    while _LIBC.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) >= 0:
        _LIBC.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # a container may have taken CAP_SETPCAP from root
        number += 1


def build_limits(**values: int) -> list[tuple[int, tuple[int, int]]]:
    """Convert limits such as ``AS=1 << 30`` to what setrlimit takes, never above the hard limit."""
    limits = []
    for name, value in values.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        limits.append((kind, (value, value)))
    return limits


def set_limits(limits: Sequence[tuple[int, tuple[int, int]]]) -> None:
    for kind, values in limits:
        resource.setrlimit(kind, values)


def get_landlock_version() -> int:
    """Return the version of landlock; 0: this kernel has none."""
    return max(0, int(_LIBC.syscall(_SYS_LANDLOCK, None, 0, 1)))


def restrict_files(readable: Sequence[str], writable: Sequence[str], version: int) -> None:
    """Allow no files from here on but those beneath these; ``version`` is landlock's, and 0 does nothing."""
    every = (1 << _FILES_BY_ABI[min(version, 5)]) - 1
    _restrict(every, [*((p, _READ) for p in readable), *((p, every) for p in writable)], version)


def restrict_writes(writable: Sequence[str], version: int) -> None:
    """Allow no writes from here on but beneath these, whatever else was allowed before."""
    every = (1 << _FILES_BY_ABI[min(version, 5)]) - 1
    _restrict(every & ~_READ, [(p, every & ~_READ) for p in writable], version)


def _restrict(handled: int, rules: Sequence[tuple[str, int]], version: int) -> None:
    if version == 0:
        return
    network = 3 if version >= 4 else 0
    scoped = 3 if version >= 6 else 0  # abstract sockets, signals
    attributes = struct.pack("QQQ", handled, network, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    made = _LIBC.syscall(_SYS_LANDLOCK, attributes, len(attributes), 0)
    _check(made, "landlock_create_ruleset")
    for path, access in rules:
        _allow(made, path, access & handled)
    _check(_LIBC.syscall(_SYS_LANDLOCK + 2, made, 0), "landlock_restrict_self")
    os.close(made)


def _allow(rules: int, path: str, access: int) -> None:
    try:
        at = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # it is not there, so nobody misses it
        return
    if not os.path.isdir(path):
        access &= _EXECUTE | _WRITE_FILE | _READ_FILE
    rule = struct.pack("=Qi", access, at)
    _check(_LIBC.syscall(_SYS_LANDLOCK + 1, rules, 1, rule, 0), f"landlock_add_rule {path}")
    os.close(at)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def load_seccomp_filter(bpf: bytes) -> None:
    """Load a seccomp filter; it cannot be taken off."""
    code = ctypes.create_string_buffer(bpf, len(bpf))
    program = _Program(len(bpf) // 8, ctypes.cast(code, ctypes.c_void_p).value)
    _check(_LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "PR_SET_SECCOMP")


def die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)


def _check(status: int, what: str) -> None:
    if status < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
