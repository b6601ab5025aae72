"""Players on a Ray cluster of three nodes, one of which is lost: nothing else is."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from agentrl.errors import ConfigError, ProcessLostError, UserError
from agentrl.players import player, ray_tasks
from agentrl.players.connection import KEY_ENV
from agentrl.players.launchers import PlayerPlan, ray
from agentrl.players.ray_tasks import CPUS_ENV, _probe_address, run_player
from agentrl.settings import registry
from tests.helpers.players import KEY, open_table, roll_out_here, without_times
from tests.helpers.ray_cluster import open_cluster

pytestmark = pytest.mark.anyio
HAS_RAY = importlib.util.find_spec("ray") is not None
TASKS = list(range(120))


def make_plan(url: str, fail: list[BaseException], count: int = 3) -> PlayerPlan:
    command = (sys.executable, "-m", "agentrl", "player", url, "--wait_s", "0")
    return PlayerPlan(count, command, {KEY_ENV: KEY}, url, lambda text: None, fail.append)


async def test_a_task_plays_until_the_run_is_over_or_says_why_it_cannot() -> None:
    status, said = await asyncio.to_thread(run_player, "http://127.0.0.1:9", KEY, 0.0)
    assert status == 2
    assert said.startswith("no run answers at http://127.0.0.1:9 for 0 s")
    async with open_table() as table:
        playing = asyncio.create_task(asyncio.to_thread(run_player, table.controller.url, KEY))
        assert len((await table.rollout().group(3, 2)).trajectories) == 2
        await table.controller.close()
        assert await playing == (0, "")


async def test_a_task_that_fails_by_another_error_says_which_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would try it without end, and nobody would hear of it."""

    def build_renderer(described: object, body: bytes) -> None:
        raise ModuleNotFoundError("No module named 'transformers'")

    monkeypatch.setattr(player, "build_renderer", build_renderer)
    async with open_table() as table:
        status, said = await asyncio.to_thread(run_player, table.controller.url, KEY)
    assert status == 1
    assert "in build_renderer\n" in said
    assert said.endswith("ModuleNotFoundError: No module named 'transformers'")


def test_a_task_that_a_signal_ended_is_left_to_ray_which_starts_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def end(url: str, key: str, name: str, wait_s: float, say: Callable[[str], None]) -> signal.Signals:
        say("was ended by SIGTERM; 3 groups were played")
        return signal.SIGTERM

    monkeypatch.setattr(ray_tasks, "play", end)
    with pytest.raises(ProcessLostError, match="was ended by SIGTERM; 3 groups were played"):
        run_player("http://127.0.0.1:9", KEY)


class FakeTaskError(Exception):
    """Stand in for what Ray raises for a task that raised ``cause``."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("ray::run_player() (pid=7)")
        self.cause = cause


class FakeCluster:
    """A Ray that runs each task at once; ``result`` is what it returns, or what Ray raises where that is asked for."""

    def __init__(self, result: tuple[int, str] | Exception) -> None:
        self.result, self.taken = result, dict[str, Any]()

    def remote(self, *arguments: Any) -> FakeCluster:
        return self

    def options(self, **options: Any) -> FakeCluster:
        self.taken = options
        return self

    def wait(self, left: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return left, []

    def get(self, ref: object) -> tuple[int, str]:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def cancel(self, ref: object, *, force: bool) -> None:
        pass

    def bring_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the cluster that is connected to."""
        monkeypatch.setattr(ray_tasks, "check_package", lambda *arguments: None)
        monkeypatch.setattr(ray_tasks, "connect_cluster", lambda setting: self)


@pytest.mark.parametrize(
    ("result", "kind", "sentence"),
    [
        ((2, "http://a wants another key"), UserError, "a player on Ray cannot start: http://a wants another key"),
        ((75, "the run has gone"), ProcessLostError, "a player on Ray is lost: the run has gone"),
        ((1, "KeyError: 'renderer'"), UserError, "a player on Ray failed: KeyError: 'renderer'"),
        (
            FakeTaskError(ModuleNotFoundError("No module named 'agentrl'")),
            UserError,
            "a player on Ray failed: ModuleNotFoundError: No module named 'agentrl'",
        ),
        (
            RuntimeError("no node is left"),
            ProcessLostError,
            "a player on Ray is lost: Ray gave it up (RuntimeError: no node is left)",
        ),
    ],
)
async def test_a_lost_player_is_not_taken_for_a_users_mistake(
    monkeypatch: pytest.MonkeyPatch, result: tuple[int, str] | Exception, kind: type[UserError], sentence: str
) -> None:
    FakeCluster(result).bring_up(monkeypatch)
    failed: list[BaseException] = []
    async with ray(make_plan("http://127.0.0.1:9", failed, count=1)):
        with anyio.fail_after(60):
            while not failed:  # noqa: ASYNC110  of a condition that has no event
                await anyio.sleep(0.01)
    assert [(type(error), str(error)) for error in failed] == [(kind, sentence)]


@pytest.mark.parametrize(("text", "taken"), [(None, 1.0), ("", 1.0), ("0.5", 0.5), ("0", 0.0)])
async def test_the_cpus_of_a_player_are_those_of_the_variable(
    monkeypatch: pytest.MonkeyPatch, text: str | None, taken: float
) -> None:
    if text is None:
        monkeypatch.delenv(CPUS_ENV, raising=False)
    else:
        monkeypatch.setenv(CPUS_ENV, text)
    (cluster := FakeCluster((0, ""))).bring_up(monkeypatch)
    async with ray(make_plan("http://127.0.0.1:9", [])):
        assert cluster.taken["num_cpus"] == taken
        assert cluster.taken["retry_exceptions"] == [ProcessLostError]  # another one comes again on any node


@pytest.mark.parametrize("text", ["two", "-1", "nan", "inf"])
async def test_cpus_that_are_no_number_are_refused_with_the_variable(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(CPUS_ENV, text)
    FakeCluster((0, "")).bring_up(monkeypatch)
    with pytest.raises(ConfigError, match=rf"\$AGENTRL_PLAYER_CPUS is '{text}'; it is the number of CPUs of a node"):
        async with ray(make_plan("http://127.0.0.1:9", [])):
            pass


async def test_without_ray_the_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"players.launcher ray needs the package ray: pip install 'agentrl-gym\[ray\]'"
    ):
        async with ray(make_plan("http://127.0.0.1:9", [])):
            pass


@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "ray://head:10001", "127.0.0.1:9"])
async def test_an_address_of_no_cluster_is_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match=r"players.launcher ray: (\$RAY_ADDRESS is|there is no Ray cluster at 127)"):
        async with ray(make_plan("http://127.0.0.1:9", [])):
            pass


def test_an_address_where_nothing_listens_is_known_before_ray_tries_it() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConnectionRefusedError):
            _probe_address(address, "127.0.0.1")
    for left_to_ray in ("auto", "local", "head:", "head:99999"):
        _probe_address(left_to_ray, "127.0.0.1")


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None])
def test_what_listens_and_is_no_cluster_is_known_before_ray_tries_it(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None
) -> None:
    monkeypatch.setattr(ray_tasks, "PROBE_S", 0.2 if answer is None else 60.0)
    with answering(answer) as address, pytest.raises(OSError, match="does not speak gRPC"):
        _probe_address(address, "127.0.0.1")
    monkeypatch.setenv("RAY_USE_TLS", "1")  # Ray greets it as TLS does
    with answering(answer) as address:
        _probe_address(address, "no-such-host.invalid")


def test_what_greets_as_grpc_does_is_taken_for_a_cluster() -> None:
    with answering(bytes([0, 0, 18, 4, 0, 0, 0, 0, 0]) + bytes(18)) as address:
        _probe_address(address, "no-such-host.invalid")


@contextmanager
def answering(answer: bytes | None) -> Iterator[str]:
    """Listen, answer the first that comes, and yield the address; ``None``: say nothing, and stay."""
    with socket.socket() as listener, ThreadPoolExecutor(1) as thread:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(60)
        over = threading.Event()

        def serve() -> None:
            taken, _ = listener.accept()
            with taken:
                taken.sendall(answer or b"")
                if answer is None:
                    over.wait(60)

        serving = thread.submit(serve)
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            serving.result()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
async def test_a_cluster_of_three_nodes_loses_one_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_cluster(nodes=3) as (cluster, nodes):
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        failed: list[BaseException] = []
        try:
            async with open_table(timeout_s=30.0) as table, ray(make_plan(table.controller.url, failed)):
                await table.wait_for(lambda: len(table.controller.seats) == 3 or failed)
                assert not failed
                playing = asyncio.create_task(table.rollout(seconds=1.0).batch(TASKS, 2, seed=3))
                await table.wait_for(lambda: table.controller.turns > 10)
                await asyncio.to_thread(cluster.remove_node, nodes[0], False)
                await table.wait_for(lambda: table.controller.joined == 4)  # Ray starts it again on another node
                groups = await playing
                joined, dropped = table.controller.joined, table.controller.book.dropped
        finally:
            import ray as library

            library.shutdown()
    assert without_times(groups) == without_times(await roll_out_here(TASKS, 2, seed=3))
    assert not failed
    print(f"{len(TASKS)} groups on 3 nodes, one removed; {joined} players joined in all, {dropped} answers dropped")
