"""What a killed process had started ends soon after it, whatever that thinks of closed pipes and of SIGTERM."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agentrl_tools import reaper

# An MCP server that heeds neither the end of its stdin nor SIGTERM, with a child in a session of its own.
STUBBORN = """
import os, signal, subprocess, sys, time
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, __file__, "child"], start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open("pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""
RUN = """
import os, signal, time
import anyio
from agentrl_tools.mcp_session import Connection
from pathlib import Path

async def main():
    connection = Connection("{python} stubborn.py", start_timeout_s=600)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.open)
        while not Path("pids").exists() or len(Path("pids").read_text().split()) < 2:
            await anyio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_an_mcp_server_and_its_children_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    code = RUN.replace("{python}", sys.executable)
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False, timeout=120)
    assert run.returncode == -9
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 120
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(lives, pids))


def lives(pid: int) -> bool:
    """Not a zombie, which here nobody may be left to wait for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_is_known_by_what_it_was_started_with() -> None:
    environment = {**os.environ, reaper.VARIABLE: "abc"}
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)
    try:
        deadline = time.monotonic() + 60
        while reaper.find_marked("abc") != [child.pid] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert reaper.find_marked("abc") == [child.pid]
        assert reaper.find_marked("ab") == []
    finally:
        child.communicate(b"\n")


def test_what_was_started_ends_also_if_the_run_was_gone_before_the_reaper_looked() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = {**os.environ, reaper.VARIABLE: "late"}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment)
    subprocess.run([sys.executable, "-I", "-S", reaper.__file__, "late", str(gone.pid)], check=True, timeout=120)
    assert child.wait(timeout=60) != 0
