"""Seccomp filters for sandboxed code, as bytes of BPF."""

from __future__ import annotations

import errno
import os
import socket
import struct
import tempfile
from functools import cache
from typing import Any

from agentrl import UserError

CLONE_THREAD = 0x00010000
_CLONE_NEW = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
_WORD = 0xFFFFFFFF  # the kernel takes these arguments as 32 bits; more may stand above them

_PROGRAMS = "execve execveat"
_PROCESSES = "fork vfork"
OWN_LIMITS = "prctl setrlimit"
_SIGNALS = "kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo"
_MODES = "chmod fchmod fchmodat fchmodat2 utime utimes futimesat utimensat"
# What a session needs to come behind its walls (`inside/walls.py`), and never again.
_SETTING_UP = "mount umount2 unshare setgroups setresuid setresgid setfsuid capset pidfd_open"
# What wakes a session that is stopped, shows what others do, leaves its group, or uses up what the machine shares.
_REACHING_OUT = """
timer_create setsid setpgid setpriority seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self
inotify_init inotify_init1 inotify_add_watch cachestat fadvise64 sync syncfs
io_setup io_submit io_getevents io_pgetevents io_cancel io_destroy
"""
ALWAYS_REFUSED = """
socket connect bind listen accept accept4
ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_open pidfd_getfd pidfd_send_signal
mount umount umount2 move_mount open_tree open_tree_attr fsopen fsconfig fsmount fspick mount_setattr pivot_root chroot
unshare setns keyctl add_key request_key bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register
memfd_create memfd_secret shmget shmat shmctl shmdt msgget msgsnd msgrcv msgctl semget semop semctl semtimedop
mq_open mq_unlink setuid setgid setreuid setregid setresuid setresgid setgroups setfsuid setfsgid capset personality
chown fchown lchown fchownat setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr
removexattrat file_setattr mknod mknodat name_to_handle_at open_by_handle_at fanotify_init lookup_dcookie
init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff sethostname setdomainname
settimeofday clock_settime clock_adjtime adjtimex acct quotactl quotactl_fd syslog ioperm iopl modify_ldt vhangup
sched_setaffinity sched_setscheduler sched_setparam sched_setattr ioprio_set migrate_pages move_pages
statmount listmount listxattrat lsm_set_self_attr process_mrelease fanotify_mark uselib nfsservctl
"""


def build_dispatcher_filter() -> bytes:
    """Build the filter of the dispatcher: it stops sessions, removes folders, and starts nothing."""
    return compile_filter(f"{ALWAYS_REFUSED} {_PROGRAMS} {_PROCESSES}")


def build_zygote_filter() -> bytes:
    """Build the filter of the zygote, and so of its sessions: it forks, and a fork comes behind its walls."""
    needed = set(_SETTING_UP.split())
    refused = [name for name in ALWAYS_REFUSED.split() if name not in needed]
    return compile_filter(f"{' '.join(refused)} {_PROGRAMS} {_MODES}")


def build_session_filter(*, no_truncation: bool = False) -> bytes:
    """Build the filter of a session, beside the zygote's: threads and files are left. Short: each call is tried.

    Args:
        no_truncation: of files by their path, or as they are read: landlock knows it from version 3 on.
    """
    names = f"{_SETTING_UP} {OWN_LIMITS} {_PROCESSES} {_SIGNALS} {_REACHING_OUT}"
    return compile_filter(names, own_limits=True, threads_only=True, no_messages=True, no_truncation=no_truncation)


def build_unknown_filter() -> bytes:
    """Build the filter that says "no such call" to whatever is newer than Linux 6.18, on every architecture."""
    load_number, if_greater, end = 0x20, 0x25, 0x06
    allow, no_such_call = 0x7FFF0000, 0x00050000 | errno.ENOSYS
    program = [(load_number, 0, 0, 0), (if_greater, 0, 1, _NEWEST_CALL), (end, 0, 0, no_such_call), (end, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


# Newer than some libseccomp: numbers that every architecture shares.
_NEWEST_CALL = 469
_NUMBERS = {"cachestat": 451, "fchmodat2": 452, "statmount": 457, "listmount": 458, "lsm_set_self_attr": 460}
_NUMBERS |= {"setxattrat": 463, "listxattrat": 465, "removexattrat": 466, "open_tree_attr": 467, "file_setattr": 469}


@cache
def compile_filter(
    refused: str,
    *,
    own_limits: bool = False,
    threads_only: bool = False,
    no_namespaces: bool = False,
    no_messages: bool = False,
    no_truncation: bool = False,
) -> bytes:
    """Build a filter that refuses calls by name. Raises UserError if libseccomp is missing."""
    try:
        import pyseccomp as seccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f"the sandbox needs pyseccomp and libseccomp ({error}): pip install 'agentrl-gym[sandbox]', and "
            "apt-get install libseccomp2"
        ) from None
    syscall_filter: Any = seccomp.SyscallFilter(seccomp.ALLOW)
    denied = seccomp.ERRNO(errno.EPERM)
    for name in refused.split():
        _add(syscall_filter, denied, name)
    if own_limits:
        _add(syscall_filter, denied, "prlimit64", seccomp.Arg(2, seccomp.NE, 0))  # reading limits is fine
    if no_messages:
        _deny_messages(syscall_filter, denied)
    if no_truncation:
        _deny_truncation(syscall_filter, denied)
    if threads_only:
        _add(syscall_filter, denied, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, CLONE_THREAD, 0))
    if threads_only or no_namespaces:
        for flag in _CLONE_NEW:
            _add(syscall_filter, denied, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag))
        _add(
            syscall_filter, seccomp.ERRNO(errno.ENOSYS), "clone3"
        )  # its flags are out of a filter's sight: libc falls back
    with tempfile.TemporaryFile() as file:
        syscall_filter.export_bpf(file)
        file.seek(0)
        return os.read(file.fileno(), 1 << 20)


def _deny_messages(syscall_filter: Any, denied: int) -> None:
    """Deny what reaches other processes through a socket pair or a descriptor's owner. asyncio's own pair works."""
    import pyseccomp as seccomp

    for name in ("sendmsg", "sendmmsg"):
        _add(syscall_filter, denied, name)
    _add(syscall_filter, denied, "sendto", seccomp.Arg(4, seccomp.NE, 0))  # with an address: any socket of the host
    _add(syscall_filter, denied, "socketpair", seccomp.Arg(0, seccomp.NE, socket.AF_UNIX))
    for kind in set(range(16)) - {socket.SOCK_STREAM}:
        _add(syscall_filter, denied, "socketpair", seccomp.Arg(1, seccomp.MASKED_EQ, 0xF, kind))
    for command in (8, 10, 15, 1024, 1026, 1031):  # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ
        _add(syscall_filter, denied, "fcntl", seccomp.Arg(1, seccomp.MASKED_EQ, _WORD, command))
    for request in (0x8901, 0x8902, 0x5412, 0x541C, 0x540E):  # FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX, TIOCSCTTY
        _add(syscall_filter, denied, "ioctl", seccomp.Arg(1, seccomp.MASKED_EQ, _WORD, request))


def _deny_truncation(syscall_filter: Any, denied: int) -> None:
    """Deny what empties a file without opening it to write."""
    import pyseccomp as seccomp

    _add(syscall_filter, denied, "truncate")
    _add(syscall_filter, seccomp.ERRNO(errno.ENOSYS), "openat2")  # its flags are out of a filter's sight
    for mode in (os.O_RDONLY, os.O_ACCMODE):  # the second is for neither: landlock asks nothing of it
        emptied = seccomp.MASKED_EQ, os.O_TRUNC | os.O_ACCMODE, os.O_TRUNC | mode
        _add(syscall_filter, denied, "open", seccomp.Arg(1, *emptied))
        _add(syscall_filter, denied, "openat", seccomp.Arg(2, *emptied))


def _add(syscall_filter: Any, action: int, name: str, *arguments: Any) -> None:
    try:
        syscall_filter.add_rule(action, name, *arguments)
    except (OSError, RuntimeError, ValueError):  # a call that this libseccomp does not know, or this machine has not
        if name in _NUMBERS:
            syscall_filter.add_rule(action, _NUMBERS[name], *arguments)
        elif name in ("execve", "ptrace", "clone", "prlimit64", "kill"):
            raise
