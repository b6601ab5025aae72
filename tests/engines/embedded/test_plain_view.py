"""The plain way: which cache is used, and that it gives the model's own logits."""

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MptConfig, MptForCausalLM

from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.engines.embedded.plain_view import PlainModel
from agentrl.types import SamplingParams
from tests.helpers.causal_lms import describe_way, sampled, subject
from tests.helpers.tiny import SHAPE, error, qwen3

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("name", "how", "why"),
    [
        ("gemma2", "plain", "its attention is soft-capped, or has sinks"),
        ("mpt", "plain", "MptAttention mixes positions"),
        ("roberta", "plain", "it does more to its logits"),
        ("mamba", "plain, each turn anew", "MambaMixer mixes positions"),
        ("openai-gpt", "plain, without a cache", "Attention mixes positions"),
    ],
)
@pytest.mark.slow
async def test_a_model_is_called_as_it_is_where_the_fast_way_is_not_proven(name: str, how: str, why: str) -> None:
    model = subject(name)
    with pytest.warns(UserWarning, match=rf"goes the plain way, .*: {why}.* vLLM may be faster: --engine vllm"):
        engine = TransformersEngine(model, capacity=2)
    assert describe_way(engine._model) == how
    assert await sampled(model, engine) < 1e-4


def test_one_that_a_cache_makes_wrong_goes_without() -> None:
    class Forgetful(type(qwen3())):  # type: ignore[misc]
        def forward(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = qwen3()
    model.__class__ = Forgetful
    assert PlainModel(model, snapshot=False).way is None


def test_one_that_loses_count_is_told_its_positions() -> None:
    """As Bamba, whose first layer, which it asks for them, holds no tokens."""

    class Lost(type(qwen3())):  # type: ignore[misc]
        def forward(self, input_ids: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
            return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)

    model = qwen3()
    model.__class__ = Lost
    view = PlainModel(model, snapshot=False)
    assert describe_way(view) == "plain"
    assert view.way is not None
    assert view.way.tells_positions


async def test_what_a_model_keeps_in_its_modules_is_no_cache() -> None:
    """RecurrentGemma does: told its positions it is right for one row, and wrong for two that take turns."""
    model = subject("recurrent_gemma")
    with pytest.warns(UserWarning, match="without a cache"):
        engine = TransformersEngine(model, capacity=4)
    assert describe_way(engine._model) == "plain, without a cache"
    assert await sampled(model, engine) < 1e-4


def test_rounding_that_a_model_magnifies_costs_it_no_cache() -> None:
    """As delta nets do, which compute in single precision whatever they are given."""

    class Magnifying(type(qwen3())):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = (1e5 * out.logits.to(torch.float32)).sin()
            return out

    model = qwen3()
    model.__class__ = Magnifying
    assert describe_way(PlainModel(model, snapshot=False)) == "plain"


def test_rows_that_disturb_each_other_go_one_by_one() -> None:
    class Sociable(type(qwen3())):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits + 0.1 * (len(out.logits) - 1)
            out.logits[..., 0] += len(out.logits) - 1
            return out

    model = qwen3()
    model.__class__ = Sociable
    view = PlainModel(model, snapshot=False)
    assert describe_way(view) == "plain, row by row"


@pytest.mark.parametrize(
    "model",
    [
        Gemma2ForCausalLM(Gemma2Config(**SHAPE)),
        MptForCausalLM(MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=60)),
    ],
    ids=["gemma2", "mpt"],
)
@pytest.mark.filterwarnings("ignore:.*the plain way")
async def test_new_weights_are_used_from_the_next_token_on(model: Any) -> None:
    engine, params = TransformersEngine(model.eval(), snapshot=True), SamplingParams(max_tokens=6)
    context = [1, 2, 3]
    done = await engine.generate(context, params, session="a")
    assert error(model, context, done, params) < 1e-4
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    context = [*context, *done.token_ids, 7, 8]
    await engine.update_weights(model, 1)
    done = await engine.generate(context, params, session="a")
    assert done.versions == (1,) * 6
    assert engine.meter.reused == 0
    assert error(model, context, done, params) < 1e-4
