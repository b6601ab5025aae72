"""Players on a Ray cluster of three nodes, one of which is lost: nothing else is."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys

import pytest

from agentrl.errors import UserError
from agentrl.players.launchers import KEY_ENV, PlayerPlan, ray
from agentrl.players.ray_tasks import run_player
from tests.helpers.players import KEY, ROOT, open_table, roll_out_here, without_times

pytestmark = pytest.mark.anyio
HAS_RAY = importlib.util.find_spec("ray") is not None
TASKS = list(range(60))


def make_plan(url: str, fail: list[BaseException], count: int = 3) -> PlayerPlan:
    command = (sys.executable, "-m", "agentrl", "player", url, "--wait_s", "0")
    return PlayerPlan(count, command, {KEY_ENV: KEY}, url, lambda text: None, fail.append)


def test_a_task_says_why_its_player_cannot_play_and_fails_where_it_died() -> None:
    words = [sys.executable, "-c"]
    assert run_player([*words, "raise SystemExit(0)"], {}) == ""
    refused = "import sys; print('agentrl: no run answers', file=sys.stderr); sys.exit(2)"
    assert run_player([*words, refused], {}) == "no run answers"
    with pytest.raises(RuntimeError, match="status -9"):
        run_player([*words, "import os; os.kill(os.getpid(), 9)"], {})


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
async def test_without_ray_the_sentence_names_the_extra() -> None:
    with pytest.raises(
        UserError, match=r"players.launcher ray needs the package ray: pip install 'agentrl-gym\[ray\]'"
    ):
        async with ray(make_plan("http://127.0.0.1:9", [])):
            pass


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
async def test_a_cluster_of_three_nodes_loses_one_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=2) for _ in range(3)]
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    failed: list[BaseException] = []
    try:
        async with open_table(timeout_s=30.0) as table, ray(make_plan(table.controller.url, failed)):
            await table.wait_for(lambda: len(table.controller.seats) == 3 or failed)
            assert not failed
            playing = asyncio.create_task(table.rollout(seconds=1.0).batch(TASKS, 2, seed=3))
            await table.wait_for(lambda: table.controller.turns > 10)
            await asyncio.to_thread(cluster.remove_node, nodes[0], False)
            groups = await playing
            joined, dropped = table.controller.joined, table.controller.book.dropped
    finally:
        import ray as library

        library.shutdown()
        cluster.shutdown()
    assert without_times(groups) == without_times(await roll_out_here(TASKS, 2, seed=3))
    assert not failed
    print(f"{len(TASKS)} groups on 3 nodes, one removed; {joined} players joined in all, {dropped} answers dropped")
