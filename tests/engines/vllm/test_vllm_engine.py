"""vLLM in process: it samples from the policy, is updated in place, and its failures are told in bounded time.

These really run vLLM: `make vllm`.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

pytest.importorskip("vllm")  # a quick suite without it

from agentrl.engines.vllm.engine import VLLMEngine
from agentrl.errors import UserError
from agentrl.models import policy
from agentrl.renderer.stop_strings import StopStrings
from agentrl.types import SamplingParams
from tests.helpers.processes import heed_interrupts, is_running, wait_for_end
from tests.helpers.tiny import disturbed, error, greedy, reference, together, updated_amid

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def nano() -> Any:
    return policy.load_policy("nano").model


def changed(model: Any, share: float = 0.3) -> Any:
    """Other weights, all of them: the tied embedding, the norms and the matrices."""
    torch.manual_seed(int(share * 100))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + share * torch.randn_like(weight))
    return model


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[VLLMEngine]:
    async with VLLMEngine(nano(), capacity=16, max_context=512) as engine:
        yield engine


@pytest.fixture
async def fresh(engine: VLLMEngine) -> VLLMEngine:
    """The engine with nano's own weights again."""
    await engine.update_weights(nano(), 0)
    return engine


def generated(model: Any, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    kept = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, eos_token_id=None
    )
    return list(kept[0, len(prompt) :].tolist())


PROMPTS = [[3, 1, 4, 1, 5], [90, 2], [6, 50, 300, 5, 8, 9, 7, 9, 3, 2], list(range(100, 180))]


async def test_greedy_tokens_are_those_of_generate(fresh: VLLMEngine) -> None:
    found = await together(*(lambda p=p: fresh.generate(p, greedy(20), session=str(p)) for p in PROMPTS))
    for prompt, done in zip(PROMPTS, found, strict=True):
        assert list(done.token_ids) == generated(nano(), prompt, 20)
        assert (done.stop_reason, set(done.versions)) == ("length", {0})


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=30, seed=1),
        SamplingParams(temperature=0.6, max_tokens=30, seed=2),
        SamplingParams(temperature=1.7, top_k=5, max_tokens=30, seed=3),
        SamplingParams(temperature=0.9, top_p=0.7, max_tokens=30, seed=4),
        SamplingParams(temperature=0.0, max_tokens=30),
    ],
)
async def test_logprobs_are_of_the_distribution_that_was_sampled_from(
    fresh: VLLMEngine, params: SamplingParams
) -> None:
    done = await fresh.generate([5, 6, 7], params, session="a")
    assert error(nano(), [5, 6, 7], done, params) < 1e-4


async def test_the_mismatch_is_measured_at_the_start(engine: VLLMEngine) -> None:
    assert engine.mismatch is not None
    assert 0 < engine.mismatch.mean <= engine.mismatch.max < 1e-3


async def test_a_stop_token_is_included_and_ends_the_turn_and_the_models_own_end_does_not(fresh: VLLMEngine) -> None:
    plain = await fresh.generate([5, 6], greedy(10), session="a")
    stop = plain.token_ids[4]
    done = await fresh.generate([5, 6], SamplingParams(0.0, 10, (stop,)), session="b")
    assert done.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]
    assert done.stop_reason == "stop"
    end = nano().config.eos_token_id
    asked = [
        lambda s=s: fresh.generate([5, 6], SamplingParams(max_tokens=200, temperature=2.0, seed=s), session=str(s))
        for s in range(16)
    ]
    past = [done for done in await together(*asked) if end in done.token_ids[:-1]]
    assert past
    assert all(len(done.token_ids) == 200 for done in past)


async def test_a_seed_gives_the_same_tokens_whatever_runs_beside(fresh: VLLMEngine) -> None:
    params = SamplingParams(max_tokens=25, seed=2**62 + 7)
    alone = await fresh.generate([5, 6], params, session="alone")
    others = [
        lambda n=n: fresh.generate([n] * n, SamplingParams(max_tokens=2 * n, seed=n), session=str(n))
        for n in range(1, 12)
    ]
    beside = (await together(*others, lambda: fresh.generate([5, 6], params, session="beside")))[-1]
    assert alone.token_ids == beside.token_ids
    other = await fresh.generate([5, 6], SamplingParams(max_tokens=25, seed=8), session="other")
    assert alone.token_ids != other.token_ids


async def test_a_later_turn_reuses_what_was_computed(fresh: VLLMEngine) -> None:
    ids = list(range(10, 200))
    reused = fresh.meter.reused
    done = await fresh.generate(ids, greedy(20), session="a")
    ids += [*done.token_ids, 5, 6, 7]
    await fresh.generate(ids, greedy(20), session="a")
    assert fresh.meter.reused - reused >= 160


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([1, 512], greedy(5), "token id 512 is outside the model's vocabulary of 512"),
        ([-1, 1], greedy(5), "token id -1 is outside"),
        ([1] * 500, greedy(13), "500 tokens of context and 13 to sample do not fit in 512 positions"),
        ([], greedy(5), "there must be a token to continue"),
        ([1], greedy(0), "and one to sample"),
        ([1], SamplingParams(temperature=0.001, max_tokens=5), "at temperature 0 or from 0.01 on, not at 0.001"),
    ],
)
async def test_requests_that_cannot_be_served(
    fresh: VLLMEngine, ids: list[int], params: SamplingParams, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        await fresh.generate(ids, params, session="a")
    assert len((await fresh.generate([1] * 500, greedy(12), session="a")).token_ids) == 12


async def test_after_an_update_it_is_the_new_model(fresh: VLLMEngine) -> None:
    model = nano()
    before = [await fresh.generate(p, greedy(20), session="a") for p in PROMPTS]
    for version in (1, 2, 3):
        await fresh.update_weights(changed(model), version)
        assert fresh.version == version
        after = [await fresh.generate(p, greedy(20), session="a") for p in PROMPTS]
        for prompt, done in zip(PROMPTS, after, strict=True):
            assert list(done.token_ids) == generated(model, prompt, 20)
            assert set(done.versions) == {version}
            assert error(model, prompt, done, greedy(20)) < 1e-3
        assert [d.token_ids for d in after] != [d.token_ids for d in before]


async def test_a_worker_that_cannot_open_the_trainers_file_is_sent_the_bytes(
    fresh: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.models import memory_file

    model = changed(nano())
    monkeypatch.setattr(fresh._sender, "_same_machine", False)
    monkeypatch.setattr(memory_file, "PART_BYTES", 500_000)
    await fresh.update_weights(model, 7)
    done = await fresh.generate(PROMPTS[0], greedy(20), session="a")
    assert list(done.token_ids) == generated(model, PROMPTS[0], 20)


async def test_requests_that_run_go_on_with_the_new_weights(fresh: VLLMEngine) -> None:
    old, new = nano(), changed(nano(), 0.05)
    context, params = [5, 6, 7], SamplingParams(max_tokens=400, seed=3)

    calls = [
        lambda s=s: fresh.generate(context, SamplingParams(max_tokens=400, seed=s), session=str(s)) for s in range(4)
    ]
    for done in await updated_amid(fresh, calls, old, new):
        assert list(done.versions) == sorted(done.versions)
        assert set(done.versions) == {0, 1}
        first = done.versions.index(1)
        assert (reference(old, context, done, params)[:first] - torch.tensor(done.logprobs[:first])).abs().max() < 1e-4
        # All that had been computed with the old weights is computed again: what follows is of the new ones alone.
        assert (reference(new, context, done, params)[first:] - torch.tensor(done.logprobs[first:])).abs().max() < 1e-4


async def test_more_prompts_than_fit_in_a_pass_and_an_update_among_them(fresh: VLLMEngine) -> None:
    """A prompt that is taken in parts kills vLLM on the CPU where the request has a seed: none may be."""
    new = changed(nano(), 0.05)

    async def update() -> None:
        await anyio.sleep(0.5)
        await fresh.update_weights(new, 1)

    contexts = [[(7 * n + i) % 500 for i in range(350 + n)] for n in range(40)]
    calls = [
        lambda c=c, n=n: fresh.generate(c, SamplingParams(max_tokens=60, seed=n), session=str(n))
        for n, c in enumerate(contexts)
    ]
    *found, _ = await together(*calls, update)
    assert {v for done in found for v in done.versions} == {0, 1}
    for context, done in zip(contexts, found, strict=True):
        for version, model in ((0, nano()), (1, new)):
            sampled = torch.tensor([v == version for v in done.versions])
            off = reference(model, context, done, SamplingParams()) - torch.tensor(done.logprobs)
            assert off[sampled].abs().sum() < 1e-2


async def test_or_are_finished_first(fresh: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "_update", "drain")
    new, late = changed(nano(), 0.05), []

    async def update() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fresh.update_weights, new, 1)
            await anyio.sleep(0.3)  # asked while the running ones are finished: waits for the new weights
            late.append(await fresh.generate([1], greedy(5), session="late"))

    calls = [
        lambda s=s: fresh.generate([5, 6], SamplingParams(max_tokens=300, seed=s), session=str(s)) for s in range(4)
    ]
    found = await disturbed(calls, update)
    assert all(set(done.versions) == {0} for done in found)
    assert set(late[0].versions) == {1}


@pytest.mark.parametrize("native", [False, True], ids=["anyio", "asyncio"])
async def test_a_cancelled_request_is_taken_back_and_disturbs_nobody(fresh: VLLMEngine, native: bool) -> None:
    alone = await fresh.generate([7], greedy(100), session="before")

    async def cancelled(token: int) -> None:
        call = fresh.generate([token], greedy(500), session=str(token))
        if native:
            task = asyncio.ensure_future(call)
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            with anyio.move_on_after(0.1) as scope:
                await call
            assert scope.cancelled_caught

    calls: list[Callable[[], Awaitable[Any]]] = [partial(cancelled, n) for n in range(1, 6)]
    calls.append(partial(fresh.generate, [7], greedy(100), session="b"))
    found = await together(*calls)
    assert found[-1].token_ids == alone.token_ids
    with anyio.fail_after(60):
        await until(lambda: not fresh._llm.get_num_unfinished_requests())
    assert not fresh._calls


async def test_weights_that_are_not_numbers_stop_it(fresh: VLLMEngine) -> None:
    model = nano()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    await fresh.update_weights(model, 1)
    with pytest.raises(FloatingPointError, match="have diverged"):
        await fresh.generate([1], greedy(5), session="a")


async def test_torch_is_left_as_it_was() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = untied()
    state = torch.get_rng_state()
    async with VLLMEngine(model, capacity=4, max_context=128) as engine:
        assert torch.equal(torch.get_rng_state(), state)
        assert not torch.distributed.is_initialized()
        torch.set_num_threads(2)
        assert torch.get_num_threads() == 2
        # A head of its own, not tied to the embedding: it is updated as well.
        for version in (1, 2):
            await engine.update_weights(changed(model), version)
            done = await engine.generate([3, 4], greedy(15), session="a")
            assert list(done.token_ids) == generated(model, [3, 4], 15)
        processes = [p.pid for p in engine._processes]
    assert all(not is_running(pid) for pid in processes)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        await engine.generate([1], greedy(2), session="a")
    assert expected.shape == (3,)


def untied() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**{**nano().config.to_dict(), "tie_word_embeddings": False, "vocab_size": 96})
    return Qwen3ForCausalLM(config).eval()


async def test_a_killed_process_is_reported_in_a_sentence() -> None:
    async with VLLMEngine(nano(), capacity=4, max_context=512) as engine:
        raised = []

        async def ask(n: int) -> None:
            with pytest.raises(
                UserError, match=r"vLLM's process died \(killed by SIGKILL\).*weights of version 0"
            ) as told:
                await engine.generate([n], greedy(500), session=str(n))
            raised.append(str(told.value))

        async def kill() -> None:
            await anyio.sleep(0.2)
            os.kill(engine._processes[0].pid, signal.SIGKILL)

        with anyio.fail_after(60):
            await together(partial(ask, 1), partial(ask, 2), kill)
            await ask(3)
        with anyio.fail_after(60), pytest.raises(UserError, match="died"):
            await engine.update_weights(nano(), 1)
    assert len(raised) == 3
    assert "2 calls were waiting" in raised[0]


async def test_a_hung_process_is_reported_in_a_sentence_and_ended() -> None:
    async with VLLMEngine(nano(), capacity=4, max_context=512, stall_timeout_s=1.0) as engine:
        pid = engine._processes[0].pid
        os.kill(pid, signal.SIGSTOP)
        with anyio.fail_after(60), pytest.raises(UserError, match="gave no sign of life for 2 s"):
            await engine.generate([1], greedy(5), session="a")
        begun = time.perf_counter()
    assert time.perf_counter() - begun < 15
    assert not is_running(pid)


SCRIPT = """
import anyio, os, sys, time
from agentrl.models import policy
from agentrl.engines.vllm.engine import VLLMEngine
from agentrl.types import SamplingParams

async def main():
    async with VLLMEngine(policy.load_policy("nano").model, capacity=4, max_context=128) as engine:
        await engine.generate([1], SamplingParams(max_tokens=3), session="a")
        print(engine._processes[0].pid, flush=True)
        if sys.argv[1] == "raise":
            raise ZeroDivisionError
        time.sleep(60) if sys.argv[1] == "hang" else await anyio.sleep(60)

anyio.run(main)  # no main guard, on purpose
"""


@pytest.mark.parametrize("end", [*(pytest.param(e, marks=pytest.mark.long) for e in ("raise", "interrupt")), "hang"])
def test_no_process_is_left_however_the_run_ends(tmp_path: Path, end: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.Popen(
        [sys.executable, str(script), end],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    assert run.stdout is not None
    with run.stdout as said:
        child = int(said.readline())
    if end == "interrupt":
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does: the whole group
    elif end == "hang":
        run.kill()
    run.wait(120)
    wait_for_end(child)


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110  what is waited for has no event
        await anyio.sleep(0.02)


async def test_a_stop_string_ends_a_turn_at_the_token_that_completes_it(fresh: VLLMEngine) -> None:
    """vLLM has no tokenizer here: the text is read by us, and the rest of the request is given up."""
    tokenizer = policy.load_policy("nano").tokenizer
    free = SamplingParams(max_tokens=300, temperature=2.0, seed=5)
    plain = await fresh.generate([5, 6], free, session="a")
    text = tokenizer.decode(plain.token_ids[:12])
    stop = StopStrings((text[-3:], "never said"), tokenizer.decode)
    before = fresh.meter.sampled
    done = await fresh.generate([5, 6], replace(free, stop=stop), session="b")
    first = next(n for n in range(1, 13) if text[-3:] in tokenizer.decode(plain.token_ids[:n]))
    assert done.token_ids == plain.token_ids[:first]
    assert done.stop_reason == "stop"
    assert len(done.logprobs) == len(done.versions) == first
    assert fresh.meter.sampled < before + 300
