"""The fused pass computes what transformers' does, of every family; in bfloat16 as nearly as transformers' own does."""

import copy
import random

import pytest
import torch
from torch import Tensor

from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.engines.embedded.fused_forward import FusedForward, can_fuse
from agentrl.engines.embedded.model_view import InferenceModel, run_fused
from agentrl.models.perturbation import run_own_states
from agentrl.types import SamplingParams
from tests.helpers.tiny import FUSED, SHAPE, VOCABULARY, Make, gemma3, olmo2, qwen3, reference

pytestmark = pytest.mark.usefixtures("one_thread")


def rows(lengths: tuple[int, ...] = (50, 7, 31)) -> list[list[int]]:
    rng = random.Random(0)
    return [rng.choices(range(VOCABULARY), k=n) for n in lengths]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The root mean square of what is off, by that of what is expected."""
    a, b = torch.cat(found).double(), torch.cat(expected).double()
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt())


@pytest.mark.parametrize("make", FUSED)
@torch.no_grad()
def test_it_is_transformers_own_pass_across_windows(make: Make) -> None:
    model = make().eval()
    assert can_fuse(model)
    assert distance(run_fused(model, rows()), run_own_states(model, rows())) < 2e-6
    assert TransformersEngine(model)._model.fused is not None


@pytest.mark.parametrize("make", FUSED)
@torch.no_grad()
def test_in_bfloat16_it_is_as_near_to_the_truth_as_transformers_own_pass(make: Make) -> None:
    model = make().eval()
    half = copy.deepcopy(model)
    for weight in half.parameters():
        weight.data = weight.data.bfloat16()
    truth = run_own_states(model, rows())
    assert 1e-4 < distance(run_fused(half, rows()), truth) < 1.05 * distance(run_own_states(half, rows()), truth)


@pytest.mark.parametrize("make", [gemma3, qwen3, olmo2])
async def test_an_engine_samples_in_bfloat16_from_weights_in_float32(make: Make) -> None:
    """Its logprobs are those that it sampled by, near to the weights'; new weights are read, and stay as they are."""
    model = make().eval()
    engine, params = TransformersEngine(model, dtype=torch.bfloat16), SamplingParams(max_tokens=60)
    prompt = rows()[0]
    half = copy.deepcopy(model)
    for weight in half.parameters():
        weight.data = weight.data.bfloat16()
    for version in (0, 1):
        done = await engine.generate(prompt, params, session="a")
        off = reference(model, prompt, done, params) - torch.tensor(done.logprobs)
        own = reference(model, prompt, done, params) - reference(half, prompt, done, params)
        assert 1e-4 < off.abs().mean() < 1.5 * own.abs().mean()
        with torch.no_grad():
            for weight, rounded in zip(model.parameters(), half.parameters(), strict=True):
                weight.add_(0.05 * torch.randn_like(weight))
                rounded.copy_(weight)
        await engine.update_weights(model, version + 1)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@torch.no_grad()
def test_packed_matrices_of_a_larger_model_are_read_again() -> None:
    """Every matrix is large enough to be packed; the pass follows the weights when it is told to, not before."""
    model = qwen3(**{"hidden_size": 384, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 6}).eval()
    assert SHAPE["hidden_size"] != model.config.hidden_size
    before, fused = run_fused(model, rows()), FusedForward(model, 64)
    assert distance(before, run_own_states(model, rows())) < 2e-6
    for weight in model.parameters():
        weight.mul_(1.1)
    fused.refresh()
    assert distance(run_fused(model, rows()), run_own_states(model, rows())) < 2e-6
    assert distance(before, run_own_states(model, rows())) > 1e-2


async def test_packed_matrices_are_given_back_while_the_learner_learns() -> None:
    model = qwen3().eval()
    engine = TransformersEngine(model)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    before = await engine.generate([1, 2, 3], params, session="a")
    view = engine._model
    assert isinstance(view, InferenceModel)
    assert view.fused is not None
    await engine.sleep()
    assert (view.fused.layers, view._lm_head) == ([], None)
    after = await engine.generate([1, 2, 3], params, session="b")
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    await engine.sleep()
    await engine.update_weights(model, 1)
    assert (await engine.generate([1, 2, 3], params, session="c")).logprobs == before.logprobs
