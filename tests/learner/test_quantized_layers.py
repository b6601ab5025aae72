"""Weights in 4 bits as bytes: a layer computes what bitsandbytes computes; shards are in test_sharding.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from agentrl.learner.quantized_layers import hold_as_bytes

pytest.importorskip("bitsandbytes")


def policy() -> Any:
    from tests.helpers.sharded import build_policy

    return build_policy("qlora", "untied", torch.float32)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(torch.arange(5, 40)[None]).logits.square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_bytes_give_the_gradients_of_the_weights_they_stand_for() -> None:
    model = policy()
    before = gradients(model)
    scales = hold_as_bytes(model)
    held = [p for p in model.parameters() if p.dtype == torch.uint8]
    assert held
    assert all(type(p) is nn.Parameter and not p.requires_grad for p in held)
    after = gradients(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert len(scales) >= len(held)


def test_the_scales_are_those_that_are_read_with() -> None:
    model = policy()
    before = model(torch.arange(5, 40)[None]).logits
    for scale in hold_as_bytes(model):
        if scale.dtype == torch.uint8:
            scale.zero_()
    assert not torch.equal(model(torch.arange(5, 40)[None]).logits, before)


def test_a_model_in_full_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    before = list(model.parameters())
    assert hold_as_bytes(model) == []
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
