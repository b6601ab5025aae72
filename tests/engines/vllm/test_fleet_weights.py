"""All servers are sent the weights at once; who is gone is left out in time. No vLLM is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
import torch

from agentrl.engines.vllm import group_sender, server_client, server_pool
from agentrl.engines.vllm.group_sender import FleetClient, GroupBroken, GroupSender, Member
from agentrl.engines.vllm.server_pool import ServerEngine
from agentrl.engines.vllm.weight_client import HttpTransferClient, SyncDeadline
from agentrl.engines.vllm.weight_group import GroupOver, WeightGroup
from agentrl.errors import UserError
from tests.engines.vllm.test_server_client import changed, generated, same
from tests.helpers.tiny import greedy, qwen3
from tests.helpers.vllm_server import FakeVLLM, fake_vllm

pytestmark = pytest.mark.usefixtures("one_thread")
TIMEOUT_S = 1.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Wire:
    """The communicator of a group, and the workers at its other end: it blocks until each has what is sent."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.groups = list[WeightGroup]()
        self.receivers = 0  # that the next broadcasts wait for
        self.aborted = 0

    def join(self, group: WeightGroup) -> None:
        self.groups.append(group)
        group.adopt(Communicator(self, group.seat.world_size - 1))


class Communicator:
    def __init__(self, wire: Wire, workers: int) -> None:
        self.wire, self.workers = wire, workers
        self.over, self.sent, self.taken = threading.Event(), threading.Event(), threading.Semaphore(0)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        self.sent.set()
        for _ in range(self.workers):
            while not self.taken.acquire(timeout=0.02):
                if self.over.is_set():
                    raise RuntimeError("aborted")

    def destroy(self) -> None:
        self.wire.aborted += not self.over.is_set()
        self.over.set()


class Engine:
    """The calls of vLLM's sender, in its order."""

    def __init__(self, sender: GroupSender) -> None:
        self.sender = sender

    def send_weights(self) -> None:
        client, weights, group = self.sender.client, self.sender._weights, self.sender._group
        assert group is not None
        communicator = group.communicator
        assert isinstance(communicator, Communicator)
        client.start_weight_update()
        communicator.wire.tensors = {n: t.clone() for n, t in weights}
        update = group_sender._start(lambda: client.update_weights({"names": list(communicator.wire.tensors)}))
        group.broadcast(torch.zeros(1), src=0)
        update.result()
        client.finish_weight_update()


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    monkeypatch.setattr(WeightGroup, "join", lambda group, kind: wire.join(group))
    monkeypatch.setattr(
        GroupSender, "_build_init_info", lambda self, seat: {"rank_offset": 1, "world_size": seat.world_size}
    )
    monkeypatch.setattr(GroupSender, "_build_engine", lambda self: Engine(self))
    monkeypatch.setattr(group_sender, "GRACE_S", 0.5)
    monkeypatch.setattr(server_client, "PING_S", 0.5)
    monkeypatch.setattr(server_pool, "CHECK_S", 0.05)
    return wire


@pytest.fixture
async def fakes(wire: Wire) -> AsyncIterator[list[FakeVLLM]]:
    def receive(fake: FakeVLLM) -> None:
        communicator = wire.groups[-1].communicator
        assert isinstance(communicator, Communicator)
        communicator.sent.wait(10)
        fake.model.load_state_dict(wire.tensors, strict=False)
        communicator.taken.release()

    with fake_vllm(qwen3()) as one, fake_vllm(qwen3()) as two, fake_vllm(qwen3()) as three:
        for fake in (one, two, three):
            fake.backend, fake.receive = "gloo", receive
        yield [one, two, three]


def open_fleet(fakes: list[FakeVLLM], model: Any, timeout_s: float = TIMEOUT_S) -> ServerEngine:
    return ServerEngine([f.url for f in fakes], model, weight_sync_timeout_s=timeout_s)


async def test_one_group_has_all_servers_and_serves_all_updates(fakes: list[FakeVLLM], wire: Wire) -> None:
    model = qwen3()
    async with open_fleet(fakes, model, 30.0) as engine:
        for version in (1, 2):
            await engine.update_weights(changed(model), version)
            assert all(same(f, model) and (f.version, f.paused) == (str(version), False) for f in fakes)
    assert len(wire.groups) == 1
    assert [[i["rank_offset"] for i in f.init_infos] for f in fakes] == [[1], [2], [3]]
    assert {i["world_size"] for f in fakes for i in f.init_infos} == {4}
    stages = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
    for fake in fakes:
        assert [path for path in fake.asked if path in stages] == stages * 3
        assert fake.asked.index("/init_weight_transfer_engine") < fake.asked.index("/pause"), (
            "paused for the swap alone"
        )
    assert wire.aborted == 1, "left at the end"


@pytest.mark.parametrize("stage", ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"])
async def test_a_server_that_stops_is_left_out_in_time_and_is_in_the_next_group(
    fakes: list[FakeVLLM], wire: Wire, stage: str
) -> None:
    model, said = qwen3(), list[str]()
    async with open_fleet(fakes, model) as engine:
        engine.on_message = said.append
        fakes[1].stop_at = stage
        before = time.monotonic()
        await engine.update_weights(changed(model), 1)
        assert time.monotonic() - before < TIMEOUT_S + 5
        assert [r.up for r in engine.replicas] == [True, False, True]
        assert f"{fakes[1].url} did not finish {stage} in 1.0 s (engine.weight_sync_timeout_s allows more): " in said[0]
        assert same(fakes[0], model)
        assert same(fakes[2], model)
        assert [wire.groups[-1].seat.world_size, fakes[2].init_infos[-1]["rank_offset"]] == [3, 2]
        done = await engine.generate([5, 6, 7], greedy(4), session="a")
        assert (set(done.versions), list(done.token_ids)) == ({1}, generated(model, [5, 6, 7], 4))
        fakes[1].running.set()
        with anyio.fail_after(20):
            while not engine.replicas[1].answers:  # noqa: ASYNC110  nobody tells
                await anyio.sleep(0.02)
            await engine.update_weights(changed(model), 2)
        assert all(same(f, model) and f.version == "2" for f in fakes)
        assert said[-1] == f"{fakes[1].url} is back, with the weights of version 2"
        assert wire.groups[-1].seat.world_size == 4


@pytest.mark.parametrize("stage", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
async def test_a_server_that_ends_is_left_out_at_once(fakes: list[FakeVLLM], stage: str) -> None:
    model = qwen3()
    async with open_fleet(fakes, model, 60.0) as engine:
        fakes[0].kill_at = stage
        with anyio.fail_after(30):
            await engine.update_weights(changed(model), 1)
        assert [r.version for r in engine.replicas] == [0, 1, 1]
        assert f"does not answer {stage} (" in engine.replicas[0].status
        assert same(fakes[1], model)
        assert same(fakes[2], model)


async def test_a_server_that_refuses_has_a_second_chance_and_then_the_others_go_on(fakes: list[FakeVLLM]) -> None:
    model, real = qwen3(), fakes[2].answer
    async with open_fleet(fakes, model, 30.0) as engine:

        def refuse(path: str, body: dict[str, Any]) -> tuple[int, Any]:
            return (500, "no room") if path == "/update_weights" else real(path, body)

        fakes[2].answer = refuse  # type: ignore[method-assign]
        await engine.update_weights(changed(model), 1)
        assert [r.up for r in engine.replicas] == [True, True, False]
        assert "could not be given weights (500 from /update_weights" in engine.replicas[2].status
        assert fakes[2].asked.count("/update_weights") == 3
        assert same(fakes[0], model)


async def test_a_learner_that_fails_is_no_servers_fault(fakes: list[FakeVLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        raise UserError("a learner process is gone")

    async with open_fleet(fakes, qwen3(), 30.0) as engine:
        monkeypatch.setattr(Engine, "send_weights", fail)
        with pytest.raises(UserError, match="a learner process is gone"):
            await engine.update_weights(qwen3(), 1)
        assert all(r.up for r in engine.replicas)


async def test_a_fleet_that_cannot_begin_says_which_server_it_is(fakes: list[FakeVLLM]) -> None:
    fakes[1].kill_at = "/update_weights"
    with pytest.raises(UserError, match=rf"engine server: {fakes[1].url} does not answer /update_weights"):
        async with open_fleet(fakes, qwen3(), 30.0):
            pass
    fakes[0].backend = "memory"
    with pytest.raises(UserError, match=r"were started for several: .* for memory, .* for gloo"):
        async with open_fleet([fakes[0], fakes[2]], qwen3(), 30.0):
            pass


def test_a_call_that_one_server_fails_gives_the_group_up_before_it_is_told() -> None:
    told, deadline = list[str](), SyncDeadline(0.3, 0, "nccl")
    with fake_vllm(qwen3()) as good, fake_vllm(qwen3()) as bad:
        bad.stop_at = "/start_weight_update"
        clients = [HttpTransferClient({"base_url": f.url, "trust_env": False}, deadline, 5.0) for f in (good, bad)]
        fleet = FleetClient([Member(c, 1) for c in clients], deadline, told.append)
        with pytest.raises(GroupBroken) as raised:
            fleet.start_weight_update()
        assert told == ["/start_weight_update failed"]
        assert list(raised.value.lost) == [1]
        assert fleet.broken.result() is raised.value
        bad.running.set()
        for client in clients:
            client.close()


def test_a_sender_that_is_let_go_of_says_that_the_group_is_over() -> None:
    sender = GroupSender("nccl", [], None, SyncDeadline(1.0, 0, "nccl"))  # type: ignore[arg-type]
    sender.abort()
    sender._group = WeightGroup.meet(_seat())
    sender._engine = None
    sender.abort("given up")
    with pytest.raises(GroupOver, match="given up"), sender._group.watching(1.0):
        pass


def _seat() -> Any:
    from agentrl.engines.vllm.rendezvous import ANYWHERE
    from agentrl.engines.vllm.weight_group import Seat

    with ANYWHERE.reserve("http://127.0.0.1:1") as (address, port):
        return Seat(address, port, 0, 1, 1.0)
