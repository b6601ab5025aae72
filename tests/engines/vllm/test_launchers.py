"""Launchers start the servers that a run plans, and end them with it. The servers here only print an address."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from agentrl.engines.vllm.launchers import ServerPlan, launch_servers, local, plan_servers
from agentrl.errors import ContractError, UserError
from agentrl.runtime.parent_watch import OWNER
from agentrl.settings.loader import build_config, read_overrides

SERVER = "import os, sys, time; print('loading'); print(f'http://127.0.0.1:{os.getpid()}', flush=True); time.sleep(600)"


def fake(count: int = 2, program: str = SERVER) -> ServerPlan:
    return ServerPlan(count, (sys.executable, "-c", program))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_servers_of_this_machine_live_as_long_as_the_block() -> None:
    async with local(fake()) as urls:
        pids = [int(url.rpartition(":")[2]) for url in urls]
        assert len(set(pids)) == 2
        assert all(map(is_running, pids))
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline


async def test_a_server_knows_whose_it_is_so_that_it_ends_with_a_run_that_is_killed() -> None:
    program = f"import os, time; print('http://' + os.environ['{OWNER}'], flush=True); time.sleep(300)"
    async with local(fake(1, program)) as urls:
        assert urls == [f"http://{os.getpid()}"]


async def test_a_server_that_ends_before_it_answers_is_said() -> None:
    with pytest.raises(UserError, match=r"a server ended before it answered \(exit status 3\)"):
        async with launch_servers("local", fake(1, "raise SystemExit(3)")):
            pass


def test_the_plan_has_the_runs_model_and_limits() -> None:
    words = "--env shop --engine launched --lora.rank 4 --engine.max_num_seqs 9"
    plan = plan_servers(build_config(read_overrides(words.split())), 2)
    assert plan.count == 2
    said = " ".join(plan.command)
    for part in ("serve", "--model nano", "--dtype float32", "--max_num_seqs 9", "--lora_rank 4"):
        assert part in said
    assert "--max_model_len" not in said


@pytest.fixture
def at_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_launchers.py").write_text(
        "from contextlib import asynccontextmanager\n"
        "ended = []\n"
        "@asynccontextmanager\n"
        "async def slurm(plan):\n"
        "    yield [f'http://node{i}:8000' for i in range(plan.count)]\n"
        "    ended.append(plan.count)\n"
        "@asynccontextmanager\n"
        "async def few(plan):\n"
        "    yield ['node0']\n"
        "@asynccontextmanager\n"
        "async def broken(plan):\n"
        "    raise OSError('no queue')\n"
        "    yield []\n"
    )


@pytest.mark.usefixtures("at_launchers")
async def test_a_launcher_of_ones_own() -> None:
    async with launch_servers("my_launchers.py:slurm", fake()) as urls:
        assert urls == ["http://node0:8000", "http://node1:8000"]
    assert sys.modules["my_launchers"].ended == [2]
    with pytest.raises(ContractError, match=r"gave \['node0'\], not 2 URLs of servers"):
        async with launch_servers("my_launchers.py:few", fake()):
            pass
    with pytest.raises(UserError, match=r"launcher 'my_launchers\.py:broken'.*OSError: no queue"):
        async with launch_servers("my_launchers.py:broken", fake()):
            pass
    with pytest.raises(UserError, match="no launcher 'slrm'"):
        async with launch_servers("slrm", fake()):
            pass


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--engine launched --engine.args.servers 0", "servers.*greater than or equal to 1"),
        ("--engine launched --engine.urls http://a:1", "engine.urls is for"),
        ("--engine server --engine.urls http://a:1 --engine.args.launcher local", "has no .*launcher"),
    ],
)
def test_settings_that_contradict_are_refused(words: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build_config(read_overrides(["--env", "shop", *words.split()]))
