"""Products in bfloat16 beside weights in float32: no more noise than autocast's, and everything else as before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agentrl.errors import UserError
from agentrl.learner.bf16_products import find_linear_layers, has_bf16_products, multiply_in_bf16
from agentrl.learner.learner import Learner, LossSettings
from agentrl.settings.schema import TrainConfig
from agentrl.training import algorithm
from agentrl.training.algorithm import explain_bf16
from agentrl.types import Sample
from tests.helpers.tiny import VOCABULARY, qwen2, qwen3


def rows() -> list[Sample]:
    prompt = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(99)).tolist()
    found = []
    for seed in range(6):
        ids = prompt + torch.randint(VOCABULARY, (20,), generator=torch.Generator().manual_seed(seed)).tolist()
        found.append(Sample(ids, [0] * 40 + [1] * 20, [-4.0] * 60, [1.0 - seed % 2 * 2.0] * 60))
    return found


class Recorder(torch.optim.SGD):
    """An optimizer that keeps the gradient it was given, and changes nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen = torch.cat([p.grad.flatten() for g in self.param_groups for p in g["params"] if p.grad is not None])


def gradient(model: Any, **settings: Any) -> tuple[Tensor, Learner]:
    recorder = Recorder([p for p in model.parameters() if p.requires_grad], lr=1.0)
    given: dict[str, Any] = {"max_tokens_per_microbatch": 200, "max_grad_norm": 1e12} | settings
    ours = Learner(model, [recorder], LossSettings(threads=1, **given))
    ours.update(rows())
    return recorder.seen, ours


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("make", [qwen3, qwen2])  # without biases, and with
def test_a_model_s_gradients_are_no_farther_off_than_those_of_autocast(make: Any) -> None:
    model, ids = make().eval(), torch.tensor([r.token_ids for r in rows()])
    weights = torch.randn(ids.shape[0], ids.shape[1], VOCABULARY, generator=torch.Generator().manual_seed(1))

    def gradients() -> Tensor:
        model.zero_grad()
        torch.autograd.backward((model(input_ids=ids).logits.float().log_softmax(-1) * weights).sum())
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    exact = gradients()
    with multiply_in_bf16(find_linear_layers(model)):
        ours = gradients()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = gradients()
    assert 1e-4 < distance(ours, exact) < 1.2 * distance(theirs, exact)
    assert torch.equal(gradients(), exact)  # afterwards all is as before


@pytest.mark.parametrize("packing", ["prefix", "padded"])
def test_an_update_has_the_same_gradient_but_for_noise(packing: str) -> None:
    exact, _ = gradient(qwen3().eval(), packing=packing)
    found, ours = gradient(qwen3().eval(), packing=packing, bf16=True)
    assert 1e-4 < distance(found, exact) < 0.05
    assert all("forward" not in vars(m) for m in ours.policy.modules())
    assert all(p.dtype == torch.float32 for p in ours.policy.parameters())


def test_layers_that_compute_again_compute_the_same() -> None:
    kept, _ = gradient(qwen3().eval(), bf16=True)
    again, _ = gradient(qwen3().eval(), bf16=True, gradient_checkpointing=True)
    torch.testing.assert_close(again, kept, rtol=1e-4, atol=1e-5)


def test_the_old_policy_of_a_later_step_is_in_the_same_precision() -> None:
    """Its logprobs come from a pass of their own: those of the very policy where nothing was learnt in between."""
    settings: dict[str, Any] = {"bf16": True, "packing": "padded"}
    _, whole = gradient(qwen3().eval(), **settings)
    _, ours = gradient(qwen3().eval(), **settings)
    told = ours.update(rows(), updates=[0, 0, 0, 1, 1, 1])
    for one, other in zip(ours.old_logprobs, whole.old_logprobs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert told["clip_ratio/region_mean"] == 0.0


def test_only_an_adapter_is_trained_where_there_is_one() -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        model = qwen3().eval()
        torch.manual_seed(0)
        return peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        ).eval()

    exact, _ = gradient(adapted())
    found, _ = gradient(adapted(), bf16=True)
    assert len(found) == len(exact)
    assert 1e-4 < distance(found, exact) < 0.05


def test_a_resumed_learner_goes_on_bit_by_bit() -> None:
    def build() -> Learner:
        policy = qwen3().eval()
        return Learner(policy, [torch.optim.AdamW(policy.parameters(), lr=1e-2)], LossSettings(threads=1, bf16=True))

    first = build()
    first.update(rows())
    second = build()
    second.load(copy.deepcopy(first.state()))
    for ours in (first, second):
        ours.update(rows())
    for one, other in zip(first.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_that_would_not_change_is_refused() -> None:
    with pytest.raises(UserError, match=r"learner.bf16: no linear layer .* half precision already \(dtype\)"):
        find_linear_layers(qwen3().bfloat16())
    bare = qwen3()
    bare.model.layers = nn.ModuleList()
    with pytest.raises(UserError, match="it has none of torch's own"):
        find_linear_layers(bare)


def test_a_machine_without_such_products_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    on, off = (TrainConfig.model_validate({"env": "math-tools", "learner": {"bf16": b}}) for b in (True, False))
    policy: Any = type("Policy", (), {"model": qwen3()})()
    monkeypatch.setattr(algorithm, "has_bf16_products", lambda _: False)
    assert str(explain_bf16(on, policy)).startswith("learner.bf16: this machine has no products in bfloat16")
    assert explain_bf16(off, policy) is None
    sampled = TrainConfig.model_validate({"env": "math-tools", "engine": {"name": "transformers", "dtype": "bfloat16"}})
    assert "engine.dtype" in str(explain_bf16(sampled, policy))
    monkeypatch.setattr(algorithm, "has_bf16_products", lambda _: True)
    assert explain_bf16(on, policy) is None
    assert isinstance(has_bf16_products(torch.device("cpu")), bool)
