"""The batch of the plain way: rows go together where they can, join, leave, and are kept for their next turn."""

from typing import Any

import anyio
import pytest
from transformers import Gemma2Config, Gemma2ForCausalLM

from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.engines.embedded.plain_batch import PlainBatch
from agentrl.types import SamplingParams
from tests.helpers.tiny import SHAPE, conversation, disturbed, error, greedy, together

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*the plain way")]


@pytest.fixture(scope="module")
def model() -> Any:
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, sliding_window=8)).eval()


@pytest.mark.parametrize("capacity", [3, 8])
async def test_conversations_of_any_length_are_those_of_the_model(model: Any, capacity: int) -> None:
    engine = TransformersEngine(model, capacity=capacity)
    assert isinstance(engine._batch, PlainBatch)
    params = [SamplingParams(max_tokens=4 + n, seed=n, temperature=0.5 + 0.2 * n) for n in range(5)]
    found = await together(*(lambda n=n, p=p: conversation(engine, model, n, p) for n, p in enumerate(params)))
    assert max(max(off) for off in found) < 1e-4
    assert engine._batch.rows == []


async def test_the_samples_of_a_group_share_their_prompt_and_their_passes(model: Any) -> None:
    engine, prompt = TransformersEngine(model), list(range(30))
    members = [SamplingParams(max_tokens=5 + n, seed=n) for n in range(6)]
    found = await together(*(lambda m=m: engine.generate(prompt, m, session=str(m.seed)) for m in members))
    assert max(error(model, prompt, d, m) for d, m in zip(found, members, strict=True)) < 1e-4
    assert engine.meter.prefilled <= 60  # once, or twice where one came before the others
    assert engine.meter.passes <= 2 * 10


async def test_a_seed_gives_the_same_tokens_whoever_is_beside(model: Any) -> None:
    params = SamplingParams(max_tokens=8, seed=3)
    alone = await TransformersEngine(model).generate([5, 6, 7], params, session="a")
    engine = TransformersEngine(model)
    calls = [lambda n=n: engine.generate([n] * (n + 1), greedy(6), session=f"b{n}") for n in range(4)]
    *_, beside = await together(*calls, lambda: engine.generate([5, 6, 7], params, session="a"))
    assert beside.token_ids == alone.token_ids


async def test_a_second_turn_begins_with_what_is_kept(model: Any) -> None:
    engine, prompt = TransformersEngine(model), list(range(20))
    done = await engine.generate(prompt, greedy(10), session="a")
    context = [*prompt, *done.token_ids, 1, 2, 3]
    again = await engine.generate(context, greedy(5), session="a")
    assert (engine.meter.prefilled, engine.meter.reused) == (20 + 4, 29)
    assert error(model, context, again, greedy(5)) < 1e-4
    changed = [*range(12), 50, 51]
    other = await engine.generate(changed, greedy(5), session="a")
    assert engine.meter.reused == 29
    assert error(model, changed, other, greedy(5)) < 1e-4
    assert engine._batch.sessions.size > 0
    engine.end_session("a")
    assert engine._batch.sessions.size == 0


async def test_a_cancelled_turn_leaves_the_others_alone(model: Any) -> None:
    engine, params = TransformersEngine(model), SamplingParams(max_tokens=120, seed=1)
    found: list[Any] = []
    async with anyio.create_task_group() as tasks:

        async def other() -> None:
            found.append(await engine.generate([1, 2, 3], params, session="a"))

        tasks.start_soon(other)
        with anyio.move_on_after(0.05):
            await engine.generate([1, 2, 4], SamplingParams(max_tokens=200), session="b")
    assert len(found[0].token_ids) == 120
    assert error(model, [1, 2, 3], found[0], params) < 1e-4
    assert engine._batch.rows == []


async def test_weights_that_change_in_flight_are_told_by_token(model: Any) -> None:
    engine = TransformersEngine(model)
    calls = [lambda: engine.generate([1, 2, 3], greedy(120), session="a")]
    (found,) = await disturbed(calls, lambda: engine.update_weights(model, 1))
    assert sorted(set(found.versions)) == [0, 1]
    assert error(model, [1, 2, 3], found, greedy(120)) < 1e-4


async def test_turns_that_begin_at_one_position_with_unequal_news_are_not_mixed_up(model: Any) -> None:
    """Both are kept at the same position; the one brings two tokens, the other four."""
    engine, prompts = TransformersEngine(model), ([1, 2, 3], [4, 5, 6])
    first = await together(*(lambda p=p: engine.generate(p, greedy(6), session=str(p)) for p in prompts))
    contexts = [[*p, *d.token_ids, *([7] * n)] for p, d, n in zip(prompts, first, (1, 3), strict=True)]
    calls = [
        lambda c=c, p=p: engine.generate(c, greedy(6), session=str(p)) for c, p in zip(contexts, prompts, strict=True)
    ]
    short = [lambda n=n: engine.generate([n], greedy(1), session=f"s{n}") for n in range(3)]
    found = await together(*short, *calls, *short)
    assert max(error(model, c, d, greedy(6)) for c, d in zip(contexts, found[3:5], strict=True)) < 1e-4
