"""Optimizers by name: state in 8 bits, and steps that are too small for a weight in half precision."""

from __future__ import annotations

import pytest
import torch

from agentrl.learner.optimizers import make_optimizers
from agentrl.settings.catalogue import list_own_entries


def test_the_state_of_an_optimizer_in_8_bits() -> None:
    model = torch.nn.Linear(64, 128)
    (optimizer,) = make_optimizers(model, "adamw_8bit", 1e-3)
    before = model.weight.detach().clone()
    torch.autograd.backward(model(torch.ones(2, 64)).sum())
    optimizer.step()
    assert optimizer.state[model.weight]["state1"].dtype == torch.uint8
    torch.testing.assert_close(model.weight, before - 1e-3 * (1 + 0 * before), atol=1e-4, rtol=0.02)


@pytest.mark.parametrize("name", [name for name, _ in list_own_entries("optimizer")])
def test_small_steps_of_weights_in_half_precision_add_up(name: str) -> None:
    """As if the weights were in single precision; alone, each step would be rounded away."""
    torch.manual_seed(0)
    half = torch.nn.Linear(64, 80, dtype=torch.bfloat16)
    full = torch.nn.Linear(64, 80)
    full.load_state_dict({n: t.float() for n, t in half.state_dict().items()})
    start = full.weight.detach().clone()
    sides = [(m, make_optimizers(m, name, 1e-5)) for m in (half, full)]
    for _ in range(100):
        grads = [torch.randn_like(p).to(torch.bfloat16) + 1 for p in full.parameters()]
        for model, optimizers in sides:
            for p, g in zip(model.parameters(), grads, strict=True):
                p.grad = g.to(p.dtype)
            for optimizer in optimizers:
                optimizer.step()
    assert (full.weight - start).abs().mean() > 5e-5
    torch.testing.assert_close(half.weight, full.weight.to(torch.bfloat16))
    torch.testing.assert_close(half.bias, full.bias.to(torch.bfloat16))
    assert half.weight.grad is None
