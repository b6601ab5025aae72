"""The launch of the sandbox: bubblewrap if it works, landlock alone if not, a sentence if neither does."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from agentrl import UserError
from agentrl_tools.sandbox import filters
from agentrl_tools.sandbox.inside import confinement

SandboxKind = Literal["auto", "bubblewrap", "landlock"]
NOBODY = 65534
INSIDE = Path(__file__).parent / "inside"
_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


@dataclass(frozen=True)
class SandboxLimits:
    """Of a session. Memory is address space; ``cpu_s`` is of the whole session."""

    memory_mb: int = 1024
    cpu_s: int = 60
    output_bytes: int = 64 * 1024
    disk_mb: int = 64


@dataclass(frozen=True)
class Launch:
    """A command, its user (``None``: ours), and the settings that the server gets first."""

    command: Sequence[str]
    settings: Mapping[str, Any]
    user: int | None = None
    folder: str | None = None  # of ours, to be removed in the end
    kind: str = ""


def choose_launch(
    kind: SandboxKind,
    limits: SandboxLimits,
    preload: Sequence[str],
    interpreter: str | None = None,
    user: int | None = None,
) -> Launch:
    """Build the launch of the best sandbox that works here.

    Args:
        interpreter: a Python whose packages the code may import; ours by default.
        user: start it with this user's rights, as root may; by default root's are dropped inside.

    Raises:
        UserError: neither can be had here; the sentence says why, and what to do.
    """
    bubblewrap, landlock = explain_no_bubblewrap(user), _explain_no_landlock()
    if kind in ("auto", "bubblewrap") and bubblewrap is None:
        return _bubblewrap(limits, preload, interpreter or sys.executable, user)
    if kind in ("auto", "landlock") and landlock is None:
        return _landlock(limits, preload, interpreter or sys.executable, user)
    why = {"bubblewrap": bubblewrap, "landlock": landlock}.get(kind, f"{bubblewrap}; {landlock}")
    raise UserError(f"no sandbox to run code in: {why}; --tool.python.sandbox monty needs neither")


@cache
def explain_no_bubblewrap(user: int | None = None) -> str | None:
    """Explain why bubblewrap cannot be used here; ``None``: it can."""
    if (path := shutil.which("bwrap")) is None:
        return "bubblewrap is not installed (apt-get install bubblewrap)"
    probe = [path, *_namespaces(user), "--ro-bind", "/", "/", "true"]
    done = subprocess.run(
        probe, capture_output=True, text=True, env={}, timeout=20, check=False, **get_credentials(user)
    )
    return None if done.returncode == 0 else f"bubblewrap does not work here ({done.stderr.strip() or done.returncode})"


def _explain_no_landlock() -> str | None:
    if sys.platform != "linux":
        return f"{sys.platform} has no landlock"
    return None if confinement.get_landlock_version() else "this kernel has no landlock (it came with Linux 5.13)"


@cache
def is_readable_by_nobody(interpreter: str) -> bool:
    """Return whether user `NOBODY` can start the interpreter. Under root's home folder, mode 0700, it cannot.

    There the landlock sandbox keeps user 0 without any capability instead: what it may read and write is landlock's
    list, what it may call is seccomp's.
    """
    try:
        done = subprocess.run(
            [interpreter, "-I", "-B", "-c", "pass"],
            capture_output=True,
            timeout=20,
            check=False,
            **get_credentials(NOBODY),
        )
    except OSError:
        return False
    return done.returncode == 0


def build_vm_launch(limits: SandboxLimits, user: int | None = None) -> Launch:
    """Build the launch of a machine with the system's programs. Raises UserError if bubblewrap cannot be used."""
    if (trouble := explain_no_bubblewrap(user)) is not None:
        raise UserError(f"no machine to run commands in: {trouble}")
    system = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
    interpreter = sys.executable if user is None else "/usr/bin/python3"
    own = (p for p in _readable(interpreter) if not p.startswith("/usr/"))
    readable = list(dict.fromkeys([*(p for p in system if os.path.exists(p)), *own]))
    size = str(limits.disk_mb << 20)
    space = [
        "--perms",
        "1777",
        "--size",
        size,
        "--tmpfs",
        "/tmp",
        "--perms",
        "1777",
        "--size",
        size,
        "--tmpfs",
        "/home",
    ]
    proc = ["--proc", "/proc", "--remount-ro", "/proc"]
    command = _wrap(interpreter, "agent.py", readable, [*proc, *space, "--chdir", "/home"], user)
    return Launch(
        command, _settings(limits, filters.build_shell_filter(), root="/home/agent", user=_drops_to(user)), user
    )


def _bubblewrap(limits: SandboxLimits, preload: Sequence[str], interpreter: str, user: int | None) -> Launch:
    readable = _readable(interpreter)
    space = ["--perms", "1777", "--size", str(8 * limits.disk_mb << 20), "--tmpfs", "/session", "--chdir", "/session"]
    command = _wrap(interpreter, "server.py", readable, space, user)
    settings = _settings(
        limits,
        filters.build_server_filter(),
        root="/session/s",
        user=_drops_to(user),
        landlock=False,
        drop_capabilities=False,
    )
    return Launch(command, {**settings, **_session(preload, readable)}, user, kind="bubblewrap")


def _wrap(interpreter: str, file: str, readable: Sequence[str], more: Sequence[str], user: int | None) -> list[str]:
    parents = sorted({str(p) for path in [*readable, *_DEVICES] for p in Path(path).parents} - {"/"})
    links = [p for p in readable if os.path.islink(p) and os.path.isdir(p)]
    open_to_all = [w for p in parents if p not in links for w in ("--perms", "0755", "--dir", p)]  # where they are made
    binds = [w for p in readable if p not in links and os.path.exists(p) for w in ("--ro-bind", p, p)]
    return [
        str(shutil.which("bwrap")),
        *_namespaces(user),
        *("--die-with-parent", "--new-session", "--hostname", "sandbox"),
        *more,  # first, since what is read may lie beneath
        *open_to_all,
        *binds,
        *(w for p in links for w in ("--symlink", os.readlink(p), p)),
        *(w for p in _DEVICES for w in ("--dev-bind", p, p)),
        *("--ro-bind", str(INSIDE), "/agentrl"),
        *("--", interpreter, "-I", "-B", f"/agentrl/{file}"),
    ]


def _landlock(limits: SandboxLimits, preload: Sequence[str], interpreter: str, user: int | None) -> Launch:
    folder = _open_folder()
    shutil.copytree(INSIDE, f"{folder}/inside", ignore=shutil.ignore_patterns("__pycache__"))
    os.makedirs(root := f"{folder}/s")
    readable = _readable(interpreter)
    keeps_root = _is_root(user) and not is_readable_by_nobody(interpreter)
    drops_to = None if keeps_root else _drops_to(user)
    if os.getuid() == 0 and not keeps_root:
        os.chown(root, user or NOBODY, user or NOBODY)
    settings = _settings(
        limits, filters.build_server_filter(), root=root, user=drops_to, landlock=True, drop_capabilities=keeps_root
    )
    command = [interpreter, "-I", "-B", f"{folder}/inside/server.py"]
    return Launch(command, {**settings, **_session(preload, readable)}, user, folder, "landlock")


def _open_folder() -> str:
    """Make a folder that another user may pass through, with a name that cannot be guessed."""
    import tempfile

    folder = tempfile.mkdtemp(prefix="agentrl-sandbox-")
    os.chmod(folder, 0o711)
    return folder


def _settings(limits: SandboxLimits, bpf: bytes, **more: Any) -> dict[str, Any]:
    return {"bpf": base64.b64encode(bpf).decode(), **vars(limits), **more}


def _session(preload: Sequence[str], readable: Sequence[str]) -> dict[str, Any]:
    own = base64.b64encode(filters.build_session_filter()).decode()
    return {"preload": list(preload), "readable": [*readable, *_DEVICES], "session_bpf": own}


@cache
def _readable(interpreter: str) -> list[str]:
    """List the interpreter, its library and its packages, and what they are linked with."""
    own = _list_paths(interpreter)
    paths = dict.fromkeys([*_SYSTEM, *own])
    return [p for p in paths if os.path.exists(p) and not any(p.startswith(f"{q}/") for q in paths)]


def _list_paths(interpreter: str) -> list[str]:
    if interpreter == sys.executable:
        paths = [sys.executable, os.path.realpath(sys.executable), sysconfig.get_path("stdlib")]
        paths += [sysconfig.get_path("platstdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        paths += [f"{sys.prefix}/pyvenv.cfg", f"{sys.base_prefix}/lib"]
        return _with_links(interpreter) + [p for p in paths if p]
    ask = (
        "import os, sys, sysconfig as s; print('\\n'.join([sys.executable, os.path.realpath(sys.executable), "
        "s.get_path('stdlib'), s.get_path('platstdlib'), s.get_path('purelib'), s.get_path('platlib'), "
        "sys.prefix + '/pyvenv.cfg', sys.base_prefix + '/lib/python3']))"
    )
    try:
        done = subprocess.run([interpreter, "-I", "-c", ask], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"tool.python.interpreter {interpreter!r} is no Python that runs: {error}") from None
    return _with_links(interpreter) + done.stdout.split("\n")[:-1]


def _with_links(path: str) -> list[str]:
    """List a file, and what it is a link to, link by link."""
    paths = [path]
    while os.path.islink(path):
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
        paths.append(path)
    return paths


def _namespaces(user: int | None) -> list[str]:
    words = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if _is_root(user):  # no user namespace: a real other user is better; and no /proc, which root could write to
        return [*words, "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [*words, "--unshare-user"]


def _is_root(user: int | None) -> bool:
    return os.getuid() == 0 and user in (None, 0)


def _drops_to(user: int | None) -> int | None:
    """Return the user that the process becomes, once inside."""
    return NOBODY if _is_root(user) else None


def get_credentials(user: int | None) -> dict[str, Any]:
    """Return the arguments of a process that is to be this user's."""
    return {} if user is None else {"user": user, "group": user, "extra_groups": []}
