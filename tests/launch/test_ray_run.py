"""A whole run on a Ray cluster of three local nodes: ranks, servers and players, one of each killed on the way.

It really runs vLLM: `make long ARGS=vllm`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("ray")

from tests.helpers.fleet import SETTINGS, FleetRun, find_process, kill, list_pids, read_words
from tests.helpers.ray_cluster import open_cluster

pytestmark = [pytest.mark.vllm, pytest.mark.long]
KEY = "the-key-of-this-test"
LAUNCH = "-m agentrl train --steps 26 --launcher ray --ranks 2 --servers 2 --max_restarts 3"


@pytest.fixture
def cluster() -> Iterator[str]:
    """Start a cluster of three nodes; yield its address."""
    with open_cluster(nodes=3) as (started, _):
        yield str(started.address)


def test_one_of_each_is_killed_and_the_run_comes_to_the_usual_reward(tmp_path: Path, cluster: str) -> None:
    environment = {"RAY_ADDRESS": cluster, "VLLM_API_KEY": KEY}
    run = FleetRun([*LAUNCH.split(), *SETTINGS.split()], tmp_path, environment)
    try:
        run.wait_for_steps(2)
        kill(
            find_process(lambda words, own: f"VLLM_API_KEY={KEY}" in own and any("server_process" in w for w in words))
        )
        run.wait_for_steps(5)
        kill(find_process(lambda words, own: words[0].startswith("ray::run_player")))
        run.wait_for_steps(8)
        kill(run.find_rank(1))
        run.end_well()
    finally:
        run.process.terminate()
        run.process.wait(120)
    told = run.read_log()
    assert re.search(r"agentrl: server [12] ended with status 2; it is started again", told)
    assert "Task run_player failed. There are infinite retries remaining" in told
    assert "agentrl: rank 1 was killed by SIGKILL; the learner's processes begin again at the newest checkpoint" in told
    assert "going on after step" in told
    assert not [pid for pid in list_pids() if f"VLLM_API_KEY={KEY}" in read_words(pid, "environ")]
