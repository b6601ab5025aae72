"""The batch: nothing is computed twice."""

from threading import Event

import anyio
import pytest

from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.types import SamplingParams
from tests.helpers.tiny import error, greedy, qwen3, together

pytestmark = pytest.mark.usefixtures("one_thread")


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
        with anyio.fail_after(60):
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


async def test_the_end_of_a_session_frees_its_cache() -> None:
    engine = TransformersEngine(qwen3())
    await engine.generate([1, 2, 3], greedy(5), session="a")
    assert engine._batch.sessions.size > 0
    engine.end_session("a")
    assert engine._batch.sessions.size == 0


async def test_a_long_prompt_goes_in_parts() -> None:
    model, params = qwen3(), SamplingParams(max_tokens=10)
    engine = TransformersEngine(model, prefill_tokens=16)
    contexts = [[n] * length for n, length in enumerate([60, 3, 17, 100, 16])]
    found = await together(*(lambda c=c: engine.generate(c, params, session=str(c)) for c in contexts))
    assert max(error(model, c, d, params) for c, d in zip(contexts, found, strict=True)) < 1e-4
