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
_PR_SET_KEEPCAPS = 8
_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _CAPABILITY_VERSION_3 = 23, 24, 0x20080522
_SECCOMP_MODE_FILTER = 2

CAP_DAC_OVERRIDE, CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN, CAP_SYS_NICE = 1, 5, 6, 7, 21, 23

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FILES_BY_ABI = (0, 13, 14, 15, 15, 16)  # how many kinds of access to files each version of landlock knows


def drop_privileges(kept: int = 0) -> None:
    """Keep others from looking into this process, gain no rights by what it starts, keep no capability but these."""
    _check(_LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")
    gain_no_privileges()
    keep_capabilities(kept)


def gain_no_privileges() -> None:
    """Gain no rights from here on by what is started, which landlock and seccomp ask for."""
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")


def get_capabilities() -> int:
    """Return the capabilities that this process may use, a bit for each."""
    held = (ctypes.c_uint32 * 6)()
    _check(_LIBC.capget(struct.pack("Ii", _CAPABILITY_VERSION_3, 0), held), "capget")
    return int(held[1]) | int(held[4]) << 32


def keep_capabilities(kept: int) -> None:
    """Give up all capabilities but these."""
    low, high = kept & 0xFFFFFFFF, kept >> 32
    data = struct.pack("6I", low, low, 0, high, high, 0)
    _check(_LIBC.capset(struct.pack("Ii", _CAPABILITY_VERSION_3, 0), data), "capset")


def switch_user(user: int, *, kept: int = 0, files_as_root: bool = False) -> None:
    """Become a user without groups.

    Args:
        kept: capabilities that stay; none by default.
        files_as_root: open files by root's rights nevertheless: landlock says which. All else is the user's.
    """
    os.setgroups([])
    os.setresgid(user, user, user)
    if kept or files_as_root:
        _check(_LIBC.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "PR_SET_KEEPCAPS")
    os.setresuid(user, user, user)
    if files_as_root:
        keep_capabilities(1 << CAP_SETUID)
        _LIBC.setfsuid(0)
    keep_capabilities(kept)


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


def build_ruleset(
    readable: Sequence[str], writable: Sequence[str], version: int, listed: Sequence[str] = ()
) -> int | None:
    """Make a landlock ruleset that allows no files but those beneath these.

    Args:
        listed: folders whose names may be read, and nothing besides.
        version: landlock's, or less; ``None`` is returned for 0.

    Returns:
        A descriptor for `restrict`.
    """
    if version == 0:
        return None
    every = (1 << _FILES_BY_ABI[min(version, 5)]) - 1
    network = 3 if version >= 4 else 0
    scoped = 3 if version >= 6 else 0  # abstract sockets, signals
    attributes = struct.pack("QQQ", every, network, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = int(_LIBC.syscall(_SYS_LANDLOCK, attributes, len(attributes), 0))
    _check(ruleset, "landlock_create_ruleset")
    allowed = [(listed, _READ_DIR), (readable, _READ), (writable, every)]
    for path, access in [(path, access) for paths, access in allowed for path in paths]:
        _allow(ruleset, path, access)
    return ruleset


def restrict(ruleset: int | None) -> None:
    """Allow this process from here on what the ruleset allows."""
    if ruleset is not None:
        _check(_LIBC.syscall(_SYS_LANDLOCK + 2, ruleset, 0), "landlock_restrict_self")


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
