"""The processes of vLLM end with the one that started them, whenever that goes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

OWNER = """
import os, subprocess, sys
child = "import os, sys; sys.stdin.read(1); from agentrl.runtime.parent_watch import end_with_parent"
child += "; end_with_parent(); print(os.getpid(), flush=True); import time; time.sleep(300)"
reading, writing = os.pipe()
subprocess.Popen(
    [sys.executable, "-c", child], stdin=reading, env={**os.environ, "AGENTRL_OWNER": str(os.getpid())}
)
os.close(reading)
if sys.argv[1] == "later":
    os.write(writing, b"x")
    sys.stdin.read()
"""


@pytest.mark.parametrize("when", ["before", "later"])
def test_it_ends_with_its_owner(when: str, tmp_path: Path) -> None:
    """Before the watch begins, as vLLM's imports take long, or later."""
    with (tmp_path / "out").open("w") as out:
        owner = subprocess.Popen([sys.executable, "-c", OWNER, when], stdin=subprocess.PIPE, stdout=out)
    until(lambda: (tmp_path / "out").read_text().endswith("\n") or (when == "before" and owner.poll() == 0))
    assert owner.stdin is not None
    owner.stdin.close()
    assert owner.wait(120) == 0
    until(lambda: not any(str(owner.pid) in owned(p) for p in Path("/proc").glob("[0-9]*")))


def owned(process: Path) -> list[str]:
    """Read the owners that a process is told."""
    try:
        words = (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
    return [w.decode().partition("=")[2] for w in words if w.startswith(b"AGENTRL_OWNER=")]


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)
