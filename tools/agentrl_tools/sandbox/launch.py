"""The launch of the sandbox: bubblewrap if it works, landlock alone if not, a sentence if neither does."""

from __future__ import annotations

import base64
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentrl import UserError
from agentrl_tools.sandbox import bubblewrap, filters
from agentrl_tools.sandbox.bubblewrap import DEVICES, INSIDE
from agentrl_tools.sandbox.inside import confinement
from agentrl_tools.sandbox.inside.folders import remove
from agentrl_tools.sandbox.interpreter import is_readable_by_nobody, leave_out, list_hidden, list_readable
from agentrl_tools.sandbox.users import UserLease, is_root, lease_users

_OF_ROOT = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL", "CAP_SYS_NICE", "CAP_DAC_OVERRIDE")
_OF_A_USER = ("CAP_SYS_ADMIN",)
NEWEST_LANDLOCK = 7
SandboxKind = Literal["auto", "bubblewrap", "landlock"]


@dataclass(frozen=True)
class SandboxLimits:
    """Of a session. Memory is address space; ``cpu_s`` is of the whole session."""

    memory_mb: int = 1024
    cpu_s: int = 60
    output_bytes: int = 64 * 1024
    disk_mb: int = 64
    files: int = 4096
    threads: int = 64


@dataclass(frozen=True)
class Launch:
    """A command, its user (``None``: ours), and the settings that the server gets first."""

    command: Sequence[str]
    settings: Mapping[str, Any]
    user: int | None = None
    folder: str | None = None  # of ours, to be removed in the end
    kind: str = ""
    lease: UserLease | None = None


def choose_launch(
    kind: SandboxKind,
    limits: SandboxLimits,
    preload: Sequence[str],
    interpreter: str | None = None,
    user: int | None = None,
    *,
    landlock_abi: int = NEWEST_LANDLOCK,
    own_mounts: bool = True,
) -> Launch:
    """Build the launch of the best sandbox that works here.

    Args:
        interpreter: a Python whose packages the code may import; ours by default.
        user: start it with this user's rights, as root may; by default root's are dropped inside.
        landlock_abi: use no newer version of landlock; to see what holds on an older kernel.
        own_mounts: give each session mounts of its own, where the kernel does; to see what holds where it does not.

    Raises:
        UserError: neither can be had here; the sentence says why, and what to do.
    """
    kernel = {"landlock_abi": min(confinement.get_landlock_version(), landlock_abi), "tmpfs": own_mounts}
    no_bubblewrap, landlock = bubblewrap.explain_no_bubblewrap(user), _explain_no_landlock()
    if kind in ("auto", "bubblewrap") and no_bubblewrap is None:
        return _bubblewrap(limits, preload, interpreter or sys.executable, user, kernel)
    if kind in ("auto", "landlock") and landlock is None:
        return _landlock(limits, preload, interpreter or sys.executable, user, kernel)
    why = {"bubblewrap": no_bubblewrap, "landlock": landlock}.get(kind, f"{no_bubblewrap}; {landlock}")
    raise UserError(f"no sandbox to run code in: {why}; --tool.python.sandbox monty needs neither")


def _explain_no_landlock() -> str | None:
    if sys.platform != "linux":
        return f"{sys.platform} has no landlock"
    return None if confinement.get_landlock_version() else "this kernel has no landlock (it came with Linux 5.13)"


def _bubblewrap(
    limits: SandboxLimits, preload: Sequence[str], interpreter: str, user: int | None, kernel: Mapping[str, Any]
) -> Launch:
    readable = list_readable(interpreter)
    root = is_root(user)
    lease = lease_users() if root else None
    # A session's memory is mounted at /session/home; where it has no mounts of its own, it has one of /folders.
    space = ["--size", str(8 * limits.disk_mb << 20), "--perms", "1733", "--tmpfs", "/folders"]
    space += ["--perms", "0111", "--tmpfs", "/session", "--perms", "0755", "--dir", "/session/home"]
    space += ["--remount-ro", "/session", "--chdir", "/session", *([] if root else ["--proc", "/proc"])]
    capabilities = _OF_ROOT if root else _OF_A_USER
    command = bubblewrap.wrap(interpreter, "server.py", readable, space, user, capabilities)
    places = {"root": "/session", "folders": "/folders", "needs_landlock": False}
    places |= {"detach_proc": not root, "detach_folders": True, "listed": []}
    settings = _server_settings(limits, preload, readable, lease, files_as_root=False, **places, **kernel)
    return Launch(command, settings, user, kind="bubblewrap", lease=lease)


def _landlock(
    limits: SandboxLimits, preload: Sequence[str], interpreter: str, user: int | None, kernel: Mapping[str, Any]
) -> Launch:
    folder = _open_folder()
    shutil.copytree(INSIDE, f"{folder}/inside", ignore=shutil.ignore_patterns("__pycache__"))
    os.makedirs(f"{folder}/session/home")
    os.chmod(f"{folder}/session", 0o111)  # to be passed through, not listed
    os.mkdir(folders := f"{folder}/folders")
    os.chmod(folders, 0o1733)
    readable, listed = leave_out(list_readable(interpreter), list_hidden(interpreter))
    root = is_root(user)
    lease = lease_users() if root and confinement.get_capabilities() >> confinement.CAP_SETUID & 1 else None
    if user is not None:
        os.chown(folders, user, user)
    places = {"root": f"{folder}/session", "folders": folders, "needs_landlock": True}
    places |= {"detach_proc": False, "detach_folders": False, "listed": listed}
    files_as_root = lease is not None and not is_readable_by_nobody(interpreter)
    settings = _server_settings(limits, preload, readable, lease, files_as_root=files_as_root, **places, **kernel)
    command = [interpreter, "-I", "-B", f"{folder}/inside/server.py"]
    return Launch(command, settings, user, folder, "landlock", lease)


def _server_settings(
    limits: SandboxLimits, preload: Sequence[str], readable: Sequence[str], lease: UserLease | None, **more: Any
) -> dict[str, Any]:
    no_truncation = more["needs_landlock"] and more["landlock_abi"] < 3
    built = {
        "unknown": filters.build_unknown_filter(),
        "zygote": filters.build_zygote_filter(),
        "dispatcher": filters.build_dispatcher_filter(),
        "session": filters.build_session_filter(no_truncation=no_truncation),
    }
    return {
        **vars(limits),
        **{f"{name}_bpf": base64.b64encode(bpf).decode() for name, bpf in built.items()},
        "preload": list(preload),
        "readable": [*readable, *DEVICES],
        "users": list(lease.users) if lease else None,
        **more,
    }


def close_launch(launch: Launch) -> None:
    """Give back what a launch holds: its users, and its folder, whatever is in it."""
    if launch.lease is not None:
        launch.lease.close()
    if launch.folder is not None:
        remove(launch.folder)


def _open_folder() -> str:
    """Make a folder that another user may pass through, with a name that cannot be guessed."""
    folder = tempfile.mkdtemp(prefix="agentrl-sandbox-")
    os.chmod(folder, 0o711)
    return folder


def build_settings(limits: SandboxLimits, bpf: bytes, **more: Any) -> dict[str, Any]:
    """Build what a process inside is told first: its limits, its seccomp filter and ``more``."""
    return {"bpf": base64.b64encode(bpf).decode(), **vars(limits), **more}
