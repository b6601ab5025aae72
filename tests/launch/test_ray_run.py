"""A whole run on a Ray cluster of three local nodes: ranks, servers and players, one of each killed on the way.

It really runs vLLM: `make vllm`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("ray")

from tests.helpers.fleet import SETTINGS, FleetRun, find_process, kill

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[2]
KEY = "the-key-of-this-test"
LAUNCH = "-m agentrl train --launcher ray --ranks 2 --servers 2 --max_restarts 3"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start a cluster of three nodes of two CPUs each; yield its address."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    size = {"object_store_memory": 100 << 20}
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **size})
    try:
        for _ in range(3):
            started.add_node(num_cpus=2, **size)
        yield str(started.address)
    finally:
        started.shutdown()


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
        run.wait_for_text(" is back, with the weights of version")
        run.end_well()
    finally:
        run.process.terminate()
        run.process.wait(120)
    told = run.read_log()
    assert "[server 1] agentrl: the vLLM server at" in told
    assert "agentrl: server 1 ended with status 2; it is started again" in told
    assert "agentrl: rank 1 was killed by SIGKILL; the learner's processes begin again at the newest checkpoint" in told
    assert "going on after step" in told
    assert not list(find_left(KEY))


def find_left(key: str) -> Iterator[int]:
    """Find processes of a run that has ended."""
    from tests.helpers.fleet import list_pids, read_words

    return (pid for pid in list_pids() if f"VLLM_API_KEY={key}" in read_words(pid, "environ"))
