"""What an update changes: it steps, it is saved and read again with the same bits, and refuses what is another's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agentrl.errors import UserError
from agentrl.learner.optimizers import make_optimizers
from agentrl.learner.train_state import TrainState


def begin(optimizer: str = "adamw", width: int = 3, seed: int = 0, **settings: bool) -> TrainState:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
    return TrainState(model, make_optimizers(model, optimizer, 1e-2), **settings)


def step(state: TrainState, gradient: float = 1.0) -> float:
    for p in state.parameters.values():
        p.grad = torch.full_like(p, gradient)
    return state.step(max_grad_norm=1.0)


def copy(state: TrainState) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in state.parameters.items()}


def test_the_norm_is_that_before_clipping_and_every_step_is_a_version() -> None:
    state = begin()
    count = sum(p.numel() for p in state.parameters.values())
    assert step(state, 2.0) == pytest.approx(2.0 * count**0.5)
    assert state.version == 1
    assert all(p.grad is None for p in state.parameters.values())


@pytest.mark.parametrize("gradient", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_is_no_step(gradient: float) -> None:
    state = begin()
    step(state)
    before, held = copy(state), state.optimizers[0].state_dict()["state"][0]["exp_avg"].clone()
    step(state, gradient)
    assert all(torch.equal(p, before[n]) for n, p in state.parameters.items())
    assert torch.equal(state.optimizers[0].state_dict()["state"][0]["exp_avg"], held)
    assert state.version == 1


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_was_collected_goes_on_with_the_same_bits(optimizer: str) -> None:
    one, other = begin(optimizer, has_reference=True), begin(optimizer, seed=1, has_reference=True)
    step(one)
    other.load(one.collect())
    for state in (one, other):
        step(state, 0.3)
        state.mix_reference(0.5)
    assert other.version == 2
    assert all(torch.equal(p, one.parameters[n]) for n, p in other.parameters.items())
    assert all(torch.equal(r, (one.reference or {})[n]) for n, r in (other.reference or {}).items())


def test_learning_rates_are_shares_of_the_first() -> None:
    state = begin()
    state.set_lr(0.5)
    state.set_lr(0.1)
    assert state.lrs[0][0] == pytest.approx(1e-3)


def test_who_forgets_steps_as_at_first() -> None:
    state, fresh = begin(), begin()
    step(state, 5.0)
    state.forget()
    fresh.load({**fresh.collect(), "policy": copy(state)})
    for own in (state, fresh):
        step(own, 0.1)
    assert all(torch.equal(p, fresh.parameters[n]) for n, p in state.parameters.items())


def test_a_state_of_something_else_is_refused_with_the_way_out() -> None:
    with pytest.raises(UserError, match="another model, or of another adapter"):
        begin(width=5).load(begin().collect())
    with pytest.raises(UserError, match=r"the state of AdamW, and this run steps .*resume with the same"):
        begin("muon").load(begin("adamw").collect())


def test_without_a_reference_there_is_nothing_to_mix() -> None:
    state = begin()
    state.mix_reference(0.5)
    assert state.reference is None
    assert state.collect()["reference"] is None
