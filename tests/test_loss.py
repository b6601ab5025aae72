"""The loss: TRL's losses and gradients, number by number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.learner.loss import LOSSES, clipped, dapo_weights, grpo_weights, out_of_range, truncated_importance

GOLDEN = json.loads((Path(__file__).parent / "golden" / "trl_losses.json").read_text())
INPUTS = GOLDEN["inputs"]
EPSILON, EPSILON_HIGH = INPUTS["epsilon"], INPUTS["epsilon_high"]


def tensor(name: str) -> Tensor:
    return torch.tensor(INPUTS[name], dtype=torch.float64)


MASK = tensor("completion_mask") * tensor("tool_mask")  # (rows, tokens)
LENGTHS = [int(n) for n in MASK.sum(1)]


def sequence_masked() -> Tensor:
    """TRL's default correction: the whole row's ratio, or nothing where it is over 3."""
    rho: Tensor = ((tensor("old") - tensor("sampling")) * MASK).sum(1, keepdim=True).exp().expand_as(MASK)
    return torch.where(rho > 3.0, torch.zeros_like(rho), rho)


def token_truncated() -> Tensor:
    return truncated_importance(tensor("old"), tensor("sampling"), 1.1).clamp(min=0.9)


def dapo() -> Tensor:
    """Each token's weight, where TRL's normaliser counts the tokens of all ranks and steps of a generation batch."""
    share: float = INPUTS["num_processes"] * INPUTS["steps_per_generation"] / INPUTS["grad_accum"]
    step_tokens: float = INPUTS["num_items_in_batch"] / share
    ours = torch.tensor(dapo_weights(LENGTHS), dtype=torch.float64)
    return ours * sum(LENGTHS) / step_tokens


def grpo() -> Tensor:
    """Each row's weight in an optimizer step of ``grad_accum`` micro-batches like this one."""
    step = LENGTHS * INPUTS["grad_accum"]
    return torch.tensor(grpo_weights(step)[: len(LENGTHS)], dtype=torch.float64)


@pytest.mark.parametrize(
    ("case", "weights", "rho"),
    [
        ("dapo|token|sequence_mask|beta0", dapo, sequence_masked),
        ("grpo|token|sequence_mask|beta0", grpo, sequence_masked),
        ("dapo|token|token_truncate|clip0.9-1.1", dapo, token_truncated),
    ],
)
def test_the_losses_and_gradients_of_trl(case: str, weights: Any, rho: Any) -> None:
    wanted = GOLDEN["cases"][case]
    logp = tensor("logp").requires_grad_()
    chosen = MASK.bool()
    rows = torch.arange(len(LENGTHS))[:, None].expand_as(MASK)[chosen]
    each = clipped(logp[chosen], tensor("old")[chosen], tensor("advantages")[rows], EPSILON, EPSILON_HIGH)
    loss = (each * rho()[chosen] * weights()[rows]).sum()
    loss.backward()
    assert logp.grad is not None
    assert loss.item() == pytest.approx(wanted["loss"], abs=1e-6)
    torch.testing.assert_close(logp.grad, torch.tensor(wanted["grad_logp"], dtype=torch.float64), atol=1e-6, rtol=0)
    assert not logp.grad[~chosen].any()


def test_the_clip_ratio_of_trl() -> None:
    chosen = MASK.bool()
    rows = torch.arange(len(LENGTHS))[:, None].expand_as(MASK)[chosen]
    clip = out_of_range(
        tensor("logp")[chosen], tensor("old")[chosen], tensor("advantages")[rows], EPSILON, EPSILON_HIGH
    )
    wanted = GOLDEN["cases"]["dapo|token|sequence_mask|beta0"]["metrics"]["clip_ratio/region_mean"]
    assert clip.mean().item() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.0, 1.0, -1.0),
        (1.3, 1.0, 0.0),  # good, and more likely by far: enough
        (1.3, -1.0, 1.3),  # bad, and more likely: never enough
        (0.7, 1.0, -0.7),
        (0.7, -1.0, 0.0),
    ],
)
def test_the_clip_takes_the_gradient_of_what_went_far_enough(ratio: float, advantage: float, slope: float) -> None:
    logp = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    clipped(logp, torch.zeros_like(logp), torch.tensor([advantage], dtype=torch.float64), 0.2, 0.28).sum().backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(slope)


def test_the_correction_is_capped_above_alone() -> None:
    old, sampled = torch.tensor([0.0, -1.0, -9.0, -1.0]), torch.tensor([-5.0, -1.0, -1.0, -float("inf")])
    assert truncated_importance(old, sampled, 2.0).tolist() == pytest.approx([2.0, 1.0, 0.000335, 2.0], abs=1e-5)


@pytest.mark.parametrize("lengths", [[3], [5, 1, 4], [7] * 4])
def test_a_reduction_is_a_mean(lengths: list[int]) -> None:
    for weights in LOSSES.values():
        assert sum(w * n for w, n in zip(weights(lengths), lengths, strict=True)) == pytest.approx(1.0)
    assert len(set(dapo_weights(lengths))) == 1
    assert [w * n for w, n in zip(grpo_weights(lengths), lengths, strict=True)] == pytest.approx(
        [1 / len(lengths)] * len(lengths)
    )


def test_nothing_is_a_step_of_nothing() -> None:
    assert (dapo_weights([]), grpo_weights([]), dapo_weights([0]), grpo_weights([0])) == ([], [], [1.0], [1.0])
