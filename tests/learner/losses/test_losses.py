"""The losses' own rules; TRL's numbers are in test_trl_parity."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentrl.learner.losses.losses import Tokens, clip_masks, high_entropy_mask
from agentrl.learner.losses.objective import Objective, compute_token_losses
from agentrl.learner.losses.ratio import LEVELS, row_mean
from agentrl.learner.losses.reduction import REDUCTIONS, reduce_rows
from agentrl.settings.catalogue import bind_entry, list_own_entries
from agentrl.settings.entries import REDUCTIONS as DECLARED

LOSSES = dict(list_own_entries("loss"))


def exact(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens(logp: Tensor, advantages: Tensor) -> Tokens:
    """All of one row, old and sampled at 0."""
    zeros = torch.zeros_like(logp)
    return Tokens(logp, zeros, zeros, advantages, torch.zeros(len(logp), dtype=torch.int64), 1, zeros)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope", "delta"),
    [
        (1.0, 1.0, -1.0, None),
        (1.3, 1.0, 0.0, None),  # good, and more likely by far: enough
        (1.3, -1.0, 1.3, None),  # bad, and more likely: never enough
        (1.3, -1.0, 0.0, 1.29),  # but for a second clip
        (0.7, 1.0, -0.7, None),
        (0.7, -1.0, 0.0, None),
    ],
)
def test_the_clip_takes_the_gradient_of_what_went_far_enough(
    ratio: float, advantage: float, slope: float, delta: float | None
) -> None:
    logp = exact(ratio).log().requires_grad_()
    t = tokens(logp, exact(advantage))
    losses, _ = LOSSES["dapo"](t, logp - t.old_logprobs, delta=delta)
    torch.autograd.backward(losses.sum())
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(slope)
    low, high = clip_masks(t, (logp - t.old_logprobs).exp().detach(), 0.2, 0.28)
    assert bool(low + high) == (slope == 0.0 and delta is None)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("level", LEVELS)
def test_every_loss_makes_the_good_likelier_and_the_bad_less_so(name: str, level: str) -> None:
    logp = exact(-1.0, -1.0).requires_grad_()
    t = Tokens(logp, logp.detach(), logp.detach(), exact(1.0, -1.0), torch.tensor([0, 1]), 2, exact(0, 0))
    torch.autograd.backward(compute_token_losses(Objective(name, level), t).losses.sum())
    assert logp.grad is not None
    assert (logp.grad.sign() == exact(-1.0, 1.0)).all()


def test_a_sequence_s_ratio_is_its_mean_by_length() -> None:
    rows = torch.tensor([0, 0, 1])
    w = LEVELS["sequence"](exact(0.1, 0.3, -0.5), exact(0, 0, 0), rows, 3)
    torch.testing.assert_close(w, exact(0.2, 0.2, -0.5))
    torch.testing.assert_close(row_mean(exact(1, 2, 3), rows, 3), exact(1.5, 3, 0))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("token_truncate", [1.5, 0.5, 1.0]),
        ("token_mask", [0.0, 0.0, 1.0]),
        ("sequence_truncate", [0.8, 0.8, 1.0]),
        ("sequence_mask", [0.8, 0.8, 1.0]),
        ("geometric_truncate", [0.8**0.5, 0.8**0.5, 1.0]),
        ("geometric_mask", [0.8**0.5, 0.8**0.5, 1.0]),
    ],
)
def test_corrections(name: str, wanted: list[float]) -> None:
    difference = exact(2.0, 0.4, 1.0).log()
    rows, zeros = torch.tensor([0, 0, 1]), torch.zeros_like(difference)
    rule = bind_entry("importance_sampling", name, {"importance_sampling_min": 0.5, "importance_sampling_max": 1.5})
    rho = rule(Tokens(difference, difference, zeros, zeros, rows, 2, zeros))
    torch.testing.assert_close(rho, exact(*wanted))


def test_without_bounds_a_correction_is_the_ratio() -> None:
    for name in ("token_truncate", "token_mask"):
        old, zeros = exact(1.0, -3.0), exact(0.0, 0.0)
        rule = bind_entry("importance_sampling", name, {"importance_sampling_max": None})
        rho = rule(Tokens(old, old, zeros, zeros, torch.tensor([0, 0]), 1, zeros))
        torch.testing.assert_close(rho, exact(1.0, -3.0).exp())


def test_the_least_sure_tokens() -> None:
    assert high_entropy_mask(exact(0.1, 0.9, 0.5, 0.7), 0.5).tolist() == [0, 1, 0, 1]
    assert high_entropy_mask(exact(), 0.5).tolist() == []


@pytest.mark.parametrize("lengths", [[3], [5, 1, 4], [7] * 4])
def test_reductions(lengths: list[int]) -> None:
    def total(name: str) -> float:
        return sum(w * n for w, n in zip(reduce_rows(LOSSES[name], lengths, 10), lengths, strict=True))

    assert all(total(name) == pytest.approx(1.0) for name in ("dapo", "grpo", "bnpo", "cispo", "sapo", "vespo"))
    assert total("dr_grpo") == pytest.approx(sum(lengths) / len(lengths) / 10)
    assert total("luspo") == pytest.approx(sum(lengths) / len(lengths))
    assert len(set(reduce_rows(LOSSES["dapo"], lengths, 10))) == 1


def test_nothing_is_a_step_of_nothing() -> None:
    for reduction in REDUCTIONS.values():
        assert reduction([], 10) == []
        assert len(reduction([0], 10)) == 1


def test_each_loss_has_a_reduction() -> None:
    assert {entry.reduction for entry in LOSSES.values()} == set(REDUCTIONS) == set(DECLARED)
