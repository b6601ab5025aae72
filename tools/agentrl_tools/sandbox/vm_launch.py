"""The launch of an episode's machine: bubblewrap around the system's programs."""

from __future__ import annotations

import base64
import os
import platform
import sys

from agentrl import UserError
from agentrl_tools.sandbox import bubblewrap
from agentrl_tools.sandbox.interpreter import list_readable
from agentrl_tools.sandbox.launch import Launch, SandboxLimits
from agentrl_tools.sandbox.shell_filter import build_shell_filters
from agentrl_tools.sandbox.users import is_root

PROCESSES = 256  # and threads, of a machine
FILES_A_MB = 256
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")


def build_vm_launch(limits: SandboxLimits, user: int | None = None) -> Launch:
    """Build the launch of a machine with the system's programs. Raises UserError if bubblewrap cannot be used."""
    if (trouble := bubblewrap.explain_no_bubblewrap(user)) is not None:
        raise UserError(f"no machine to run commands in: {trouble}")
    interpreter = sys.executable if user is None else "/usr/bin/python3"
    own = (p for p in list_readable(interpreter) if not p.startswith("/usr/"))
    readable = list(dict.fromkeys([*(p for p in _SYSTEM if os.path.exists(p)), *own]))
    disk = ["--perms", "0755", "--dir", "/tmp", "--perms", "0755", "--dir", "/home"]
    more = ["--as-pid-1", "--proc", "/proc", "--remount-ro", "/proc", *disk, "--chdir", "/home"]
    needed = ("CAP_SYS_ADMIN", *(("CAP_KILL", "CAP_SETUID", "CAP_SETGID") if is_root(user) else ()))
    command = bubblewrap.wrap(interpreter, "agent.py", readable, more, user, needed)
    at = command.index("--", 1)
    command[at:at] = ["--remount-ro", "/"]  # once everything is in its place
    filters = [base64.b64encode(bpf).decode() for bpf in build_shell_filters()]
    settings = {**vars(limits), "filters": filters, "processes": _limit_processes(user)}
    return Launch(command, {**settings, "files": limits.disk_mb * FILES_A_MB, "user": None}, user)


def describe_walls(launch: Launch) -> str:
    """Say which walls a machine has here, and which it has not."""
    limits = launch.settings
    own = "user" if is_root(launch.user) else "user namespace"
    most = limits["processes"]
    stand = f"bubblewrap, own {own} for each, / read-only, seccomp, no network"
    stand += f", {limits['disk_mb']} MB of disk, {limits['memory_mb']} MB of memory"
    missing = "no cgroups (memory is looked at ten times a second, and that of all machines together is not limited)"
    if most == PROCESSES:
        stand += f", {most} processes"
    else:
        missing = f"processes of all machines are counted together (Linux before 5.14), {missing}"
    return f"machine of shell and files: {stand}; {missing}"


def _limit_processes(user: int | None) -> int:
    """Return how many processes and threads a machine may have.

    Before Linux 5.14 those of an ordinary user were counted in all namespaces together.
    """
    return PROCESSES if is_root(user) or _counts_by_namespace() else 1 << 15


def _counts_by_namespace() -> bool:
    major, minor = (int("".join(c for c in n if c.isdigit()) or 0) for n in platform.release().split(".")[:2])
    return (major, minor) >= (5, 14)
