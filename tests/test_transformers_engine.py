import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from threading import Event
from typing import Any

import anyio
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl.engines import view
from agentrl.engines.fused import FusedForward
from agentrl.engines.kv import Plan
from agentrl.engines.transformers import TransformersEngine
from agentrl.engines.view import View
from agentrl.errors import UserError
from agentrl.types import Completion, SamplingParams

VOCABULARY = 60
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
Make = Callable[[], Any]


def qwen3(**more: Any) -> Any:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE | more))
    for name, weight in model.named_parameters():
        if "norm" in name:  # ones would hide a weight that is left out
            weight.data += 0.3 * torch.randn_like(weight)
    return model


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    )


def qwen2() -> Any:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"}))
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            torch.nn.init.normal_(projection.bias)
    return model


def sliding() -> Any:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=6))


def half() -> Any:
    return qwen3().to(torch.bfloat16)


MODELS = [qwen3, llama, qwen2, sliding]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The reference passes are tiny: on busy cores a second thread makes them twenty times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens)


@torch.no_grad()
def reference(model: Any, context: Sequence[int], done: Completion, params: SamplingParams) -> torch.Tensor:
    """The logprobs of a completion by a plain forward pass, its temperature, top_k and top_p written out."""
    ids = [*context, *done.token_ids]
    logits = model(input_ids=torch.tensor([ids])).logits[0, len(context) - 1 : -1].float() / (params.temperature or 1.0)
    if params.top_k:
        logits[logits < logits.topk(params.top_k).values[:, -1:]] = -torch.inf
    if params.top_p < 1.0:
        for row in logits:
            probabilities, order = row.softmax(-1).sort(descending=True)
            kept = int((probabilities.cumsum(-1) < params.top_p).sum()) + 1
            row[order[kept:]] = -torch.inf
    logprobs: torch.Tensor = logits.log_softmax(-1)
    return logprobs.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]


def error(model: Any, context: Sequence[int], done: Completion, params: SamplingParams) -> float:
    return float((reference(model, context, done, params) - torch.tensor(done.logprobs)).abs().max())


async def together(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    """The results of calls that are made at the same time."""
    results: list[Any] = [None] * len(calls)

    async def one(index: int) -> None:
        results[index] = await calls[index]()

    async with anyio.create_task_group() as tasks:
        for index in range(len(calls)):
            tasks.start_soon(one, index)
    return results


async def conversation(engine: TransformersEngine, model: Any, number: int, params: SamplingParams) -> list[float]:
    """Several turns, each of its own length; how far each turn's logprobs are off."""
    rng = random.Random(number)
    ids = rng.choices(range(VOCABULARY), k=rng.randint(1, 20))
    off = []
    for turn in range(3):
        turn_params = SamplingParams(
            params.temperature, rng.randint(1, 15), (), params.top_p, params.top_k, seed=10 * number + turn
        )
        done = await engine.generate(ids, turn_params, session=str(number))
        assert len(done.token_ids) == turn_params.max_tokens
        off.append(error(model, ids, done, turn_params))
        ids += [*done.token_ids, *rng.choices(range(VOCABULARY), k=rng.randint(0, 5))]
        await anyio.sleep(rng.uniform(0, 0.01))
    engine.end_session(str(number))
    return off


# -- it samples from the model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MODELS)
async def test_logprobs_are_the_models_own_while_rows_join_and_leave(make: Make) -> None:
    model = make()
    engine = TransformersEngine(model, capacity=5, prefill_tokens=24)
    assert (engine._view.fused is None) == (make is sliding)
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


async def test_the_generic_pass_agrees_with_the_fused_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen3()
    fused = TransformersEngine(model)
    monkeypatch.setattr(view, "can_fuse", lambda model: False)
    generic = TransformersEngine(model)
    assert (fused._view.fused is None, generic._view.fused is None) == (False, True)
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


# -- nothing is computed twice ---------------------------------------------------------------------------------------


async def test_a_second_turn_prefills_only_what_is_new() -> None:
    engine = TransformersEngine(qwen3())
    prompt = list(range(20))
    done = await engine.generate(prompt, greedy(10), session="a")
    assert (engine.meter.prefilled, engine.meter.reused) == (20, 0)
    await engine.generate([*prompt, *done.token_ids, 1, 2, 3], greedy(5), session="a")
    assert (engine.meter.prefilled, engine.meter.reused) == (20 + 4, 29)  # the last sampled token, and three more


async def test_a_changed_history_is_computed_from_where_it_changes() -> None:
    model, params = qwen3(), SamplingParams(max_tokens=10)
    engine = TransformersEngine(model)
    await engine.generate(list(range(20)), params, session="a")
    changed = [*range(12), 50, 51]
    done = await engine.generate(changed, params, session="a")
    assert engine.meter.reused == 12
    assert error(model, changed, done, params) < 1e-4
    again = await engine.generate(changed, params, session="a")  # all of it known: one token is computed again
    assert again.token_ids == done.token_ids


@pytest.mark.parametrize("capacity", [3, 8])
async def test_the_prompt_of_a_group_is_prefilled_once(capacity: int) -> None:
    model, prompt = qwen3(), list(range(30))
    engine = TransformersEngine(model, capacity=capacity)
    members = [SamplingParams(max_tokens=5 + n, seed=n) for n in range(8)]
    found = await together(*(lambda m=m: engine.generate(prompt, m, session=str(m.seed)) for m in members))
    assert engine.meter.prefilled == 30
    assert engine.meter.reused == 7 * 29
    assert max(error(model, prompt, d, m) for d, m in zip(found, members, strict=True)) < 1e-4


async def test_a_group_does_not_queue_for_what_it_cannot_share() -> None:
    engine = TransformersEngine(qwen3())
    prompts = [[1]] * 8 + [[2, 3]] * 8
    await together(*(lambda n=n, p=p: engine.generate(p, greedy(4), session=str(n)) for n, p in enumerate(prompts)))
    assert engine.meter.passes <= 6
    # kept tokens that are of no use do not hide the sibling
    await together(*(lambda n=n: engine.generate([9] * 10, greedy(4), session=str(n)) for n in range(8)))
    assert engine.meter.prefilled == 2 + 10


async def test_slow_tools_in_threads_leave_the_engine_its_own() -> None:
    engine, busy = TransformersEngine(qwen3()), Event()
    async with anyio.create_task_group() as tools:
        for _ in range(50):
            tools.start_soon(anyio.to_thread.run_sync, busy.wait, 20.0)
        await anyio.sleep(0.05)
        with anyio.fail_after(10):
            await engine.generate([1, 2], greedy(10), session="a")
        busy.set()


async def test_eviction_only_costs_another_prefill() -> None:
    model, params = qwen3(), SamplingParams(max_tokens=5)
    engine = TransformersEngine(model, keep_bytes=0)
    prompt = list(range(20))
    first = await engine.generate(prompt, params, session="a")
    second = [*prompt, *first.token_ids, 7]
    done = await engine.generate(second, params, session="a")
    assert engine.meter.reused == 0
    assert error(model, second, done, params) < 1e-4


async def test_the_end_of_a_session_frees_what_was_kept() -> None:
    engine = TransformersEngine(qwen3())
    await engine.generate([1, 2, 3], greedy(5), session="a")
    assert engine._batch.kept.size > 0
    engine.end_session("a")
    assert engine._batch.kept.size == 0


async def test_a_long_prompt_goes_in_parts() -> None:
    model, params = qwen3(), SamplingParams(max_tokens=10)
    engine = TransformersEngine(model, prefill_tokens=16)
    contexts = [[n] * length for n, length in enumerate([60, 3, 17, 100, 16])]
    found = await together(*(lambda c=c: engine.generate(c, params, session=str(c)) for c in contexts))
    assert max(error(model, c, d, params) for c, d in zip(contexts, found, strict=True)) < 1e-4


# -- capacity, cancellation, failure ---------------------------------------------------------------------------------


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
    with anyio.fail_after(20):
        found = await together(*calls)
        later = await together(*(lambda n=n: engine.generate([n], greedy(3), session=f"later {n}") for n in range(3)))
    assert found[2].token_ids == alone.token_ids
    assert all(len(d.token_ids) == 3 for d in later)
    assert not engine._callers
    assert engine._driver is None


async def test_an_error_in_a_pass_reaches_every_caller_also_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformersEngine(qwen3(), capacity=2)
    call, passes = View.__call__, []

    def broken(self: View, plan: Plan) -> torch.Tensor:
        passes.append(plan)
        if len(passes) > 3:
            raise RuntimeError("out of memory")
        return call(self, plan)

    monkeypatch.setattr(View, "__call__", broken)
    seen = []

    async def ask(n: int) -> None:
        with pytest.raises(RuntimeError, match="out of memory"):
            await engine.generate([n], greedy(10), session=str(n))
        seen.append(n)

    with anyio.fail_after(10):
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

    with anyio.fail_after(10):
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


# -- weights ---------------------------------------------------------------------------------------------------------


def shake(model: Any) -> Any:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("snapshot", [False, True])
async def test_rows_go_on_with_new_weights(make: Make, snapshot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, params = make(), SamplingParams(max_tokens=120)
    engine = TransformersEngine(model, snapshot=snapshot)
    old = make()
    prompts = [[1, 2, 3], [4, 5], [1, 2, 3]]

    async def update() -> None:
        while engine.meter.sampled < 60:  # noqa: ASYNC110
            await anyio.sleep(0.001)
        if snapshot:
            shake(model)  # at any time
        else:  # shared parameters must not change during a pass
            read = engine._view.update
            monkeypatch.setattr(engine._view, "update", lambda m: shake(m) or read(m))
        await engine.update_weights(model, 5)

    calls = [partial(engine.generate, p, params, session=str(n)) for n, p in enumerate(prompts)]
    found = (await together(*calls, update))[:3]
    for prompt, done in zip(prompts, found, strict=True):
        cut = done.versions.index(5)
        assert done.versions == (0,) * cut + (5,) * (120 - cut)
        before = (reference(old, prompt, done, params) - torch.tensor(done.logprobs)).abs()
        after = (reference(model, prompt, done, params) - torch.tensor(done.logprobs)).abs()
        assert 0 < cut < 120
        assert before[:cut].max() < 1e-4
        assert after[cut:].max() < 1e-4
        assert before[cut:].max() > 1e-2


async def test_what_was_kept_under_the_old_weights_is_forgotten() -> None:
    model, params = qwen3(), SamplingParams(max_tokens=5)
    engine = TransformersEngine(model)
    prompt = list(range(20))
    done = await engine.generate(prompt, params, session="a")
    shake(model)
    await engine.update_weights(model, 1)
    context = [*prompt, *done.token_ids]
    done = await engine.generate(context, params, session="a")
    assert engine.meter.reused == 0
    assert done.versions == (1,) * 5
    assert error(model, context, done, params) < 1e-4


@pytest.mark.parametrize("make", MODELS)
async def test_parameters_are_shared_unless_a_snapshot_is_asked_for(make: Make) -> None:
    model = make()
    names = dict(model.named_parameters())
    view = dict(TransformersEngine(model)._view.model.named_parameters())
    assert all(view[name] is weight for name, weight in names.items())
    assert model.config._attn_implementation != TransformersEngine(model)._view.config._attn_implementation
    engine, params = TransformersEngine(model, snapshot=True), SamplingParams(max_tokens=10)
    unchanged = make()
    shake(model)
    done = await engine.generate([1, 2], params, session="a")
    assert error(unchanged, [1, 2], done, params) < 1e-4


async def test_another_model_can_take_over() -> None:
    engine, other, params = TransformersEngine(qwen3()), qwen3(initializer_range=0.4), SamplingParams(max_tokens=10)
    await engine.generate([1, 2], params, session="a")
    sampled = engine.meter.sampled
    await engine.update_weights(other, 1)
    done = await engine.generate([1, 2], params, session="a")
    assert error(other, [1, 2], done, params) < 1e-4
    assert engine.meter.sampled == sampled + 10


# -- what is refused -------------------------------------------------------------------------------------------------


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


def test_models_that_cannot_be_run() -> None:
    with pytest.raises(UserError, match="cannot run Gemma2ForCausalLM: its attention is soft-capped"):
        TransformersEngine(Gemma2ForCausalLM(Gemma2Config(**SHAPE)))
    from transformers import MptConfig, MptForCausalLM

    with pytest.raises(UserError, match="MptForCausalLM does not use transformers' attention interface"):
        TransformersEngine(MptForCausalLM(MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=60)))


def test_a_model_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused pass is dropped where it is wrong; if the generic one is wrong too, the model is refused."""
    states = FusedForward.__call__
    monkeypatch.setattr(FusedForward, "__call__", lambda self, plan: states(self, plan) + 0.1 * plan.ids[:, None])
    assert TransformersEngine(qwen3())._view.fused is None
    generic = View.__call__
    monkeypatch.setattr(View, "__call__", lambda self, plan: generic(self, plan) + 0.1 * plan.ids[:, None])
    with pytest.raises(UserError, match="Qwen3ForCausalLM computes something else in the embedded engine"):
        TransformersEngine(qwen3())


async def test_threads_inside_an_operation_are_set_for_its_passes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), []
    call = FusedForward.__call__

    def watched(self: FusedForward, plan: Plan) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return call(self, plan)

    monkeypatch.setattr(FusedForward, "__call__", watched)
    for threads, expected in ((None, 1), (1, 1), (2, 2)):
        engine = TransformersEngine(qwen3(), threads=threads)
        await engine.generate([1], greedy(1), session="a")
        assert set(seen) == {expected}
        assert torch.get_num_threads() == before
        seen.clear()
