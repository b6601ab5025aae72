"""A server that stops or ends while it is given weights is dropped in time; the others have them. No vLLM is needed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import anyio
import pytest
import torch
from transformers import PreTrainedModel

from agentrl.engines.vllm import server_client, server_pool
from agentrl.engines.vllm.server_client import Replica, ServerLost
from agentrl.engines.vllm.server_pool import ServerEngine
from agentrl.engines.vllm.weight_client import HttpTransferClient, SyncDeadline
from agentrl.engines.vllm.weight_sender import PolicyWeights
from tests.helpers.tiny import greedy, qwen3
from tests.helpers.vllm_server import FakeVLLM, fake_vllm

pytestmark = pytest.mark.usefixtures("one_thread")
TIMEOUT_S = 0.5
QUICK = ("/start_weight_update", "/update_weights")  # the others take the same way
STAGES = [
    stage if stage in QUICK else pytest.param(stage, marks=pytest.mark.slow)
    for stage in (
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/resume",
    )
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def fakes(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[FakeVLLM]]:
    monkeypatch.setattr(server_client, "PING_S", 0.2)
    monkeypatch.setattr(server_pool, "CHECK_S", 0.05)
    with fake_vllm(qwen3()) as one, fake_vllm(qwen3()) as two:
        yield [one, two]


def open_fleet(
    fakes: list[FakeVLLM], model: PreTrainedModel, update: str = "in-flight", timeout_s: float = TIMEOUT_S
) -> ServerEngine:
    return ServerEngine([f.url for f in fakes], model, update=update, weight_sync_timeout_s=timeout_s)  # type: ignore[arg-type]


def changed(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def generated(model: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    found = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=-1)
    return [int(i) for i in found[0, len(ids) :]]


def same(fake: FakeVLLM, model: PreTrainedModel) -> bool:
    return all(torch.equal(a, b) for a, b in zip(fake.model.parameters(), model.parameters(), strict=True))


async def until_back(engine: ServerEngine) -> None:
    with anyio.fail_after(60):
        while not all(r.up for r in engine.replicas):  # noqa: ASYNC110  nobody tells
            await anyio.sleep(0.02)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_server_that_stops_in_a_stage_is_dropped_and_takes_part_again(
    fakes: list[FakeVLLM], stage: str
) -> None:
    model, said = qwen3(), list[str]()
    async with open_fleet(fakes, model) as engine:
        engine.on_message = said.append
        assert [{*server.doing} for server in engine.list_servers()] == [{"no turn"}] * 2
        fakes[0].stop_at = stage
        before = time.monotonic()
        await engine.update_weights(changed(model), 1)
        assert time.monotonic() - before < TIMEOUT_S + 2
        assert [r.up for r in engine.replicas] == [False, True]
        listed = [(server.name, {*server.doing}) for server in engine.list_servers([2, 2])]
        assert listed == [(fakes[0].url, {"lost"}), (fakes[1].url, {"turns"})]
        assert said == [
            f"{fakes[0].url} did not finish {stage} in 0.5 s (engine.weight_sync_timeout_s allows more): its turns go "
            "to other servers until it answers again"
        ]
        done = await engine.generate([5, 6, 7], greedy(4), session="a")
        assert set(done.versions) == {1}
        assert list(done.token_ids) == generated(model, [5, 6, 7], 4)
        fakes[0].running.set()
        await until_back(engine)
        assert same(fakes[0], model)
        assert (fakes[0].paused, fakes[0].updating, fakes[0].version) == (False, False, "1")
        assert said[1:] == [f"{fakes[0].url} is back, with the weights of version 1"]


@pytest.mark.parametrize("stage", STAGES[1:4])
async def test_a_server_that_ends_in_a_stage_is_dropped_at_once(fakes: list[FakeVLLM], stage: str) -> None:
    model = qwen3()
    async with open_fleet(fakes, model, timeout_s=60.0) as engine:
        fakes[0].kill_at = stage
        before = time.monotonic()
        await engine.update_weights(changed(model), 1)
        assert time.monotonic() - before < 30, "nobody waited for its deadline"
        assert [r.version for r in engine.replicas] == [0, 1]
        assert f"does not answer {stage} (" in engine.replicas[0].status
        assert same(fakes[1], model)


async def test_a_server_that_stops_while_its_requests_are_finished_holds_nobody_up(fakes: list[FakeVLLM]) -> None:
    model = qwen3()
    async with open_fleet(fakes, model, "drain") as engine, anyio.create_task_group() as tasks:
        fakes[0].stop_at = "/inference/v1/generate"
        found = []

        async def sample() -> None:
            found.append(await engine.generate([5, 6, 7], greedy(4), session="a"))

        tasks.start_soon(sample)
        while fakes[0].running.is_set():  # noqa: ASYNC110  nobody tells
            await anyio.sleep(0.01)
        with anyio.fail_after(60):
            await engine.update_weights(changed(model), 1)
        assert [r.up for r in engine.replicas] == [False, True]
        assert same(fakes[1], model)
    assert len(found) == 1


async def test_a_sender_that_hangs_where_its_call_has_failed_is_left_behind(fakes: list[FakeVLLM]) -> None:
    """As vLLM's own for NCCL does: it waits on the device for a worker that will never come."""
    released = anyio.Event()

    class Hanging:
        def send_weights(self) -> None:
            with pytest.raises(Exception, match="500"):
                client.finish_weight_update("x")
            while not released.is_set():
                time.sleep(0.01)

        def shutdown(self) -> None: ...

    weights = PolicyWeights(qwen3())
    deadline = SyncDeadline(5.0, weights.count_bytes(), "nccl")
    lost = list[str]()
    replica = Replica(fakes[0].url, weights, capacity=4, backend="memory", deadline=deadline, on_lost=lost.append)
    await replica.connect(0, "in-flight")
    fakes[0].answer = lambda path, body: (500, "no room") if path == "/finish_weight_update" else (200, {})  # type: ignore[method-assign]
    client = HttpTransferClient({"base_url": fakes[0].url, "trust_env": False}, deadline)
    assert replica._client is not None
    replica._client.close()
    replica._client, replica._sender = client, Hanging()
    with (
        anyio.fail_after(60),
        pytest.raises(ServerLost, match=r'could not be given weights \(500 from /finish_weight_update: "no room"\)'),
    ):
        await replica.update_weights(1, "in-flight")
    assert len(lost) == 1
    assert not replica.up
    released.set()
    await replica.close()


def test_a_deadline_grows_with_the_bytes_and_is_longer_to_connect_nccl() -> None:
    small, large = SyncDeadline(10, 0, "memory"), SyncDeadline(10, 16 * 10**9, "nccl")
    assert (small.stage_s, small.connect_s) == (10, 10)
    assert (large.stage_s, large.connect_s) == (26, 86)
