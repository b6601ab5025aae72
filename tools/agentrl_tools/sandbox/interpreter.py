"""The interpreter that the code runs in: what has to be readable for it, and by whom it is."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache

from agentrl import UserError
from agentrl_tools.sandbox.users import NOBODY, get_credentials

_OWN = ("agentrl", "agentrl_envs", "agentrl_tools")  # they have the answers of tasks
_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")


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


@cache
def list_readable(interpreter: str) -> list[str]:
    """List the interpreter, its library and its packages, and what they are linked with."""
    own = _list_paths(interpreter)
    paths = dict.fromkeys([*_SYSTEM, *own])
    return [p for p in paths if os.path.exists(p) and not any(p.startswith(f"{q}/") for q in paths)]


@cache
def list_hidden(interpreter: str) -> list[str]:
    """List our own packages beneath what is readable: a program could import its task's answer from them."""
    folders = dict.fromkeys(os.path.realpath(path) for path in _list_paths(interpreter))
    return [path for folder in folders for name in _OWN if os.path.isdir(path := f"{folder}/{name}")]


def leave_out(readable: Sequence[str], hidden: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what stands beside the hidden folders in those that are readable, and the folders that hold it."""
    left, opened = [], []
    waiting = list(readable)
    while waiting:
        path = waiting.pop()
        real = os.path.realpath(path)
        if real in hidden:
            continue
        if any(one.startswith(f"{real}/") for one in hidden):
            opened.append(path)
            waiting += [f"{path}/{name}" for name in os.listdir(path)]
        else:
            left.append(path)
    return left, opened


@cache
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
