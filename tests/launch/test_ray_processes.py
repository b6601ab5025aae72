"""Processes of a run on a real Ray cluster of local nodes: places, lost nodes, refusals."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import UserError
from agentrl.launch.ray_processes import place_on_ray
from agentrl.launch.run_process import PlaceLost, RunPlan, RunProcess
from agentrl.settings import registry
from tests.helpers.ray_cluster import SIZE, open_cluster

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
pytestmark = pytest.mark.anyio


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[Any]]]:
    with open_cluster(nodes=2) as (cluster, started):
        monkeypatch.setenv("RAY_ADDRESS", str(cluster.address))
        yield cluster, started
        import ray

        ray.shutdown()


async def run(process: RunProcess, *words: str) -> tuple[int, str]:
    written: list[bytes] = []
    await process.start(words, {})
    status = await process.follow(lambda stream, data: written.append(data))
    return status, b"".join(written).decode()


async def test_without_ray_the_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--launcher ray needs the package ray: pip install 'agentrl-gym\[ray\]'"):
        async with place_on_ray(RunPlan(("train",)), print):
            pass


@needs_ray
async def test_without_a_cluster_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(UserError, match=r"--launcher ray: \$RAY_ADDRESS is ray://head:10001; a cluster's address is"):
        async with place_on_ray(RunPlan(("train",)), print):
            pass


@pytest.mark.slow
@needs_ray
async def test_processes_have_places_and_new_ones_where_a_node_is_lost(
    nodes: tuple[Any, list[Any]], tmp_path: Path
) -> None:
    cluster, started = nodes
    plan = RunPlan(("train",), ranks=1, servers=1, players=1, folder=str(tmp_path), wait_s=0)
    said: list[str] = []
    async with place_on_ray(plan, said.append) as placement:
        assert placement.shared_host
        assert placement.words == ("--players.launcher", "ray", "--players.host", "0.0.0.0")
        assert placement.environment["RAY_ADDRESS"] == cluster.address
        rank, server = placement.processes
        assert (rank.name, server.name) == ("rank 0", "server 1")
        assert await run(rank, "trian") == (2, "agentrl: no command 'trian'; did you mean 'train'?\n")
        assert (await run(server, "--version"))[0] == 0
        assert await rank.locate() == await server.locate()  # one machine
        await server.start(["serve-tools", "calculator", "--http", "0"], {})
        await server.kill()
        assert await server.follow(lambda stream, data: None) == -9
        await rank.start(["serve-tools", "calculator", "--http", "0"], {})
        for node in started:
            cluster.remove_node(node, False)
        with pytest.raises(PlaceLost):
            await rank.follow(lambda stream, data: None)
        cluster.add_node(num_cpus=3, **SIZE)
        while True:
            try:
                await rank.locate()
                break
            except PlaceLost:
                continue
        assert (await run(rank, "--version"))[0] == 0
    assert said == []


@pytest.mark.slow
@needs_ray
async def test_no_room_and_no_folder_are_refused(nodes: tuple[Any, list[Any]]) -> None:
    said: list[str] = []
    plan = RunPlan(("train",), ranks=2, servers=1, players=2, cpus=2, folder="/nowhere", wait_s=0)
    with pytest.raises(UserError) as told:
        async with place_on_ray(plan, said.append):
            pass
    asked = "the run asks for 3 x (2 CPU), and 2 CPUs for 2 players, and there is 4 of 4 CPU free on 3 nodes: "
    assert str(told.value).startswith(f"--launcher ray: {asked}")
    assert said == ["--launcher ray: 4 of 4 CPU free on 3 nodes; waiting for room, up to 0 s"]
    async with place_on_ray(RunPlan(("train",), cpus=2, folder="/nowhere"), said.append) as placement:
        with pytest.raises(UserError, match="rank 0 cannot be started: there is no folder /nowhere on the node"):
            await placement.processes[0].start(["--version"], {})
