"""Seccomp filters for sandboxed code, as bytes of BPF."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from functools import cache
from typing import Any

from agentrl import UserError

CLONE_THREAD = 0x00010000

_PROGRAMS = "execve execveat"
_PROCESSES = "fork vfork"
_OWN = "prctl setrlimit"
_SIGNALS = "kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo"
_MODES = "chmod fchmod fchmodat fchmodat2 utime utimes futimesat utimensat"
_ALWAYS = """
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
sched_setaffinity sched_setscheduler sched_setparam sched_setattr setpriority ioprio_set
"""


def build_server_filter() -> bytes:
    """Build the filter of the fork server, and so of its sessions: it forks, ends them, and sets their limits."""
    return _build(f"{_ALWAYS} {_PROGRAMS} {_MODES}")


def build_session_filter() -> bytes:
    """Build the filter of a session, beside the server's: threads and files are left. Short, as every call is tried."""
    return _build(f"{_OWN} {_PROCESSES} {_SIGNALS}", own_limits=True, threads_only=True, no_messages=True)


def build_shell_filter() -> bytes:
    """Build the filter of commands in a process namespace: they may start processes, signal them, and set modes."""
    return _build(f"{_ALWAYS} {_OWN}", own_limits=True)


# Newer than some libseccomp: numbers that every architecture shares.
_NUMBERS = {"fchmodat2": 452, "setxattrat": 463, "removexattrat": 466, "open_tree_attr": 467, "file_setattr": 469}


@cache
def _build(refused: str, *, own_limits: bool = False, threads_only: bool = False, no_messages: bool = False) -> bytes:
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
    if threads_only:
        _add(syscall_filter, denied, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, CLONE_THREAD, 0))
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
    for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        _add(syscall_filter, denied, "socketpair", seccomp.Arg(1, seccomp.MASKED_EQ, 0xF, kind))
    for command in (8, 10, 15):  # F_SETOWN, F_SETSIG, F_SETOWN_EX
        _add(syscall_filter, denied, "fcntl", seccomp.Arg(1, seccomp.EQ, command))
    for request in (0x8901, 0x8902):  # FIOSETOWN, SIOCSPGRP
        _add(syscall_filter, denied, "ioctl", seccomp.Arg(1, seccomp.EQ, request))


def _add(syscall_filter: Any, action: int, name: str, *arguments: Any) -> None:
    try:
        syscall_filter.add_rule(action, name, *arguments)
    except (OSError, RuntimeError, ValueError):  # a call that this libseccomp does not know, or this machine has not
        if name in _NUMBERS:
            syscall_filter.add_rule(action, _NUMBERS[name], *arguments)
        elif name in ("execve", "ptrace", "clone", "prlimit64", "kill"):
            raise
