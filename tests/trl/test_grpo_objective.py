"""TRL's tests of single functions of GRPOTrainer: the entropy mask, the off-policy mask."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from agentrl.learner.losses.losses import Tokens, high_entropy_mask, off_policy_mask

LOW = [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.7, 0.8, 0.9, 1.0, 1.1, 1.2]]
MASK = [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]


def mask_by_entropy(entropies: Sequence[Sequence[float]], mask: Sequence[Sequence[int]], threshold: float) -> Tensor:
    """The rows' mask: what is masked already is no token, and TRL's threshold is the share that is left out."""
    kept = torch.tensor(mask).bool()
    result = torch.zeros(kept.shape, dtype=torch.bool)
    result[kept] = high_entropy_mask(torch.tensor(entropies)[kept], 1 - threshold).bool()
    return result


def test_compute_entropy_mask_0() -> None:
    wanted = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0]]).bool()
    assert torch.equal(mask_by_entropy(LOW, MASK, 0.8), wanted)


def test_compute_entropy_mask_1() -> None:
    entropies = [[0.1, 0.2, 0.3, 1.4, 0.5, 0.14], [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]]
    wanted = torch.tensor([[0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 0, 0]]).bool()
    assert torch.equal(mask_by_entropy(entropies, [[1, 1, 1, 1, 0, 0]] * 2, 0.8), wanted)


def test_compute_entropy_mask_lower_threshold() -> None:
    wanted = torch.tensor([[0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 0, 0]]).bool()
    assert torch.equal(mask_by_entropy(LOW, MASK, 0.5), wanted)


def test_compute_entropy_threshold_0() -> None:
    assert torch.equal(mask_by_entropy(LOW, MASK, 0.0), torch.tensor(MASK).bool())


def test_compute_entropy_threshold_1() -> None:
    wanted = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0]]).bool()
    assert torch.equal(mask_by_entropy(LOW, MASK, 1.0), wanted)


def test_compute_entropy_all_masked() -> None:
    assert not mask_by_entropy(LOW, [[0] * 6] * 2, 0.5).any()


def keeps(advantage: float, logps: Sequence[float], threshold: float = 1.0) -> bool:
    """Return True if a row is trained whose tokens the engine sampled with a logprob of 0."""
    logp, zeros = torch.tensor(logps), torch.zeros(len(logps))
    rows = torch.zeros(len(logps), dtype=torch.long)
    kept = off_policy_mask(Tokens(logp, zeros, zeros, zeros + advantage, rows, 1, zeros), threshold)
    assert len(set(kept.tolist())) == 1
    return bool(kept[0])


@pytest.mark.parametrize(("advantage", "logp", "kept"), [(1.0, -2.0, True), (-1.0, -0.5, True), (-1.0, -2.0, False)])
def test_get_off_policy_mask(advantage: float, logp: float, kept: bool) -> None:
    assert keeps(advantage, [logp] * 4) == kept


def test_get_off_policy_mask_padding() -> None:
    """Rows have no padding here: a mean is of a row's own tokens, beside rows of any length."""
    assert not keeps(-1.0, [-2.0, -2.0])
    assert keeps(-1.0, [-0.5, -0.5])
    logp, zeros = torch.tensor([-2.0, -2.0, -0.5, -0.5, -0.5]), torch.zeros(5)
    rows = torch.tensor([0, 0, 1, 1, 1])
    kept = off_policy_mask(Tokens(logp, zeros, zeros, zeros - 1.0, rows, 2, zeros), 1.0)
    assert kept.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
