"""The gradient that the learner records of each token is the one that it trained, whatever the loss and the packing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.losses.objective import Objective, compute_policy_loss
from agentrl.learner.optimizers import make_optimizers
from agentrl.settings.catalogue import list_own_entries
from agentrl.types import Sample
from tests.learner.test_learner import alike, model, rows  # noqa: F401

LOSSES = [name for name, _ in list_own_entries("loss")]
LONGEST = 40


def build(policy: Any, **settings: Any) -> Learner:
    policy = copy.deepcopy(policy)
    more = {"threads": 1, "longest": LONGEST, **settings}
    return Learner(policy, make_optimizers(policy, "adamw", 1e-2), LossSettings(**more))


def forward(policy: Any, given: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Run each row alone: logprobs and loss masks, (rows, tokens), padded on the right."""
    width = max(len(r.token_ids) for r in given) - 1
    logp, mask = torch.zeros(len(given), width), torch.zeros(len(given), width)
    for i, r in enumerate(given):
        with torch.no_grad():
            each = policy(torch.tensor([r.token_ids])).logits[0, :-1].float().log_softmax(-1)
        n = len(r.token_ids) - 1
        logp[i, :n] = each.gather(1, torch.tensor(r.token_ids[1:])[:, None])[:, 0]
        mask[i, :n] = torch.tensor(r.loss_mask[1:])
    return logp, mask


def reference(policy: Any, given: Sequence[Sample], **settings: Any) -> list[Tensor]:
    """d loss / d logprob of the trained tokens of each row, by autograd through plain tensors, in one micro-batch."""
    logp, mask = forward(policy, given)
    logp = logp.double().requires_grad_()
    sampled = torch.full_like(logp, -3.8).detach()
    advantages = torch.tensor([r.advantages[-1] for r in given], dtype=torch.float64)
    plain: dict[str, Any] = {"old": logp.detach(), "sampling": sampled, "ref": logp.detach(), "advantages": advantages}
    loss, _ = compute_policy_loss(Objective(**settings), logp=logp, **plain, completion_mask=mask, longest=LONGEST)
    torch.autograd.backward(loss)
    assert logp.grad is not None
    return [own[m > 0].float() for own, m in zip(logp.grad, mask, strict=True)]


CASES = [
    *({"loss": loss, "importance_level": level} for loss in LOSSES for level in ("token", "sequence")),
    {"loss": "grpo", "importance_sampling_mode": "geometric_mask", "importance_sampling_max": 1.05},
    {"loss": "dapo", "off_policy_threshold": -0.1},
]


@pytest.mark.parametrize("settings", CASES, ids=lambda s: "-".join(map(str, s.values())))
@pytest.mark.parametrize("budget", [64, 8192])
def test_the_recorded_gradient_is_autograd_s_own(model: Any, settings: dict[str, Any], budget: int) -> None:  # noqa: F811
    given = [*rows(), *alike()]
    ours = build(model, max_tokens_per_microbatch=budget, **settings)
    ours.update(given)
    for own, wanted in zip(ours.learned, reference(model, given, **settings), strict=True):
        assert own is not None
        torch.testing.assert_close(own[:, 1], wanted, atol=1e-7, rtol=1e-4)


def test_with_a_kl_term_from_the_second_update_on(model: Any) -> None:  # noqa: F811
    """At the first one the policy is its reference, where k3 has no slope; at the second it has moved."""
    given = rows()
    ours = build(model, beta=0.5, num_iterations=1, max_tokens_per_microbatch=64)
    ours.update(given)
    moved = copy.deepcopy(ours.policy)
    ours.update(given)
    logp, mask = forward(moved, given)
    ref, _ = forward(model, given)
    logp = logp.double().requires_grad_()
    loss, _ = compute_policy_loss(
        Objective(beta=0.5),
        logp=logp,
        old=logp.detach(),
        sampling=torch.full_like(logp, -3.8).detach(),
        ref=ref.double(),
        advantages=torch.tensor([r.advantages[-1] for r in given], dtype=torch.float64),
        completion_mask=mask,
    )
    torch.autograd.backward(loss)
    assert logp.grad is not None
    for own, grad, m in zip(ours.learned, logp.grad, mask, strict=True):
        assert own is not None
        torch.testing.assert_close(own[:, 1], grad[m > 0].float(), atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("loss", ["grpo", "sapo", "luspo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_reference_is_the_slope_of_the_loss(loss: str, level: str) -> None:
    """Finite differences, in double precision, one token at a time."""
    torch.manual_seed(1)
    logp, old = -torch.rand(2, 3, dtype=torch.float64) - 1, -torch.rand(2, 3, dtype=torch.float64) - 1

    def compute(at: Tensor) -> Tensor:
        same: dict[str, Any] = {"old": old, "sampling": old}
        same["advantages"] = torch.tensor([1.0, -0.5], dtype=torch.float64)
        loss_value, _ = compute_policy_loss(
            Objective(loss, level, epsilon=0.999, epsilon_high=9.0), logp=at, **same, completion_mask=torch.ones(2, 3)
        )
        return loss_value

    assert torch.autograd.gradcheck(compute, (logp.requires_grad_(),))
