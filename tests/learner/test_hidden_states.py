"""What rows share is computed once, and the numbers are those of the plain way: for values and for gradients."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from agentrl.errors import UserError
from agentrl.learner.hidden_states import PADDED, PREFIX, ComputeStates, prove_prefix_sharing
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.packing import MicroBatch
from agentrl.models.lm_head import NotProven, find_backbone
from agentrl.types import Sample
from tests.helpers.tiny import MODELS, SHAPE, VOCABULARY, half, llama, qwen3, sliding


def alike(seed: int = 0, groups: int = 3) -> list[Sample]:
    """Groups that share a prompt, whose members share beginnings, some of which are the same."""
    rng = random.Random(seed)

    def some(count: int) -> list[int]:
        return rng.choices(range(VOCABULARY), k=count)

    found = []
    for _ in range(groups):
        prompt, call = some(rng.randint(30, 50)), some(20)
        for _ in range(5):
            begun = call if rng.random() < 0.6 else call[: rng.randint(0, 19)]
            ids = [*prompt, *begun, *(some(rng.randint(1, 20)) if rng.random() < 0.8 else [])]
            mask = [0] * len(prompt) + [int(rng.random() < 0.7) for _ in ids[len(prompt) :]]
            mask[-1] = 1
            found.append(Sample(ids, mask, [-4.0 * m for m in mask], [rng.uniform(-1, 1)] * len(mask)))
    return sorted(found, key=lambda s: s.token_ids)


def gpt2() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=256, n_embd=32, n_layer=2, n_head=4)
    return GPT2LMHeadModel(config)


def softcapped() -> Any:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, attn_logit_softcapping=20.0))


def of(
    states: ComputeStates, model: Any, batch: MicroBatch, value: Callable[[Tensor], Tensor] = torch.tanh
) -> tuple[Tensor, list[Tensor]]:
    """The states, and the gradients of a value of each."""
    found = states(model, batch)
    model.zero_grad()
    torch.autograd.backward((value(found) * torch.linspace(-1, 1, found.shape[-1], dtype=found.dtype)).sum())
    return found.detach(), [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@st.composite
def trees(draw: st.DrawFn) -> list[Sample]:
    """Rows that branch from each other at any place, of any depth: what a tree of rollouts gives."""
    ids = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=60)
    rows = [draw(ids)]
    for _ in range(draw(st.integers(0, 9))):
        trunk = draw(st.sampled_from(rows))
        rows.append([*trunk[: draw(st.integers(0, len(trunk)))], *draw(ids)])
    found = []
    for row in sorted(rows):
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=len(row) - 1, max_size=len(row) - 1))]
        found.append(Sample(row, mask, [0.0] * len(row), [1.0] * len(row)))
    return found


@cache
def exact(make: Any, dtype: torch.dtype) -> Any:
    """In that precision all through: transformers' norms would compute in single precision."""
    model = make().eval().to(dtype)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(rms_norm, module)
    return model


def rms_norm(norm: Any, x: Tensor) -> Tensor:
    found: Tensor = norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return found


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("make", [qwen3, llama, sliding])
@settings(max_examples=6, deadline=None)
@given(rows=trees())
def test_gradients_of_any_tree_are_those_of_its_rows_one_by_one(
    make: Any, dtype: torch.dtype, allowed: float, rows: list[Sample]
) -> None:
    model = exact(make, dtype)
    _, found = of(PREFIX.compute_states, model, MicroBatch.read(rows), torch.sin)
    alone = [
        of(PADDED.compute_states, model, MicroBatch.read([row]), torch.sin)[1] for row in rows if any(row.loss_mask)
    ]
    for number, grad in enumerate(found):
        wanted = sum((grads[number] for grads in alone), torch.zeros_like(grad))
        assert float((grad - wanted).norm()) <= allowed * max(float(wanted.norm()), 1.0)


@pytest.mark.parametrize("make", [*MODELS, gpt2])
def test_states_and_gradients_are_those_of_padded_rows(make: Any) -> None:
    model, rows = make().eval(), alike()
    batch = MicroBatch.read(rows)
    assert len(batch.forest.token_ids) < 0.7 * sum(len(r.token_ids) for r in rows)
    assert len(batch.forest.siblings) > 3
    (wanted, wanted_grads), (found, grads) = (
        of(PADDED.compute_states, model, batch),
        of(PREFIX.compute_states, model, batch),
    )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert len(grads) == len(wanted_grads)
    for one, other in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("make", [qwen3, llama, sliding, half])
def test_a_model_shows_that_it_can(make: Any) -> None:
    prove_prefix_sharing(make())


def test_rows_that_share_nothing_and_a_row_alone() -> None:
    model = qwen3().eval()
    for rows in ([Sample([5, 6, 7], [0, 1, 1], [0.0] * 3, [1.0] * 3)], [*alike(1)[:1], *alike(2)[:1]]):
        batch = MicroBatch.read(rows)
        torch.testing.assert_close(
            PREFIX.compute_states(model, batch), PADDED.compute_states(model, batch), atol=1e-5, rtol=1e-4
        )


def test_the_model_s_own_attention_is_there_again_afterwards() -> None:
    model, ids = qwen3().eval(), torch.arange(6)[None]
    before, name = model(ids).logits, model.config._attn_implementation
    PREFIX.compute_states(model, MicroBatch.read(alike()[:2]))
    assert model.config._attn_implementation == name
    assert torch.equal(model(ids).logits, before)


def learned(model: Any, **settings: Any) -> tuple[Any, dict[str, float]]:
    policy = copy.deepcopy(model)
    learner = Learner(policy, [torch.optim.SGD(policy.parameters(), lr=0.1)], LossSettings(threads=1, **settings))
    return policy, learner.update(alike())


@pytest.mark.parametrize("budget", [64, 256, 8192])
@pytest.mark.parametrize("updates", [1, 3])
def test_an_update_is_the_same_either_way(budget: int, updates: int) -> None:
    model = qwen3().eval()
    shared, told = learned(model, packing="prefix", max_tokens_per_microbatch=budget, num_iterations=updates)
    padded, also = learned(model, packing="padded", num_iterations=updates)
    assert told == pytest.approx(also, abs=1e-4)
    for one, other in zip(shared.parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("packing", ["prefix", "padded"])
@pytest.mark.parametrize("make", [qwen3, llama, sliding])
def test_checkpointed_activations_are_computed_again(packing: str, make: Any) -> None:
    passes: list[int] = []
    watched = make().eval()
    find_backbone(watched)  # a pass of its own, once for each class
    watched.model.layers[0].input_layernorm.register_forward_hook(lambda *_: passes.append(1))
    kept, told = learned(watched, packing=packing)
    plain = len(passes)
    again, also = learned(watched, packing=packing, gradient_checkpointing=True)
    assert len(passes) - plain == plain + 1
    assert told == pytest.approx(also, abs=1e-5)
    for one, other in zip(kept.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    assert not any(m.training for m in again.modules())


def test_a_model_that_cannot_compute_again_is_refused() -> None:
    model = qwen3().eval()
    type(model).supports_gradient_checkpointing, kept = False, type(model).supports_gradient_checkpointing
    try:
        with pytest.raises(UserError, match=r"learner.gradient_checkpointing: Qwen3ForCausalLM does not support"):
            learned(model, gradient_checkpointing=True)
    finally:
        type(model).supports_gradient_checkpointing = kept


def test_a_model_that_cannot_share_prefixes_is_trained_padded_with_a_warning() -> None:
    model = softcapped().eval()
    with pytest.warns(UserWarning, match=r"Gemma2ForCausalLM: the prefixes .* soft-capped"):
        shared, _ = learned(model)
    padded, _ = learned(model, packing="padded")
    for one, other in zip(shared.parameters(), padded.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_that_ignores_the_forest_is_refused() -> None:
    """Its attention is its own: over a forest it would see the neighbours."""
    model = qwen3().eval()
    forward = type(model.model).forward

    def plain(self: Any, **given: Any) -> Any:
        self.config._attn_implementation = "sdpa"
        return forward(self, **given)

    model.model.forward = plain.__get__(model.model)
    with pytest.raises(NotProven, match="off by"):
        prove_prefix_sharing(model)
