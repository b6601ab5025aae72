"""One broadcast to two vLLM servers, over gloo where GPUs have NCCL: the same group, calls and deadlines.

These really run vLLM: `make vllm`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import anyio
import pytest

pytest.importorskip("vllm")

from agentrl.engines.vllm import server_pool
from agentrl.engines.vllm.server_pool import ServerEngine
from agentrl.engines.vllm.server_process import ServerSettings, VLLMServer
from agentrl.engines.vllm.transfer_backend import GLOO
from agentrl.errors import UserError
from agentrl.models.source import locate_model
from tests.engines.vllm.test_server_pool import engine_process
from tests.engines.vllm.test_vllm_engine import PROMPTS, changed, generated, nano, until
from tests.helpers.tiny import greedy

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("one_thread")]
SERVING = ServerSettings(locate_model("nano"), max_context=512, capacity=16, backend=GLOO)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def servers() -> Iterator[list[VLLMServer]]:
    with VLLMServer(SERVING) as one, VLLMServer(SERVING) as two:
        yield [one.wait(), two.wait()]


async def check_all(engine: ServerEngine, model: object, version: int) -> None:
    for replica in engine.replicas:
        for prompt in PROMPTS:
            done, _ = await replica.generate(prompt, greedy(20))
            assert list(done.token_ids) == generated(model, prompt, 20)
            assert set(done.versions) == {version}


async def test_one_broadcast_gives_both_servers_the_same_weights(servers: list[VLLMServer]) -> None:
    model = nano()
    async with ServerEngine([s.url for s in servers], model, capacity=16) as engine:
        await check_all(engine, model, 0)
        assert engine._fleet is not None
        sender = engine._fleet._sender
        for version in (1, 2):
            await engine.update_weights(changed(model), version)
            await check_all(engine, model, version)
        assert engine._fleet._sender is sender, "one group for all updates"
        assert sender is not None
        assert sender.client.world_size == 3


@pytest.mark.parametrize("stage", ["start_weight_update", "update_weights", "finish_weight_update"])
async def test_a_server_that_stops_in_the_middle_is_left_out_and_the_other_is_sent_them_again(
    servers: list[VLLMServer], stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.engines.vllm.weight_client import HttpTransferClient

    monkeypatch.setattr(server_pool, "CHECK_S", 0.5)
    core, model, send = engine_process(servers[0].pid), nano(), getattr(HttpTransferClient, stage)

    def stop(self: HttpTransferClient, *arguments: object) -> None:
        if str(self._http.base_url).rstrip("/") == servers[0].url:
            os.kill(core, signal.SIGSTOP)
        send(self, *arguments)

    async with ServerEngine([s.url for s in servers], model, capacity=16, weight_sync_timeout_s=8.0) as engine:
        monkeypatch.setattr(HttpTransferClient, stage, stop)
        try:
            with anyio.fail_after(60):
                await engine.update_weights(changed(model), 1)
        finally:
            os.kill(core, signal.SIGCONT)
            monkeypatch.setattr(HttpTransferClient, stage, send)
        assert [(r.up, r.version) for r in engine.replicas] == [(False, 0), (True, 1)]
        assert f"did not finish /{stage} in 8.0 s" in engine.replicas[0].status
        done, _ = await engine.replicas[1].generate([7], greedy(20))
        assert (list(done.token_ids), set(done.versions)) == (generated(model, [7], 20), {1})
        with anyio.fail_after(60):
            await until(lambda: engine.replicas[0].answers)
            await engine.update_weights(changed(model), 2)  # it is in the next group
        assert [r.up for r in engine.replicas] == [True, True]
        await check_all(engine, model, 2)


async def test_servers_that_were_started_for_something_else_are_named(servers: list[VLLMServer]) -> None:
    with pytest.raises(UserError, match=r"engine.weight_transfer memory: .* was started for gloo; start it with"):
        async with ServerEngine([servers[0].url], nano(), weight_transfer="memory"):
            pass


async def test_a_server_that_is_killed_in_a_broadcast_is_left_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.engines.vllm.weight_client import HttpTransferClient

    model, send = nano(), HttpTransferClient.update_weights
    with VLLMServer(SERVING) as survivor, VLLMServer(SERVING) as victim:
        survivor.wait(), victim.wait()
        core = engine_process(victim.pid)

        def kill(self: HttpTransferClient, update_info: object) -> None:
            if str(self._http.base_url).rstrip("/") == victim.url:
                os.kill(core, signal.SIGKILL)
                os.kill(victim.pid, signal.SIGKILL)
            send(self, update_info)

        urls = [victim.url, survivor.url]
        async with ServerEngine(urls, model, capacity=16, weight_sync_timeout_s=60.0) as engine:
            monkeypatch.setattr(HttpTransferClient, "update_weights", kill)
            with anyio.fail_after(40):  # less than a stage may take
                await engine.update_weights(changed(model), 1)
            assert [(r.up, r.version) for r in engine.replicas] == [(False, 0), (True, 1)]
            done = await engine.generate([7], greedy(20), session="a")
            assert (list(done.token_ids), set(done.versions)) == (generated(model, [7], 20), {1})
