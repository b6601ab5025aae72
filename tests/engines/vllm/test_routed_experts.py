"""vLLM's word on its routers: read from its outputs in process and from its server's answers, by stand-ins.

vLLM's CPU build says nothing of them, so that it is run here by nobody.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl.engines.vllm import launch, requests
from agentrl.engines.vllm.engine import VLLMEngine
from agentrl.engines.vllm.launchers import plan_servers
from agentrl.engines.vllm.server_pool import ServerEngine
from agentrl.engines.vllm.turn_servers import TurnServers
from agentrl.errors import UserError
from agentrl.players.open_players import describe_engine
from agentrl.settings.loader import build_config, read_overrides
from agentrl.types import Completion, RoutedExperts, SamplingParams
from tests.engines.embedded.test_router_log import choose
from tests.helpers.tiny import VOCABULARY, qwen3
from tests.helpers.vllm_server import fake_vllm
from tests.learner.test_router_replay import LAYERS, TOP_K, build

PARAMS = SamplingParams(max_tokens=4, routed_experts_start=0)


def read(done: Completion, top_k: int = TOP_K) -> Any:
    assert done.routed_experts is not None
    return np.sort(np.array(done.routed_experts.experts).reshape(-1, LAYERS, top_k), -1)


def test_of_all_layers_those_that_route_are_read() -> None:
    rows = np.arange(5 * 4 * 2, dtype=np.uint8).reshape(5, 4, 2)  # of a model whose first layer is a plain one
    routed = requests.read_experts(rows, 9, replace(PARAMS, routed_experts_start=3), (1, 2, 3))
    assert (routed.layers, routed.top_k) == (3, 2)
    assert np.array(routed.experts).reshape(5, 3, 2).tolist() == rows[:, 1:].tolist()
    wide = requests.read_experts(rows.astype(np.uint16) + 300, 6, PARAMS, (0,))
    assert wide == RoutedExperts(array("H", (rows[:, 0].astype(int) + 300).flatten().tolist()), 1, 2)


@pytest.mark.parametrize(("shape", "tokens"), [((4, 3, 2), 6), ((6, 3, 2), 6), ((5, 2, 2), 6), ((5, 6), 6)])
def test_experts_of_other_tokens_are_never_read_as_those_asked_for(shape: tuple[int, ...], tokens: int) -> None:
    with pytest.raises(RuntimeError, match=r"of shape \(\d, .*, not of 5 tokens and 3 layers or more"):
        requests.read_experts(np.zeros(shape, np.uint8), tokens, PARAMS, (0, 1, 2))


def test_where_none_are_returned_the_way_out_is_said() -> None:
    with pytest.raises(UserError, match=r"returns no routed experts, .*: start it with .*enable_return_routed_experts"):
        requests.read_experts(None, 6, PARAMS, (0,))


def test_layers_are_counted_by_the_model() -> None:
    assert launch.find_routed_layers(build("qwen3_moe"), on_cpu=False) == (0, 1, 2)
    assert launch.find_routed_layers(build("deepseek_v3"), on_cpu=False) == (1, 2, 3)
    with pytest.raises(UserError, match=r"router_replay: vLLM's CPU build returns no routed experts .*--engine transf"):
        VLLMEngine(build("qwen3_moe"), return_routed_experts=True)
    with pytest.raises(UserError, match=r"the experts that vLLM returns of Qwen3ForCausalLM cannot be read: it is no"):
        launch.find_routed_layers(qwen3(), on_cpu=False)


async def test_an_output_in_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has what is read of a RequestOutput; that vLLM has it is read from its source elsewhere."""
    monkeypatch.setattr(launch, "find_routed_layers", lambda model, on_cpu: (0, 1, 2))
    engine = VLLMEngine(build("qwen3_moe"), return_routed_experts=True)
    rows = np.random.default_rng(0).integers(0, 4, (7, 3, 2), dtype=np.uint8)  # 5 of the prompt, 3 sampled: one waits
    asked: list[SamplingParams] = []

    async def run_request(token_ids: list[int], params: SamplingParams, request: str) -> Any:
        asked.append(params)
        sampled = [7, 8, 9]
        logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in sampled]
        spans = [SimpleNamespace(version="0", start=0, end=3)]
        start = params.routed_experts_start
        experts = None if start is None else rows[start:]
        output = SimpleNamespace(token_ids=sampled, logprobs=logprobs, weight_versions=spans, routed_experts=experts)
        return SimpleNamespace(outputs=[output], num_cached_tokens=0)

    async def wait(work: Awaitable[Any]) -> Any:
        return await work

    monkeypatch.setattr(engine, "_run_request", run_request)
    monkeypatch.setattr(engine, "_while_alive", wait)
    params = replace(PARAMS, stop_token_ids=(9,))
    done = await engine.generate([1, 2, 3, 4, 5], replace(params, routed_experts_start=2), session="0")
    assert np.array_equal(read(done), np.sort(rows[2:], -1))
    assert requests.build_sampling_params(asked[0])["routed_experts_prompt_start"] == 2
    plain = await engine.generate([1, 2, 3, 4, 5], replace(params, routed_experts_start=None), session="0")
    assert plain.routed_experts is None
    assert "routed_experts_prompt_start" not in requests.build_sampling_params(asked[1])


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
async def test_a_server_s_answers_are_read_by_the_run_and_by_its_players(name: str) -> None:
    model = build(name)
    prompt = random.Random(0).choices(range(VOCABULARY), k=9)
    choose(model, prompt)  # or the test is skipped
    with fake_vllm(build(name)) as server:
        server.returns_experts = True
        async with ServerEngine([server.url], model, return_routed_experts=True) as engine:
            described = describe_engine(engine)
            players = TurnServers(described)
            for start in (0, 5):
                params = replace(PARAMS, routed_experts_start=start)
                done = await engine.generate(prompt, params, session="0")
                again = await players.generate(prompt, params, session="0")
                assert again == done
                assert np.array_equal(read(done), choose(model, [*prompt, *done.token_ids])[start:-1])
            assert (await engine.generate(prompt, SamplingParams(max_tokens=2), session="0")).routed_experts is None
            await players.close()


async def test_a_server_that_returns_none_is_refused_at_the_start() -> None:
    with fake_vllm(build("qwen3_moe")) as server:
        engine = ServerEngine([server.url], build("qwen3_moe"), return_routed_experts=True)
        with pytest.raises(UserError, match=r"vLLM returns no routed experts, which learner\.router_replay needs"):
            await engine.__aenter__()
        async with ServerEngine([server.url], build("qwen3_moe")) as plain:  # nobody asks
            await plain.generate([1, 2], SamplingParams(max_tokens=1), session="0")


def test_servers_of_the_run_are_started_for_it() -> None:
    plan = partial(plan_servers, count=1)
    words = "--env shop --engine launched"
    asked = plan(build_config(read_overrides([*words.split(), "--learner.router_replay", "true"])))
    assert "--vllm.enable_return_routed_experts true" in " ".join(asked.command)
    assert "routed" not in " ".join(plan(build_config(read_overrides(words.split()))).command)
