"""The embedded engine's word on its routers is what transformers' own pass over the same tokens chooses."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.engines.embedded.router_log import RouterLog
from agentrl.errors import UserError
from agentrl.types import Completion, RoutedExperts, SamplingParams
from tests.helpers.tiny import VOCABULARY, qwen3, together, updated_amid
from tests.learner.test_router_replay import LAYERS, TOP_K, build

PARAMS = SamplingParams(max_tokens=9, routed_experts_start=0)


@torch.no_grad()
def choose(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    """The experts of each token by transformers' own pass, (tokens, layers, top_k), in order."""
    output = model(input_ids=torch.tensor([ids]), output_router_logits=True, use_cache=False)
    if not hasattr(output, "router_logits"):
        pytest.skip(f"transformers {transformers.__version__} tells no router's logits of {type(model).__name__}")
    logits = output.router_logits
    chosen: np.ndarray[Any, Any] = torch.stack([one.topk(TOP_K, -1).indices for one in logits], 1).sort(-1)[0].numpy()
    return chosen


def read(routed: RoutedExperts | None) -> np.ndarray[Any, Any]:
    assert routed is not None
    assert (routed.layers, routed.top_k, routed.experts.typecode) == (LAYERS, TOP_K, "B")
    return np.sort(np.array(routed.experts).reshape(-1, LAYERS, TOP_K), -1)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.filterwarnings("ignore:GptOssForCausalLM. the embedded engine goes the plain way:UserWarning")
async def test_turns_tell_the_experts_of_the_tokens_that_are_new_in_them(name: str) -> None:
    """Prompts that several rows share, long ones in parts, sessions that go on from their cache, and from none."""
    model = build(name)
    rng = random.Random(0)
    prompt = rng.choices(range(VOCABULARY), k=33)

    async def play(number: int) -> None:
        ids, known = list(prompt), 0
        for turn in range(3):
            params = replace(PARAMS, max_tokens=3 + 2 * turn + number, routed_experts_start=known, seed=number)
            done = await engine.generate(ids, params, session=str(number))
            ids += done.token_ids
            said = read(done.routed_experts)
            assert np.array_equal(said, choose(model, ids)[known:-1])
            known = len(ids) - 1
            ids += rng.choices(range(VOCABULARY), k=number)  # none behind the first one's turns
            if turn == 1 and number == 2:
                engine.end_session("2")  # what it goes on from is computed again, and told once

    async with TransformersEngine(model, prefill_tokens=20, capacity=3, return_routed_experts=True) as engine:
        await together(*(partial(play, number) for number in range(5)))
        assert engine.meter.reused > 0
        unasked = await engine.generate(prompt, SamplingParams(max_tokens=2), session="unasked")
        assert unasked.routed_experts is None
        late = await engine.generate(prompt, replace(PARAMS, routed_experts_start=20), session="late")
        assert np.array_equal(read(late.routed_experts), choose(model, [*prompt, *late.token_ids])[20:-1])


async def test_a_token_keeps_the_experts_with_which_the_one_behind_it_was_sampled() -> None:
    """Weights that change amid a turn: all passes again, and what is told of a token is what it was first."""
    old = build("qwen3_moe")
    new = build("qwen3_moe")
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    rng = random.Random(1)
    prompts = [rng.choices(range(VOCABULARY), k=k) for k in (12, 12, 20)]
    async with TransformersEngine(old, snapshot=True, return_routed_experts=True) as engine:
        params = replace(PARAMS, max_tokens=120)
        calls = [partial(engine.generate, p, params, session=str(n)) for n, p in enumerate(prompts)]
        found: list[Completion] = await updated_amid(engine, calls, old, new)
    assert any(set(done.versions) == {0, 1} for done in found)
    for prompt, done in zip(prompts, found, strict=True):
        ids, said = [*prompt, *done.token_ids], read(done.routed_experts)
        by_version = {0: choose(old, ids), 1: choose(new, ids)}
        assert not np.array_equal(by_version[0], by_version[1])
        versions = [done.versions[0]] * (len(prompt) - 1) + list(done.versions)
        for place, version in enumerate(versions):
            assert np.array_equal(said[place], by_version[version][place]), place


async def test_completions_are_cut_with_their_experts() -> None:
    routed = RoutedExperts(array("B", range(9)), 1, 1)  # of 5 tokens of the prompt, and of 4 of 5 that were sampled
    done = Completion((1, 2, 3, 4, 5), (0.0,) * 5, (0,) * 5, "stop", None, routed)
    assert done.cut(3).routed_experts == routed.take(0, 7)
    assert done.cut(0).routed_experts == routed.take(0, 4)


def test_a_log_says_what_was_first_and_shares_what_is_now() -> None:
    def ones(count: int, value: int) -> Any:
        return np.full((count, 1, 1), value, np.uint16)

    log, other = RouterLog(ones(0, 0)), RouterLog(ones(0, 0))
    log.begin(None, 0)
    log.append(ones(3, 300))
    log.restart()
    assert len(log) == 0
    log.append(ones(2, 1))
    log.restart()  # before it came to where it was
    log.append(ones(5, 2))
    assert log.read(0, 5) == RoutedExperts(array("H", [300, 300, 300, 2, 2]), 1, 1)
    assert log.read(1, 4).experts.tolist() == [300, 300, 2]
    assert log.read(4, 5).experts.tolist() == [2]
    other.begin(log, 4)
    other.append(ones(1, 7))
    assert other.read(0, 5).experts.tolist() == [2, 2, 2, 2, 7]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])  # the engine's own way, and the plain one
@pytest.mark.filterwarnings("ignore:GptOssForCausalLM. the embedded engine goes the plain way:UserWarning")
async def test_a_session_takes_the_room_of_its_experts_too(name: str) -> None:
    sizes = []
    for recorded in (False, True):
        params = replace(PARAMS, routed_experts_start=0 if recorded else None)
        async with TransformersEngine(build(name), return_routed_experts=recorded) as engine:
            done = await engine.generate(list(range(20)), params, session="a")
            sizes.append(engine._batch.sessions.size)
    assert sizes[1] - sizes[0] >= (20 + len(done.token_ids) - 1) * LAYERS * TOP_K


async def test_engines_that_record_nothing_say_so() -> None:
    async with TransformersEngine(build("mixtral")) as engine:
        with pytest.raises(UserError, match="this engine was made without return_routed_experts"):
            await engine.generate([1, 2], PARAMS, session="0")
    with pytest.raises(UserError, match=r"router_replay: the experts of Qwen3ForCausalLM cannot be recorded: it is no"):
        TransformersEngine(qwen3(), return_routed_experts=True)
