"""A policy with an adapter on vLLM: the adapter alone is sent, and the base weights there are never touched.

These really run vLLM: `make vllm`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("peft")

from agentrl.engines.vllm import lora_sender
from agentrl.engines.vllm.engine import VLLMEngine
from agentrl.engines.vllm.server_pool import ServerEngine
from agentrl.engines.vllm.server_process import ServerSettings, VLLMServer
from agentrl.errors import UserError
from agentrl.models import lora
from agentrl.models.source import locate_model
from agentrl.settings.learner import LoraConfig
from agentrl.types import SamplingParams
from tests.engines.vllm.test_vllm_engine import PROMPTS, generated, nano
from tests.helpers.tiny import error, greedy, reference, together, updated_amid

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("one_thread")]
SERVING = ServerSettings(locate_model("nano"), max_context=512, capacity=16, lora_rank=6)
ROWS = SamplingParams(max_tokens=400)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def adapted(seed: int | None = None, rank: int = 6) -> Any:
    """nano with an adapter: a fresh one, which does nothing, or an arbitrary one."""
    model = lora.add_adapter(nano(), LoraConfig(rank=rank), "nano")
    return model if seed is None else stirred(model, seed)


def stirred(model: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.2)
    return model


def plain(model: Any) -> Any:
    return model.get_base_model()


@pytest.fixture(scope="module")
async def in_process() -> AsyncIterator[VLLMEngine]:
    async with VLLMEngine(adapted(), capacity=16, max_context=512) as engine:
        yield engine


@pytest.fixture(scope="module")
def server() -> Iterator[VLLMServer]:
    with VLLMServer(SERVING) as server:
        yield server.wait()


@pytest.fixture(params=["in process", "server"])
async def engine(request: pytest.FixtureRequest, in_process: VLLMEngine, server: VLLMServer) -> AsyncIterator[Any]:
    if request.param == "in process":
        await in_process.update_weights(adapted(), 0)
        yield in_process
    else:
        async with ServerEngine([server.url], adapted(), capacity=16) as fleet:
            yield fleet


async def test_turns_are_those_of_the_adapted_model(engine: Any) -> None:
    for version, seed in ((1, 3), (2, 4)):
        model = adapted(seed)
        await engine.update_weights(model, version)
        found = await together(*(lambda p=p: engine.generate(p, greedy(20), session=str(p)) for p in PROMPTS))
        for prompt, done in zip(PROMPTS, found, strict=True):
            assert list(done.token_ids) == generated(plain(model), prompt, 20)
            assert set(done.versions) == {version}
        assert list(found[0].token_ids) != generated(nano(), PROMPTS[0], 20)
        params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=30, seed=4)
        done = await engine.generate([5, 6, 7], params, session="a")
        assert error(plain(model), [5, 6, 7], done, params) < 1e-4


async def test_requests_that_run_go_on_with_the_new_adapter(engine: Any) -> None:
    new = adapted(5)
    calls = [
        lambda s=s: engine.generate([5, 6, 7], SamplingParams(max_tokens=400, seed=s), session=str(s)) for s in range(4)
    ]
    for done in await updated_amid(engine, calls, adapted(), new):
        assert set(done.versions) == {0, 1}
        first, reported = done.versions.index(1), torch.tensor(done.logprobs)
        assert (reference(nano(), [5, 6, 7], done, ROWS)[:first] - reported[:first]).abs().max() < 1e-4
        assert (reference(plain(new), [5, 6, 7], done, ROWS)[first:] - reported[first:]).abs().max() < 1e-4


async def test_a_worker_that_cannot_read_here_is_sent_the_bytes(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    send = lora_sender.AdapterSender._send

    def elsewhere(self: lora_sender.AdapterSender, **given: str) -> str:
        if "path" in given:
            given["digest"] = "of another file"
        told.append(next(iter(given)))
        return send(self, **given)

    monkeypatch.setattr(lora_sender.AdapterSender, "_send", elsewhere)
    model = adapted(6)
    await engine.update_weights(model, 3)
    assert told == ["path", "tensors"]
    done = await engine.generate(PROMPTS[0], greedy(20), session="a")
    assert list(done.token_ids) == generated(plain(model), PROMPTS[0], 20)


async def test_a_server_for_other_training_says_how_to_start_it(server: VLLMServer) -> None:
    with pytest.raises(UserError, match=r"started for adapters of rank 8 at most; .*--lora_rank 9"):
        async with ServerEngine([server.url], adapted(rank=9)):
            pass
    with pytest.raises(UserError, match=r"started with --lora_rank, and takes adapters only; .*--lora.rank"):
        async with ServerEngine([server.url], nano()):
            pass


async def test_what_vllm_cannot_run_is_refused_by_name(in_process: VLLMEngine) -> None:
    import peft

    config = peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True, task_type="CAUSAL_LM")
    with pytest.raises(UserError, match="vLLM does not take the adapter: vLLM does not yet support DoRA"):
        async with VLLMEngine(peft.get_peft_model(nano(), config), capacity=4, max_context=256):
            pass
