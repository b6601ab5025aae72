"""The walls of a session: what its process gives up between its fork and the first line of a model's code."""

from __future__ import annotations

import base64
import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl_tools.sandbox.inside import confinement, namespaces
else:  # by its file: this runs where the package is not
    sys.path.insert(0, str(Path(__file__).parent))
    import confinement
    import namespaces

MEGABYTE = 1 << 20


@dataclass
class Walls:
    """Walls that all sessions of a zygote share, made once: the less a session has to do, the cheaper is a call."""

    settings: dict[str, Any]
    proc: int | None  # a descriptor of /proc
    landlock: int  # its version
    tmpfs: bool = True  # a session has a mount of its own; else a folder among others'
    ruleset: int | None = None

    def __post_init__(self) -> None:
        limits = self.settings
        self.bpf = base64.b64decode(limits["session_bpf"])
        alone = self.tmpfs or limits["users"]  # in the count of its user's threads
        threads = limits["threads"] + (0 if alone else _count_own_threads())
        self.limits = confinement.build_limits(
            AS=limits["memory_mb"] * MEGABYTE, CPU=limits["cpu_s"], NPROC=threads, NOFILE=64
        )
        self.mountpoint = f"{limits['root']}/home"

    def prepare(self) -> None:
        """Make the ruleset that is the same for all; a rule for a mount's parent holds for what is mounted."""
        root = str(self.settings["root"])
        writable = [root, "/dev/null"] if self.tmpfs else ["/dev/null"]
        self.ruleset = self._build_ruleset(writable)

    def enter(self, user: int | None, name: str) -> None:
        """Put this process, a fork, behind all of them.

        Args:
            user: of its own; ``None`` stays who it is.
            name: of its folder, where it has no mount of its own.
        """
        os.setpgid(0, 0)
        ruleset = self.ruleset
        if self.tmpfs:
            folder = self._mount(user)
            os.chdir(folder)
        self._switch(user)
        if not self.tmpfs:
            folder = f"{self.settings['folders']}/{name}"
            os.mkdir(folder, 0o700)
            os.chdir(folder)
            ruleset = self._build_ruleset([folder, "/dev/null"])
        os.environ["HOME"] = os.environ["TMPDIR"] = folder
        confinement.drop_privileges()
        confinement.die_with_parent()
        confinement.restrict(ruleset)
        confinement.set_limits(self.limits)
        confinement.load_seccomp_filter(self.bpf)

    def _build_ruleset(self, writable: list[str]) -> int | None:
        settings = self.settings
        return confinement.build_ruleset(settings["readable"], writable, self.landlock, settings["listed"])

    def _mount(self, user: int | None) -> str:
        owner, group = (os.getuid(), os.getgid()) if user is None else (user, user)
        if user is None:
            assert self.proc is not None
            namespaces.open_user_namespace(self.proc, owner, group)
        else:
            namespaces.open_mount_namespace()
            if self.settings["files_as_root"]:
                owner = 0
        limits = self.settings
        namespaces.mount_tmpfs(self.mountpoint, owner, group, limits["disk_mb"], limits["files"])
        return self.mountpoint

    def _switch(self, user: int | None) -> None:
        if user is not None:
            confinement.switch_user(user, files_as_root=self.settings["files_as_root"])


def _count_own_threads() -> int:
    """Count the threads of this user, where /proc shows them."""
    threads = 0
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        with contextlib.suppress(OSError):  # it ended, or is no process
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                threads += len(os.listdir(f"/proc/{name}/task"))
    return threads
