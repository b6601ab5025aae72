"""Muon against torch's own."""

from __future__ import annotations

import pytest
import torch

from agentrl.learner.muon import Muon, orthogonalize


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (16, 16)])
def test_the_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(x))
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_it_follows_torch_but_for_bfloat16() -> None:
    torch.manual_seed(0)
    start = [torch.randn(12, 30), torch.randn(12, 30), torch.randn(16, 8)]
    ours, theirs = ([p.clone().requires_grad_() for p in start] for _ in range(2))
    optimizers = (
        Muon(ours, lr=0.01, weight_decay=0.1),
        torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(4):
        grads = [torch.randn_like(p) for p in start]
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            for p, g in zip(params, grads, strict=True):
                p.grad = g.clone()
            optimizer.step()
    for p, q, first in zip(ours, theirs, start, strict=True):
        moved = (q - first).norm()
        assert (p - q).norm() < 0.03 * moved


def test_parameters_without_gradient_stay() -> None:
    p = torch.ones(4, 4, requires_grad=True)
    Muon([p], lr=0.1).step()
    assert torch.equal(p, torch.ones(4, 4))
