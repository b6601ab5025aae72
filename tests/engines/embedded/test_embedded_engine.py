"""The embedded engine: it samples from the model; requests may be many, cancelled, or wrong."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest
import torch

from agentrl.engines.embedded import model_view
from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.engines.embedded.fused_forward import FusedForward
from agentrl.engines.embedded.kv_cache import ForwardBatch
from agentrl.engines.embedded.model_view import InferenceModel
from agentrl.errors import UserError
from agentrl.types import SamplingParams
from tests.helpers.tiny import (
    MODELS,
    VOCABULARY,
    Make,
    conversation,
    error,
    greedy,
    half,
    olmo2,
    qwen3,
    together,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("make", MODELS)
async def test_logprobs_are_the_models_own_while_rows_join_and_leave(make: Make) -> None:
    model = make()
    engine = TransformersEngine(model, capacity=5, prefill_tokens=24)
    assert (engine._model.fused is None) == (make is olmo2)
    settings = [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7, top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=0.9, top_p=0.7, top_k=9),
        SamplingParams(temperature=0.0),
    ]
    calls = [lambda n=n: conversation(engine, model, n, settings[n % len(settings)]) for n in range(14)]
    off = await together(*calls)
    assert max(max(o) for o in off) < 1e-4
    assert engine.meter.reused > 0


async def test_rows_wait_where_the_cache_has_no_room_and_nothing_else_changes() -> None:
    model = qwen3()
    engine = TransformersEngine(model, capacity=14, prefill_tokens=24)
    cache = engine._batch.cache  # type: ignore[attr-defined]
    cache.max_bytes = cache.keys_values[:, :, :1].nbytes * 8  # 8 slots of 128 positions
    most = 0
    forward = engine._model.__class__.__call__

    def watched(self: Any, batch: ForwardBatch) -> Any:
        nonlocal most
        most = max(most, len(engine._batch.rows))
        return forward(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InferenceModel, "__call__", watched)
        calls = [lambda n=n: conversation(engine, model, n, SamplingParams()) for n in range(14)]
        off = await together(*calls)
    assert max(max(o) for o in off) < 1e-4
    assert 1 < most <= 8
    assert cache.keys_values.shape[2] == 8


async def test_a_session_goes_on_after_its_keys_and_values_were_given_back() -> None:
    model = qwen3()
    engine, other = TransformersEngine(model), TransformersEngine(model)
    turns = []
    for sampler in (engine, other):
        first = await sampler.generate([1, 2, 3], greedy(8), session="a")
        if sampler is engine:
            await sampler.sleep()
            assert sampler._batch.sessions.size == 0
        turns.append(await sampler.generate([1, 2, 3, *first.token_ids, 4], greedy(8), session="a"))
    assert turns[0].token_ids == turns[1].token_ids


async def test_the_generic_pass_agrees_with_the_fused_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen3()
    fused = TransformersEngine(model)
    monkeypatch.setattr(model_view, "can_fuse", lambda model: False)
    generic = TransformersEngine(model)
    assert (fused._model.fused is None, generic._model.fused is None) == (False, True)
    one, other = [await e.generate([1, 2, 3], SamplingParams(max_tokens=30), session="a") for e in (fused, generic)]
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("make", MODELS)
async def test_greedy_tokens_are_those_of_generate(make: Make) -> None:
    model = make()
    engine = TransformersEngine(model)
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3, 2]]
    found = await together(*(lambda p=p: engine.generate(p, greedy(20), session=str(p)) for p in prompts))
    for prompt, done in zip(prompts, found, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=20
        )
        assert list(done.token_ids) == expected[0, len(prompt) :].tolist()
        assert done.stop_reason == "length"


async def test_half_precision_is_close() -> None:
    model, params = half(), SamplingParams(max_tokens=20)
    engine = TransformersEngine(model)
    done = await engine.generate([1, 2, 3], params, session="a")
    assert error(model, [1, 2, 3], done, params) < 0.3


async def test_a_stop_token_is_included_and_ends_the_turn() -> None:
    engine = TransformersEngine(qwen3())
    plain = await engine.generate([1, 2], greedy(10), session="a")
    stop = plain.token_ids[4]
    done = await engine.generate([1, 2], SamplingParams(0.0, 10, (stop,)), session="b")
    assert done.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]
    assert done.stop_reason == "stop"


async def test_a_seed_gives_the_same_tokens_whatever_runs_beside() -> None:
    engine = TransformersEngine(qwen3(), capacity=6)
    params = SamplingParams(max_tokens=25, seed=7)
    alone = await engine.generate([5, 6], params, session="alone")
    others = [
        lambda n=n: engine.generate([n] * n, SamplingParams(max_tokens=2 * n, seed=n), session=str(n))
        for n in range(1, 12)
    ]
    beside = (await together(*others, lambda: engine.generate([5, 6], params, session="beside")))[-1]
    assert alone.token_ids == beside.token_ids
    other = await engine.generate([5, 6], SamplingParams(max_tokens=25, seed=8), session="other")
    assert alone.token_ids != other.token_ids


async def test_sampling_follows_the_models_distribution() -> None:
    model = qwen3()
    engine = TransformersEngine(model, capacity=64)
    calls = [
        lambda s=s: engine.generate([1, 2, 3], SamplingParams(max_tokens=1, seed=s), session=str(s))
        for s in range(2000)
    ]
    tokens = torch.tensor([done.token_ids[0] for done in await together(*calls)])
    expected = model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1].softmax(-1).detach()
    top = expected.topk(5).indices
    share = torch.stack([(tokens == t).double().mean() for t in top])
    assert torch.allclose(share, expected[top].double(), atol=0.04)


async def test_more_requests_than_slots_all_finish() -> None:
    engine = TransformersEngine(qwen3(), capacity=2)
    found = await together(*(lambda n=n: engine.generate([n], greedy(n % 7 + 1), session=str(n)) for n in range(30)))
    assert [len(d.token_ids) for d in found] == [n % 7 + 1 for n in range(30)]
    assert engine.meter.passes >= sum(n % 7 + 1 for n in range(30)) / 2


@pytest.mark.parametrize("native", [False, True], ids=["anyio", "asyncio"])
async def test_a_cancelled_request_frees_its_slot_and_disturbs_nobody(native: bool) -> None:
    """The first is running and drives, the second runs, the last two wait."""
    engine = TransformersEngine(qwen3(), capacity=3)
    alone = await engine.generate([7], greedy(100), session="before")

    async def cancelled(token: int) -> None:
        call = engine.generate([token], greedy(200), session=str(token))
        if native:
            task = asyncio.ensure_future(call)
            await asyncio.sleep(0.03)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            with anyio.move_on_after(0.03) as scope:
                await call
            assert scope.cancelled_caught

    survivor = partial(engine.generate, [7], greedy(100), session="survivor")
    calls: list[Callable[[], Awaitable[Any]]] = [
        partial(cancelled, 1),
        partial(cancelled, 2),
        survivor,
        partial(cancelled, 3),
        partial(cancelled, 4),
    ]
    with anyio.fail_after(60):
        found = await together(*calls)
        later = await together(*(lambda n=n: engine.generate([n], greedy(3), session=f"later {n}") for n in range(3)))
    assert found[2].token_ids == alone.token_ids
    assert all(len(d.token_ids) == 3 for d in later)
    assert not engine._callers
    assert engine._driver is None


async def test_nothing_is_kept_of_a_turn_whose_caller_was_cancelled_as_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, ended, going = TransformersEngine(qwen3()), threading.Event(), threading.Event()
    batch = engine._batch
    remove = batch.remove_finished

    def wait_and_remove() -> bool:
        if any(row.session == "gone" and row.is_done for row in batch.rows):
            ended.set()
            assert going.wait(60)
        return remove()

    monkeypatch.setattr(batch, "remove_finished", wait_and_remove)
    driving = asyncio.create_task(engine.generate([7], greedy(9), session="stays"))
    gone = asyncio.create_task(engine.generate([8], greedy(1), session="gone"))
    assert await asyncio.to_thread(ended.wait, 60)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    engine.end_session("gone")
    going.set()
    await driving
    assert batch.sessions.get("stays") is not None
    assert batch.sessions.get("gone") is None


async def test_an_error_in_a_pass_reaches_every_caller_also_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformersEngine(qwen3(), capacity=2)
    call, passes = InferenceModel.__call__, []

    def broken(self: InferenceModel, plan: ForwardBatch) -> torch.Tensor:
        passes.append(plan)
        if len(passes) > 3:
            raise RuntimeError("out of memory")
        return call(self, plan)

    monkeypatch.setattr(InferenceModel, "__call__", broken)
    seen = []

    async def ask(n: int) -> None:
        with pytest.raises(RuntimeError, match="out of memory"):
            await engine.generate([n], greedy(10), session=str(n))
        seen.append(n)

    with anyio.fail_after(60):
        await together(*(lambda n=n: ask(n) for n in range(5)))
        await ask(5)
    assert len(seen) == 6


async def test_weights_that_are_not_numbers_stop_it() -> None:
    model = qwen3()
    engine = TransformersEngine(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    await engine.update_weights(model, 1)
    with pytest.raises(FloatingPointError, match="have diverged"):
        await engine.generate([1], greedy(5), session="a")


async def test_after_close_calls_raise_and_waiting_ones_too() -> None:
    engine = TransformersEngine(qwen3(), capacity=1)
    raised = []

    async def call(n: int) -> None:
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await engine.generate([n], greedy(250), session=str(n))
        raised.append(n)

    async def close() -> None:
        await anyio.sleep(0.02)
        await engine.close()

    with anyio.fail_after(60):
        await together(lambda: call(0), lambda: call(1), close)
        await call(2)
    assert sorted(raised) == [0, 1, 2]


async def test_exceptions_of_the_body_come_out_as_they_are() -> None:
    engine = TransformersEngine(qwen3())

    async def body() -> None:
        async with engine:
            await engine.generate([1], greedy(2), session="a")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await body()
    with pytest.raises(RuntimeError, match="closed"):
        await engine.generate([1], greedy(2), session="a")
    with anyio.move_on_after(0.03) as scope:
        async with TransformersEngine(qwen3()) as other:
            while True:
                await other.generate([1], greedy(250), session="a")
    assert scope.cancelled_caught


def test_one_engine_serves_several_event_loops() -> None:
    engine = TransformersEngine(qwen3())
    first, second = (anyio.run(lambda: engine.generate([1], greedy(4), session="a")) for _ in range(2))
    assert first.token_ids == second.token_ids


@pytest.mark.parametrize(
    ("ids", "tokens", "message"),
    [
        ([1, VOCABULARY], 5, "token id 60 is outside the model's vocabulary of 60"),
        ([-1, 1], 5, "token id -1 is outside"),
        ([1] * 50, 15, "50 tokens of context and 15 to sample do not fit in 64 positions"),
        ([], 5, "there must be a token to continue"),
        ([1], 0, "and one to sample"),
    ],
)
async def test_requests_that_cannot_be_served(ids: list[int], tokens: int, message: str) -> None:
    engine = TransformersEngine(qwen3(), max_context=64)
    with pytest.raises(UserError, match=message):
        await engine.generate(ids, greedy(tokens), session="a")
    assert len((await engine.generate([1] * 50, greedy(14), session="a")).token_ids) == 14


def test_a_pass_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused pass is dropped where it is wrong; if the generic one is wrong too, the model itself is called."""
    states = FusedForward.__call__
    monkeypatch.setattr(FusedForward, "__call__", lambda self, plan: states(self, plan) + 0.1 * plan.ids[:, None])
    assert TransformersEngine(qwen3())._model.fused is None
    generic = model_view.run_batch
    monkeypatch.setattr(model_view, "run_batch", lambda model, plan: generic(model, plan) + 0.1 * plan.ids[:, None])
    with pytest.warns(UserWarning, match=r"Qwen3ForCausalLM: .* plain way, .*: its states are off by .* --engine vllm"):
        TransformersEngine(qwen3())


async def test_threads_inside_an_operation_are_set_for_its_passes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), []
    call = FusedForward.__call__

    def watched(self: FusedForward, plan: ForwardBatch) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return call(self, plan)

    monkeypatch.setattr(FusedForward, "__call__", watched)
    for threads, expected in ((None, 1), (1, 1), (2, 2)):
        engine = TransformersEngine(qwen3(), threads=threads)
        await engine.generate([1], greedy(1), session="a")
        assert set(seen) == {expected}
        assert torch.get_num_threads() == before
        seen.clear()
