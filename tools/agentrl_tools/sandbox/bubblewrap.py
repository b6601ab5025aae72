"""bubblewrap: whether it works here, and a command within it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from agentrl_tools.sandbox.interpreter import list_hidden
from agentrl_tools.sandbox.users import get_credentials, is_root

INSIDE = Path(__file__).parent / "inside"
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


@cache
def explain_no_bubblewrap(user: int | None = None) -> str | None:
    """Explain why bubblewrap cannot be used here; ``None``: it can."""
    if (path := shutil.which("bwrap")) is None:
        return "bubblewrap is not installed (apt-get install bubblewrap)"
    probe = [path, *_list_namespaces(user), "--ro-bind", "/", "/", "true"]
    done = subprocess.run(
        probe, capture_output=True, text=True, env={}, timeout=20, check=False, **get_credentials(user)
    )
    return None if done.returncode == 0 else f"bubblewrap does not work here ({done.stderr.strip() or done.returncode})"


def wrap(
    interpreter: str,
    file: str,
    readable: Sequence[str],
    more: Sequence[str],
    user: int | None,
    capabilities: Sequence[str] = ("CAP_SETUID", "CAP_SETGID"),
) -> list[str]:
    """Build the command that runs a file of `INSIDE` in bubblewrap.

    Args:
        more: further arguments of bubblewrap's.
        capabilities: that the process has inside; those of an ordinary user reach no further than its namespaces.
    """
    parents = sorted({str(p) for path in [*readable, *DEVICES] for p in Path(path).parents} - {"/"})
    links = [p for p in readable if os.path.islink(p) and os.path.isdir(p)]
    open_to_all = [w for p in parents if p not in links for w in ("--perms", "0755", "--dir", p)]  # where they are made
    binds = [w for p in readable if p not in links and os.path.exists(p) for w in ("--ro-bind", p, p)]
    return [
        str(shutil.which("bwrap")),
        *_list_namespaces(user),
        *(w for c in capabilities for w in ("--cap-add", c)),
        *("--die-with-parent", "--new-session", "--hostname", "sandbox"),
        *more,  # first, since what is read may lie beneath
        *open_to_all,
        *binds,
        *(w for p in links for w in ("--symlink", os.readlink(p), p)),
        *(w for p in list_hidden(interpreter) for w in ("--perms", "0000", "--tmpfs", p, "--remount-ro", p)),
        *(w for p in DEVICES for w in ("--dev-bind", p, p)),
        *("--ro-bind", str(INSIDE), "/agentrl"),
        *("--remount-ro", "/"),
        *("--", interpreter, "-I", "-B", f"/agentrl/{file}"),
    ]


def _list_namespaces(user: int | None) -> list[str]:
    words = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if is_root(user):  # no user namespace: a real other user is better; and no /proc, which root could write to
        return [*words, "--cap-drop", "ALL"]
    return [*words, "--unshare-user"]
