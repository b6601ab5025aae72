"""Processes of a run on a real Ray cluster of local nodes: places, lost nodes, refusals."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from agentrl.errors import UserError
from agentrl.launch import ray_processes
from agentrl.launch.ray_processes import RayProcess, _choose_player_arguments, place_on_ray
from agentrl.launch.run_process import MachineLost, RunPlan, RunProcess
from agentrl.settings import registry
from tests.helpers.ray_cluster import SIZE, open_cluster

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
pytestmark = pytest.mark.anyio
NO_GPU = "--launcher ray: no node has a GPU, so the run asks for none (--require_gpus, where an autoscaler has some)"


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[Any]]]:
    with open_cluster(nodes=2) as (cluster, started):
        monkeypatch.setenv("RAY_ADDRESS", str(cluster.address))
        yield cluster, started
        import ray

        ray.shutdown()


async def run(process: RunProcess, *arguments: str) -> tuple[int, str]:
    written: list[bytes] = []
    await process.start(arguments, {})
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
        assert placement.spans_machines
        assert placement.arguments == ("--players.launcher", "ray", "--players.host", "0.0.0.0")
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
        with pytest.raises(MachineLost):
            await rank.follow(lambda stream, data: None)
        cluster.add_node(num_cpus=3, **SIZE)
        while True:
            try:
                await rank.locate()
                break
            except MachineLost:
                continue
        assert (await run(rank, "--version"))[0] == 0
    assert said == [NO_GPU]


@pytest.mark.slow
@needs_ray
async def test_it_ends_where_a_lost_node_has_no_other(
    nodes: tuple[Any, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_processes, "KILL_S", 0.5)  # Ray itself gives the task up after ten
    cluster, started = nodes
    with anyio.fail_after(300):
        async with place_on_ray(RunPlan(("train",), folder=str(tmp_path)), lambda sentence: None) as placement:
            (rank,) = placement.processes
            await rank.start(["serve-tools", "calculator", "--http", "0"], {})
            for node in started:
                cluster.remove_node(node, False)
            with pytest.raises(MachineLost):
                await rank.follow(lambda stream, data: None)
            with anyio.move_on_after(2) as waiting:
                await rank.locate()
            assert waiting.cancelled_caught


class _Task:
    """A task of Ray's whose methods raise what they are told, or never answer."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=self._answer)

    async def _answer(self, *_arguments: object) -> str:
        if self.error is None:
            await anyio.sleep_forever()
        raise self.error or KeyError


def make_process(task: _Task) -> tuple[RayProcess, list[_Task]]:
    """Make a process whose task is a fake; return it, and the tasks that Ray is asked to kill."""
    import ray.exceptions

    killed: list[_Task] = []
    started = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: task))
    module = SimpleNamespace(remote=lambda _: started, kill=killed.append, exceptions=ray.exceptions)
    return RayProcess("rank 0", module, SimpleNamespace(), 0, {"CPU": 1.0}, "."), killed


@needs_ray
async def test_a_task_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_processes, "KILL_S", 0.05)
    task = _Task()
    process, killed = make_process(task)
    await process.kill()
    assert killed == []  # there is none yet
    with anyio.move_on_after(0.05):
        await process.locate()
    with anyio.fail_after(60):
        await process.kill()
    assert killed == [task]


@needs_ray
@pytest.mark.parametrize(
    ("kind", "last_line"),
    [
        ("RayActorError", "its node was removed"),
        ("ActorUnschedulableError", "its node was removed"),
        ("ActorPlacementGroupRemoved", "The placement group corresponding to this Actor has been removed."),
    ],
)
async def test_a_task_that_has_no_node_any_more_has_lost_its_machine(kind: str, last_line: str) -> None:
    import ray.exceptions

    error = getattr(ray.exceptions, kind)
    said = f"{'the actor is gone ' * 30}\nits node was removed"
    process, _ = make_process(_Task(error(error_msg=said) if kind == "RayActorError" else error(said)))
    with pytest.raises(MachineLost) as told:
        await process.locate()
    assert str(told.value) == last_line


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({}, "--players.launcher ray --players.host 0.0.0.0"),
        ({"players.host": "10.0.0.7"}, "--players.launcher ray"),
        ({"players.host": "10.0.0.7", "players.launcher": "ray"}, ""),
    ],
)
def test_players_are_started_and_join_as_the_user_chose(given: dict[str, object], arguments: str) -> None:
    assert " ".join(_choose_player_arguments(RunPlan(("train",), players=1, given=given))) == arguments
    assert _choose_player_arguments(RunPlan(("train",), given=given)) == ()


@pytest.mark.slow
@needs_ray
async def test_gpus_that_no_node_has_yet_are_asked_for(nodes: tuple[Any, list[Any]]) -> None:
    plan = RunPlan(("train",), servers=1, server_gpus=2, wait_s=0, require_gpus=True)
    with pytest.raises(UserError, match=r"asks for 1 x \(1 CPU, 1 GPU\), 1 x \(1 CPU, 2 GPU\), and there is 4 of 4"):
        async with place_on_ray(plan, lambda sentence: None):
            pass


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
    assert said == [NO_GPU, "--launcher ray: 4 of 4 CPU free on 3 nodes; waiting for room, up to 0 s"]
    async with place_on_ray(RunPlan(("train",), cpus=2, folder="/nowhere"), said.append) as placement:
        with pytest.raises(UserError, match="rank 0 cannot be started: there is no folder /nowhere on the node"):
            await placement.processes[0].start(["--version"], {})
