"""Processes that a killed process had started to run code, queries and rewards end with it."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import wait_for_end

START = """
import os, signal, sys, time
import anyio
from pathlib import Path

def children():
    found, left = [], [os.getpid()]
    while left:
        for path in Path(f"/proc/{left.pop()}/task").glob("*/children"):
            try:
                new = [int(word) for word in path.read_text().split()]
            except OSError:  # a thread that has ended
                continue
            found, left = found + new, left + new
    return found

def die():
    print(*children(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def die_once(at_work):
    deadline = time.monotonic() + 60
    while len(children()) < at_work and time.monotonic() < deadline:
        time.sleep(0.05)
    die()
"""
REWARDS = """
from agentrl.runtime.processes import call_in_process

async def main():
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call_in_process, time.sleep, 600)  # at work when its parent dies
        await anyio.sleep(0.1)
        await call_in_process(len, "idle")
        die_once(2)

anyio.run(main)
"""
QUERIES = """
from agentrl_tools.sql_workers import open_workers

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"

async def main():
    request = {"database": sys.argv[1], "max_rows": 1, "max_chars": 100}
    async with open_workers(2) as workers, anyio.create_task_group() as tasks:
        tasks.start_soon(workers.ask, {**request, "query": ENDLESS, "timeout_s": 600})
        await anyio.sleep(0.5)
        await workers.ask({**request, "query": "SELECT 1", "timeout_s": 5})
        die_once(2)

anyio.run(main)
"""
SANDBOX = """
from agentrl_tools.python import Python

async def main():
    python = Python()
    async with python.open() as shared:
        episode = python.start_episode(shared)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: episode.tool_list[0](code="import time; time.sleep(600)"))
            await anyio.sleep(1.0)
            die_once(2)

anyio.run(main)
"""
AGENTS = """
from agentrl.agents.agent import AgentTask
from agentrl.agents.process_agent import ProcessAgent

SLEEP = "import time; time.sleep(600)"
AGENT = f"import subprocess as s, sys; p = s.Popen([sys.executable, '-c', {SLEEP!r}]); open(sys.argv[1], 'w'); p.wait()"
STARTED = anyio.Path(sys.argv[1] + ".started")

async def main():
    words = [sys.executable, "-c", AGENT, str(STARTED)]
    async with ProcessAgent(words).open() as agent, anyio.create_task_group() as tasks:
        tasks.start_soon(agent.run, AgentTask([], [], "http://h/v1", "key", ""))
        while not await STARTED.exists():
            await anyio.sleep(0.05)
        await anyio.sleep(0.5)
        die()

anyio.run(main)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    "started", [REWARDS, QUERIES, SANDBOX, AGENTS], ids=["rewards", "queries", "sandbox", "agents"]
)
def test_what_a_killed_process_had_started_ends_with_it(started: str, tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "db.sqlite").close()
    command = [sys.executable, "-c", START + started, str(tmp_path / "db.sqlite")]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    pids = [int(word) for word in killed.stdout.split()]
    assert len(pids) >= 2
    for pid in pids:
        wait_for_end(pid)
