"""The engine's view of the policy: its weights, old and new."""

from functools import partial
from typing import Any

import anyio
import pytest
import torch

from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.types import SamplingParams
from tests.helpers.tiny import MODELS, Make, error, qwen3, reference, together

pytestmark = pytest.mark.usefixtures("one_thread")


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
            read = engine._model.update
            monkeypatch.setattr(engine._model, "update", lambda m: shake(m) or read(m))
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


async def test_an_update_of_the_weights_empties_the_cache() -> None:
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
async def test_parameters_are_shared_unless_it_is_a_snapshot(make: Make) -> None:
    model = make()
    names = dict(model.named_parameters())
    view = dict(TransformersEngine(model)._model.model.named_parameters())
    assert all(view[name] is weight for name, weight in names.items())
    assert model.config._attn_implementation != TransformersEngine(model)._model.config._attn_implementation
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
